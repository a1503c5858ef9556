"""Run random changes of Python state: ``python -m tests.fuzz.state --calls 50000 --seed 0``.

A program reads values of every kind at places of every kind: attributes, containers, slots, classes, globals, closures,
defaults, partials, arguments and groups of optimizers, in modules, methods, functions and training steps. They are
replaced, changed in place, deleted and brought back, by other threads and by the calls themselves; every answer and
every place must be as with an eager twin, and where values stay, graphs must serve. A program that differs is made
smaller and printed as text that runs by itself.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import random
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

from tests.fuzz.changes import arguments, run_programs
from tests.fuzz.program import prepare, shrunk
from tests.fuzz.state_grammar import (
    CLASSES,
    DONE_BEYOND,
    FORMS,
    GROUPS,
    KINDS,
    OPTIMIZERS,
    OWN_OPTIMIZER,
    SPOTS,
    STATE_GAPS,
    UNDONE,
    WHERE,
    Kind,
    Spot,
)
from tests.fuzz.state_twins import STEADY, Unfinished
from tests.fuzz.twins import Different

SIZES = ([4], [2, 4], [1, 3, 6])
HEADER = """\
import sys

sys.path[:0] = [".", "tests/support"]

from tests.fuzz.state_twins import StateTwins

SOURCE = '''
"""
RARE = 0.3  # what a break makes of few calls is larger
CHARACTERS = ("steady", "steady", "steady", "toggled", "many", "effect", "effect")


@dataclasses.dataclass(frozen=True)
class Placed:
    """A value at a place: names in the grammar, the code that uses it, directly or once it is read, and effects.

    If `broken` is "before" or "after", an eager break makes the effect, before or after the value is read; if it is
    `rare`, for some data only.
    """

    number: int
    spot: str
    kind: str
    value: str
    use: str
    where: str
    is_direct: bool = False
    effect: str = ""
    broken: str = ""
    rare: bool = False


@dataclasses.dataclass(frozen=True)
class StateProgram:
    """Places, and events: ("call", rows, mode, ""), ("change", number, statement, how), ("copy",) or ("serves",)."""

    seed: int
    form: str
    optimizer: str
    pieces: tuple[Placed, ...]
    settings: dict[str, Any]
    events: tuple[tuple[Any, ...], ...]
    output: str = "h"
    grads: bool = False

    @property
    def calls(self) -> int:
        return sum(event[0] == "call" for event in self.events)

    def text(self, device: str = "cpu") -> str:
        """Runnable text."""
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        places = tuple(self._fill(place_of(SPOTS[placed.spot]), placed, "m") for placed in self.pieces)
        made = f"{self.form!r}, {device!r}, {places!r}, {self.seed}{settings}"
        lines = [HEADER, self._source().replace("\\", "\\\\"), f"'''\n\ntwins = StateTwins(SOURCE, {made})\n"]
        return "".join([*lines, *map(self._statement, self.events)])

    def _source(self) -> str:
        """The file that both twins run."""
        is_module = self.form in ("module", "mixin", "holding")
        parts = [CLASSES, OWN_OPTIMIZER if self.optimizer == "own" else ""]
        setup, body, forward, after = [], [], [], []
        for placed in self.pieces:
            spot, owner = SPOTS[placed.spot], "Part$" if placed.where == "part" else "Net"
            fill = functools.partial(self._fill, placed=placed, owner="self")
            parts.append(f"\n\n{fill(spot.file)}\n" if spot.file else "")
            code = [f"v$ = {spot.read}", placed.use.replace("V", "v$")]
            if placed.is_direct:
                code = [placed.use.replace("V", f"({spot.read})")]
            breaking = []
            if placed.broken:
                effect = _indented([fill(placed.effect)], 1)
                effect = (
                    f"    if float(h[0, 0]) > {RARE}:\n{textwrap.indent(effect, '    ')}" if placed.rare else effect
                )
                effect += "    return h + 0\n"
                breaking = [f"@BREAK\ndef act{placed.number}(self, h):\n{effect}"]
                code.insert(len(code) if placed.broken == "after" else 0, "h = self.act$(h)")
                named = tuple(re.findall(r"[A-Za-z_]\w*", fill(placed.effect)))
                code.append(f"named$ = {named}")  # what only breaks name does not count
            elif placed.effect:
                code.append(placed.effect)
            code = [fill(line) for line in code]
            if owner == "Part$":
                parts.append(
                    f"\n\nclass Part{placed.number}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
                    + _indented([fill(spot.setup)], 2)
                    + _indented([fill(spot.body), *breaking], 1)
                    + f"    def forward(self, h{_argument(placed, '=None')}):\n"
                    + _indented([*code, "return h"], 2)
                )
                setup.append(f"self.part{placed.number} = Part{placed.number}()")
                forward.append(f"h = self.part{placed.number}(h{_argument(placed)})")
                continue
            setup.append(fill(spot.setup))
            body += [fill(spot.body), *breaking]
            turn = f"def turn{placed.number}(self, h{_argument(placed, '=None')}):\n"
            turn += _indented([*code, "return h"], 1)
            if placed.where == "method":
                body.append(turn)
                forward.append(f"h = self.turn{placed.number}(h{_argument(placed)})")
            elif placed.where == "function":
                after.append(f"\n\n{turn}")
                forward.append(f"h = turn{placed.number}(self, h{_argument(placed)})")
            else:
                forward += code
        arguments = "".join(_argument(placed, "=None") for placed in self.pieces)
        start, end = ["h = self.first(x)"], ["return h"]
        if self.form == "step":
            groups = "[{'params': [self.first.weight]}, {'params': [self.first.bias]}]"
            setup.append(f"self.opt = {OPTIMIZERS[self.optimizer].replace('GROUPS', groups)}")
            end = [
                "loss = h.square().mean()",
                "loss.backward()",
                "self.opt.step()",
                "self.opt.zero_grad()",
                "return loss.detach()",
            ]
        name = "run" if self.form in ("holding", "method", "step") else "forward"
        start_of_init = ["super().__init__()"] if is_module else []
        frozen = [] if self.form == "step" else ["self.first.requires_grad_(False)"]
        start_of_init += ["self.first = nn.Linear(W, W).to(DEVICE)", *frozen]
        parts.append(
            f"\n\nclass Net{'(nn.Module)' if is_module else ''}:\n    def __init__(self):\n"
            + _indented([*start_of_init, *setup], 2)
            + _indented(["self.run = WRAP(self.run)"] if self.form == "holding" else [], 2)
            + _indented(body, 1)
        )
        code = [*start, *forward, *end]
        if self.form == "function":
            code = [line.replace("self", "STATE") for line in code]
            after.append(f"\n\nSTATE = Net()\n\n\ndef run(x{arguments}):\n" + _indented(code, 1))
        else:
            parts.append(f"\n    def {name}(self, x{arguments}):\n" + _indented(code, 2))
        return "".join([*parts, *after, "\n\ndef make():\n", _indented([_MAKES[self.form]], 1)])

    def _fill(self, text: str, placed: Placed, owner: str) -> str:
        """Put names and the first value into a text of code, or of a change if the owner is ``m``."""
        is_part = placed.where == "part"
        inside = f"{owner}.part$" if is_part and owner == "m" else owner
        text = re.sub("@(?=[.,)])", inside, text).replace("OWN", "Part$" if is_part else "Net")
        return text.replace("VALUE", placed.value).replace("$", str(placed.number))

    def _statement(self, event: tuple[Any, ...]) -> str:
        kind, *rest = event
        placed = {each.number: each for each in self.pieces}
        if kind == "call":
            rows, mode, _ = rest
            mode = "grad" if self.form == "step" else mode
            given = ", ".join(f"box{each.number}=this.BOX{each.number}" for each in self.pieces if _argument(each))
            return f"twins.call({rows}, {mode!r}{f', {given!r}' if given else ''})\n"
        if kind == "change":
            number, statement, how = rest
            if number is not None and number not in placed:
                return ""
            if number is not None:
                statement = self._fill(statement, placed[number], "m")
            return f"twins.change({statement!r}{f', {how!r}' if how else ''})\n"
        return f"twins.{kind}()\n"

    def difference(self, device: str = "cpu") -> str | None:
        """Run it; how the graphs differ from eager, or None."""
        return self.run(device)[0]

    def run(self, device: str = "cpu") -> tuple[str | None, collections.Counter[str]]:
        """Run it; how the graphs differ from eager, or None, and what they did."""
        namespace: dict[str, Any] = {"__name__": "program"}
        found, done = None, collections.Counter[str]()
        try:
            exec(compile(self.text(device), "<program>", "exec"), namespace)
        except Different as error:
            found = str(error)
        except Unfinished:
            done["unfinished"] += 1
        finally:
            twins = namespace.get("twins")
            if twins is not None:
                done |= {name: getattr(twins.stats, name) for name in ("captures", "recaptures", "replays")}
                done["calls"] = twins.turn
            namespace.clear()
        return found, done


