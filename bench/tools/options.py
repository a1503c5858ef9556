"""How the options of command lines are read; without torch, which a measured process may have to load later."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

P = TypeVar("P")


def numbers(text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers."""
    return tuple(int(part) for part in text.split(","))


def names(known: Iterable[str], separator: str = ",") -> Callable[[str], list[str]]:
    """Reads names that are known, for `argparse`."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(separator)]
        unknown = [name for name in found if name not in known]
        if unknown:
            arms = f"{separator} ".join(known)
            raise argparse.ArgumentTypeError(f"no arm is called {', '.join(unknown)}; the arms are {arms}")
        return found

    return read


def changed(plan: P, given: dict[str, Any]) -> P:
    """A plan, a dataclass, with the options that were given in place of its own."""
    known = {field.name for field in dataclasses.fields(plan)}  # type: ignore[arg-type]
    return dataclasses.replace(plan, **{key: value for key, value in given.items() if key in known and value})  # type: ignore[type-var]


def chosen(*, models: str, arms: str, processes: str) -> dict[str, Any]:
    """A plan's fields as these environment variables have them, where they are set; names are separated by commas."""
    given = {name: os.environ.get(variable) for name, variable in (("models", models), ("arms", arms))}
    found: dict[str, Any] = {name: tuple(text.split(",")) for name, text in given.items() if text}
    return found | ({"processes": int(os.environ[processes])} if os.environ.get(processes) else {})
