"""Read the options of command lines, without torch, which a measured process may have to load later.

Lists are separated by commas. A refusal says what is valid, before anything is measured or written.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

P = TypeVar("P")
Options = Mapping[str, Mapping[str, Any]]  # by name, as `add_argument` takes them

CONFIGS = Path(__file__).parents[1] / "models" / "configs"
SHAPES = tuple(sorted(path.name for path in CONFIGS.iterdir()))
DEVICES = ("cuda", "cpu")


def listed(known: Iterable[str]) -> str:
    """Join names for a help text or an error."""
    return ", ".join(known)


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Read ``1,2,4``: whole numbers of at least 1."""
    try:
        return tuple(count(part) for part in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; expected numbers separated by commas, such as 1,2,4") from None


def positive(text: str) -> float:
    """Read a number above 0, of seconds or of anything else that is measured."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def rates(text: str) -> tuple[float, ...]:
    """Read ``20,40.5,inf``: numbers above 0."""
    return tuple(positive(part) for part in text.split(","))


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a reader of known names, separated by commas; blanks and commas in a name are written as dashes."""
    found = {written(name): name for name in known}
    plain = {name: name for name in known if "," not in name}

    def read(text: str) -> tuple[str, ...]:
        given = [part.strip() for part in text.split(",")]
        unknown = [name for name in given if name not in found | plain]
        if unknown:
            raise argparse.ArgumentTypeError(f"{listed(map(repr, unknown))} is none of {listed(found)}")
        return tuple((found | plain)[name] for name in given)

    return read


def written(name: str) -> str:
    """Return a name as command lines take it: without a blank or comma."""
    return name.replace(", ", "-").replace(" ", "-")


def name_list(known: Collection[str], what: str) -> dict[str, Any]:
    """Return the settings of an option that takes some of these names, which its help lists."""
    help_text = f"{what}; separated by commas, of {listed(map(written, known))}"
    return {"type": names(known), "metavar": "NAME[,NAME]", "help": help_text}


def folder_or(kind: str, *known: str) -> Callable[[str], str]:
    """Return a reader of one of these names of a kind of model, or a folder with a config.json."""

    def read(text: str) -> str:
        if text in known or (Path(text) / "config.json").is_file():
            return text
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {kind}; expected {listed(known)}, or a folder with a config.json"
        )

    return read


def model(*others: str) -> Callable[[str], str]:
    """Return a reader of a shape's name, one of these others, or a folder with a config.json."""
    return folder_or("model", *others, *SHAPES)


def model_name(*others: str, default: str = "; 8b on a GPU, else tiny by default") -> dict[str, Any]:
    """Return the settings of ``--model``."""
    return {"type": model(*others), "help": f"{listed((*others, *SHAPES))}, or a folder with a config.json{default}"}


def device(text: str) -> str:
    """Read ``cuda``, where there is a GPU, or ``cpu``."""
    if text not in DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {listed(DEVICES)}")
    import torch  # needed to tell, and only where a device is named

    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("this machine has no GPU that torch can use; expected cpu")
    return text


DEVICE: Options = {
    "--device": {"type": device, "metavar": "{cuda,cpu}", "help": "the GPU where there is one by default"}
}
TP: Options = {
    "--tp": {"type": count, "default": 1, "help": "ranks of tensor parallelism: torchrun --nproc-per-node N"}
}
PRELOADED: Options = {
    "--preloaded": {
        "action": "store_true",
        "help": "call simplegraph.preload before the clock, in every arm: what it loads is in no figure",
    }
}


def json_file(default: Path | None = None) -> Options:
    """Return ``--json FILE``."""
    help_text = "file for the figures" + (f"; {default} by default" if default else "")
    return {"--json": {"type": Path, "default": default, "metavar": "FILE", "help": help_text}}


def command_line(name: str, doc: str | None, options: Options) -> argparse.ArgumentParser:
    """Make the parser of a benchmark's command line; `name` is its module's."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=doc)
    for option, settings in options.items():
        parser.add_argument(option, **settings)
    return parser


def changed(plan: P, given: dict[str, Any]) -> P:
    """Return a plan, a dataclass, with the options that were given in place of its own."""
    known = {field.name for field in dataclasses.fields(plan)}  # type: ignore[arg-type]
    return dataclasses.replace(plan, **{key: value for key, value in given.items() if key in known and value})  # type: ignore[type-var]