_MAKES = {
    "module": "net = Net().eval()\nreturn net, net",
    "mixin": "net = WRAP(Net)().eval()\nreturn net, net",
    "holding": "net = Net().eval()\nreturn net.run, net",
    "method": "net = Net()\nreturn WRAP(net.run), net",
    "function": "return WRAP(run), STATE",
    "step": "net = Net()\nreturn WRAP(net.run, optimizers=net.opt, modules=net.first), net",
}


def place_of(spot: Spot) -> str:
    """Return a place as changes name it."""
    return spot.at or spot.read.replace("self", "@")


def _argument(placed: Placed, end: str = "") -> str:
    return f", box{placed.number}{end}" if "box$" in SPOTS[placed.spot].read else ""


def _indented(lines: Sequence[str], depth: int) -> str:
    text = "\n".join(line.rstrip("\n") for line in lines if line)
    return textwrap.indent(text + "\n", "    " * depth) if text else ""


def gaps_of(placed: Placed) -> set[str]:
    """Name what the library does not do about a place."""
    return {name for name, spots in STATE_GAPS.items() if placed.spot in spots}


def fits(spot: Spot, kind_name: str) -> bool:
    """True if a place can hold values of a kind."""
    kind = KINDS[kind_name]
    # It is as deep as walks look: four containers and objects in each other below an attribute.
    is_deep = kind_name == "nested" and "= VALUE" not in spot.setup + spot.file + spot.body
    return (not spot.hashable or kind.hashable) and kind_name not in spot.without and not is_deep


def state_program(seed: int, without: frozenset[str] = frozenset()) -> StateProgram:
    """A program of this seed; `without` names gaps that it must not need."""
    rng = random.Random(seed)
    form, character = rng.choice(FORMS), rng.choice(CHARACTERS)
    pieces = tuple(_placed(rng, number, form, character, without) for number in range(rng.choice([1, 1, 1, 2, 3])))
    settings: dict[str, Any] = {} if form == "step" else {"capture_sizes": rng.choice(SIZES)}
    if settings and rng.random() < 0.2:
        settings["outputs"] = "static"
    if any(placed.broken for placed in pieces):
        settings["mode"] = "PIECEWISE"
    optimizer = rng.choice(sorted(OPTIMIZERS)) if form == "step" else ""
    events = tuple(_events(rng, form, character, pieces, settings))
    return StateProgram(seed, form, optimizer, pieces, settings, events)


def _placed(rng: random.Random, number: int, form: str, character: str, without: frozenset[str]) -> Placed:
    while True:
        spot_name, kind_name = rng.choice(sorted(SPOTS)), rng.choice(sorted(KINDS))
        where = rng.choice(WHERE)
        placed = Placed(number, spot_name, kind_name, "", "", where)
        if fits(SPOTS[spot_name], kind_name) and without.isdisjoint(gaps_of(placed)):
            break
    spot, kind = SPOTS[spot_name], KINDS[kind_name]
    is_own = form in ("module", "mixin") and not spot.file
    is_found = is_own or (kind_name in DONE_BEYOND and "Frozen" not in spot.setup)
    is_done = character == "effect" and is_found and spot_name not in UNDONE
    effect = _effect(rng, spot, kind) if is_done else ""
    is_direct = rng.random() < 0.5
    # What counts by identity is not distinguished from what runs set while calls are refused.
    broken = rng.choice(["", "before", "after"]) if effect and is_own and kind_name != "large array" else ""
    value, use = rng.choice(kind.values), rng.choice(kind.uses)
    rare = bool(broken) and not kind.memory and rng.random() < 0.5  # tensors that breaks replace are not seen
    return Placed(number, spot_name, kind_name, value, use, where, is_direct, effect, broken, rare)


def _effect(rng: random.Random, spot: Spot, kind: Kind) -> str:
    """What a call does to the place itself."""
    inside = spot.inside or ("none" if spot.read.endswith(")") else f"{spot.read} = NEW")
    choices = [effect.replace("AT", spot.read) for effect in kind.effects]
    if inside != "none":
        choices += [inside.replace("NEW", kind.next.replace("V", f"({spot.read})"))] * bool(kind.next)
        choices.append(inside.replace("NEW", rng.choice(kind.values)))
    return rng.choice(choices) if choices else ""


def _events(
    rng: random.Random, form: str, character: str, pieces: Sequence[Placed], settings: dict[str, Any]
) -> Iterator[tuple[Any, ...]]:
    """Runs of calls, with changes in between."""
    sizes = settings.get("capture_sizes", [4])
    rows, mode = rng.choice(sizes), rng.choice(["no_grad", "inference_mode"])
    mode = "grad" if form == "step" else mode
    copies = form in ("module", "mixin", "holding")
    changes = {placed.number: list(_changes(rng, placed, character)) for placed in pieces}
    yield from _calls(rng, rows, mode, sizes, rng.randint(0, 6))
    # Memory and functions that move too often make calls run eagerly.
    moved = any(KINDS[placed.kind].memory or "(NEW)" in SPOTS[placed.spot].put for placed in pieces)
    most = 2 if moved else 3
    for _ in range(rng.randint(2, most) if character == "steady" else rng.randint(3, 6)):
        placed = rng.choice(pieces)
        if form == "step" and rng.random() < 0.3:
            place, values = rng.choice(sorted(GROUPS.values()))
            yield "change", None, f"{place.replace('@', 'm')} = {rng.choice(values)}", ""
        for _ in range(rng.choice([1, 1, 1, 2]) if character != "steady" else 1):
            yield "change", placed.number, rng.choice(changes[placed.number]), _how(rng, form)
        count = rng.randint(1, 3) if character in ("toggled", "many") else rng.randint(3, 7)
        yield from _calls(rng, rows, mode, sizes, count)
        if form != "step" and rng.random() < 0.1:
            yield from _refused_calls(rng, form, mode, sizes, changes)
        if copies and rng.random() < 0.05:
            yield ("copy",)
        if rng.random() < 0.1:
            rows = rng.choice(sizes)
    yield from _calls(rng, rows, mode, [rows], STEADY)
    if character == "steady" and not any(SPOTS[placed.spot].is_eager for placed in pieces):
        yield ("serves",)


def _how(rng: random.Random, form: str) -> str:
    how = ["thread"] * (rng.random() < 0.1) + ["other"] * (rng.random() < 0.05)
    return " ".join(how + ["unwrap"] * (rng.random() < 0.3))


def _changes(rng: random.Random, placed: Placed, character: str) -> Iterator[str]:
    """Statements that change a place; few different ones, unless there are to be many values."""
    spot, kind = SPOTS[placed.spot], KINDS[placed.kind]
    put = spot.put or "AT = NEW"
    most = {"steady": 2, "toggled": 2}.get(character, 6)
    values = [placed.value, *rng.sample(kind.values, min(most - 1, len(kind.values)))]
    found = [put.replace("NEW", value) for value in values]
    in_place = [change for change in kind.changes if not (place_of(spot).endswith(")") and "= " in change)]
    found += rng.sample(in_place, min(len(in_place), most))
    found += [spot.drop] * bool(spot.drop) + rng.sample(spot.more, min(1, len(spot.more)))
    if character == "many":
        found.append(put.replace("NEW", rng.choice(KINDS[rng.choice(sorted(KINDS))].values)))
    at = place_of(spot)
    yield from (change.replace("AT", at) for change in found)


def _calls(rng: random.Random, rows: int, mode: str, sizes: Sequence[int], count: int) -> Iterator[tuple[Any, ...]]:
    for _ in range(count):
        other = len(sizes) > 1 and rng.random() < 0.1
        at = rng.choice(["no_grad", "inference_mode", "eager"]) if mode != "grad" and rng.random() < 0.05 else mode
        yield "call", rng.randint(1, max(sizes)) if other else rows, at, ""


def _refused_calls(
    rng: random.Random, form: str, mode: str, sizes: Sequence[int], changes: dict[int, list[str]]
) -> Iterator[tuple[Any, ...]]:
    """Calls that no graph serves, of too many rows or in training mode, often enough to run without a look."""
    trains = form in ("module", "mixin") and rng.random() < 0.5
    rows = rng.choice(sizes) if trains else max(sizes) + rng.randint(1, 3)
    if trains:
        yield "change", None, "m.train()", ""
    for count in (rng.randint(0, 40), rng.randint(1, 40)):
        yield from (("call", rows, mode, "") for _ in range(count))
        number = rng.choice(sorted(changes))
        yield "change", number, rng.choice(changes[number]), _how(rng, form)
    if trains:
        yield "change", None, "m.eval()", ""


def outcome(
    seed: int, device: str, *, without: frozenset[str] = frozenset(), whole: bool = False
) -> tuple[str | None, collections.Counter[str]]:
    """Run the program of a seed; return what differs, with its text, or None, and what its graphs did."""
    prepare()
    program = state_program(seed, without)
    found, done = program.run(device)
    if found is None:
        return None, done
    small: Any = program if whole else shrunk(program, lambda tried: _fails(tried, device))  # type: ignore[arg-type, type-var]
    return f"# seed {seed}: {found}\n# made smaller: {small.difference(device)}\n{small.text(device)}", done


def _fails(program: Any, device: str) -> bool:
    try:
        return bool(program.pieces) and program.difference(device) is not None
    except Exception:  # what it lacks now, it needs
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run programs until there were so many calls; 1 if any differs."""
    options = arguments("tests.fuzz.state", __doc__, STATE_GAPS).parse_args(argv)
    without = frozenset(filter(None, options.without.split(",")))
    return run_programs(
        functools.partial(outcome, device=options.device, without=without, whole=options.whole), options
    )


if __name__ == "__main__":
    sys.exit(main())
