"""Random programs: a module's class, its settings, and what happens to it, as text that runs by itself."""

from __future__ import annotations

import dataclasses
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from seeds import leave_absent_devices_unseeded

import simplegraph as sg
from simplegraph.base.extras import memory_sources
from tests.fuzz.grammar import (
    CALL_PROMISES,
    CALLS,
    CHANGE_PROMISES,
    CHANGES,
    GRAPHS,
    MIXING,
    OUTPUTS,
    PIECES,
    PLAIN,
    TROUBLE,
    Piece,
)
from tests.fuzz.twins import Different

HEADER = """\
import collections
import io
import itertools
import random
import sys
import threading

sys.path[:0] = [".", "tests/support"]

import numpy as np
import torch
from torch import nn

import simplegraph as sg
from tests.fuzz.twins import Bare, Box, Scaling, Twins, W, attend, refuse_captures

DEVICE = torch.device("{device}")
ESCAPED = {{}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.tail, self.drop = nn.Linear(W, W), nn.Tanh(), nn.Dropout(0.5)
        self.blocks, self.param = nn.Sequential(nn.Linear(W, W)), nn.Linear(W, W)
        self.register_buffer("shift", torch.randn(W))
        self.register_buffer("rows", torch.randn(16, W))
        self.table, self.tables, self.maybe = torch.randn(W).to(DEVICE), [torch.randn(W).to(DEVICE)], None
        self.looked_up, self.placed = nn.Parameter(torch.randn(9, W)), nn.Parameter(torch.randn(9, W))
        self.register_buffer("place", torch.ones(1, dtype=torch.int64))
        self.unlisted = [nn.Linear(W, W).to(DEVICE).requires_grad_(False)]
        self.late, self.more, self.listed, self.bare = {{}}, {{"n": 1}}, [[]], Bare()
        self.scaling = Scaling(torch.ones(W).to(DEVICE))
        self.grads, self.scale, self.hook, self.old = {grads}, 0.5, None, None
"""
BEFORE = """\
h = self.first(x) + self.shift + self.table * 0.1
h = self.unlisted[0](self.blocks(h).tanh()) * 0.5 + self.tables[0] * 0.1
h = h if self.maybe is None else h * self.maybe
for tensor in (*self.late.values(), self.more.get("a"), *self.listed[0], vars(self.bare).get("value")):
    h = h if tensor is None else h + tensor * 0.1
h = self.scaling(h) + self.placed[self.place] * 0.1
if isinstance(box, dict) and "at" in box:
    h = h + self.looked_up[box["at"]] * 0.1
"""
AFTER = """\
h = self.tail(self.drop(self.param(h)))
if isinstance(box, str):
    raise LookupError(box)
"""
MODES = ["no_grad", "no_grad", "inference_mode", "inference_mode", "grad", "no_grad autocast", "no_grad eager"]
MODES += ["inference_mode autocast", "no_grad flops"]
# Pieces that a deep copy does not go on with: they hold a generator, or something outside.
NO_COPIES = {
    "own noise",
    "listed noise",
    "escapes to a global",
    "escapes to a closure",
    "escapes to a deque",
    "input escapes to a global",
    "view of an input escapes",
    "read from a global",
    *("own random", "quiet random", "iterator", "count", "file"),
    *("closure's number", "function's number", "thread's number", "event"),
}
# Proofs find these for sure by eager runs of half of the rows and of the padded ones, but breaks run once a call.
UNPROVEN_BESIDE_BREAKS = {"expert's load", "odd count"}
SIZES = [[4], [4, 6], [1, 4, 8], [3, 6], [2, 3, 4, 5, 6], [16]]


@dataclasses.dataclass(frozen=True)
class Program:
    """Names of pieces, settings, and events: ("call", rows, mode, arguments), ("change", name) or ("graphs", name)."""

    seed: int
    pieces: tuple[str, ...]
    output: str
    settings: dict[str, Any]
    grads: bool
    events: tuple[tuple[Any, ...], ...]

    @property
    def calls(self) -> int:
        return sum(event[0] == "call" for event in self.events)

    def text(self, device: str = "cpu") -> str:
        """Runnable text."""
        pieces = [PIECES[name] for name in self.pieces]
        numbered = list(enumerate([*pieces, OUTPUTS[self.output]]))
        lines = [HEADER.format(device=device, grads=self.grads)]
        lines += [
            _indented(piece.setup.replace("$", str(index)).replace("_place(", "self._place("))
            for index, piece in numbered
        ]
        lines += ["\n    @staticmethod\n    def _place(hidden):\n        hidden.to(DEVICE).requires_grad_(False)\n"]
        lines += ["\n    def forward(self, x, y=None, box=None):\n", _indented(BEFORE)]
        lines += [_indented(piece.forward.replace("$", str(index))) for index, piece in numbered[:-1]]
        lines += [_indented(AFTER), _indented(OUTPUTS[self.output].forward), "\n\n"]
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        lines += [f"twins = Twins(Net, DEVICE, {self.seed}, {not self.grads}{settings})\n"]
        return "".join([*lines, *map(_statement, self.events)])

    def difference(self, device: str = "cpu") -> str | None:
        """Run it; how the module with graphs differs from its twin, or None."""
        return self.run(device)[0]

    def run(self, device: str = "cpu") -> tuple[str | None, Counter[str]]:
        """Run it; how the module with graphs differs from its twin, or None, and what its graphs did."""
        namespace: dict[str, Any] = {"__name__": "program"}
        found, done = None, Counter[str]()
        try:
            exec(compile(self.text(device), "<program>", "exec"), namespace)
        except Different as error:
            found = str(error)
        finally:
            if "twins" in namespace:
                stats = namespace["twins"].model.graph_stats
                done |= {name: getattr(stats, name) for name in ("captures", "recaptures", "replays")}
            namespace.clear()  # else both modules live on with their class, which caches by class keep
            _restore()
        return found, done


def _restore() -> None:
    """Undo what a program may change for the whole process."""
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.nn.modules.module._global_forward_hooks.clear()
    sg.wake()
    memory_sources.clear()


def _indented(code: str) -> str:
    return textwrap.indent(code.rstrip("\n") + "\n", "        ") if code else ""


def _statement(event: tuple[Any, ...]) -> str:
    kind, *rest = event
    if kind == "call":
        rows, mode, arguments = rest
        return f"twins.call({rows}, {mode!r}, {CALLS[arguments]!r})\n"
    if kind == "capture":
        return f"twins.capture({rest[0]})\n"
    return f"twins.{kind}({(CHANGES if kind == 'change' else GRAPHS)[rest[0]]!r})\n"


def allowed(table: dict[str, Piece], without: Collection[str]) -> list[str]:
    """The names of a table's pieces that need none of the promises left out."""
    return [name for name, piece in table.items() if piece.promise not in without]


def random_program(seed: int, without: Collection[str] = ()) -> Program:
    """A program of this seed; `without` names promises that it must not need."""
    rng = random.Random(seed)
    names, plain = allowed(PIECES, without), sorted(PLAIN)
    pieces = tuple(rng.choice(names if rng.random() < 0.5 else plain) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.15:  # a construct before a failure, and again after it
        pieces = pieces[0], rng.choice(allowed(TROUBLE, without)), pieces[0]
    elif rng.random() < 0.1:  # rows that are mixed after a break, which proofs do not run again
        pieces = rng.choice([name for name in plain if "break" in name]), rng.choice(allowed(MIXING, without))
    if "rare data" in without and any("break" in name for name in pieces):
        pieces = tuple(name for name in pieces if name not in UNPROVEN_BESIDE_BREAKS) or ("break",)
    outputs = allowed(OUTPUTS, without)
    settings: dict[str, Any] = {"capture_sizes": rng.choice(SIZES)}
    if rng.random() < 0.2:
        settings["padding"] = False
    if rng.random() < 0.2:
        settings["outputs"] = "static"
    if any("break" in name for name in pieces) or rng.random() < 0.1:
        settings["mode"] = "PIECEWISE"
    if "folded" in pieces and rng.random() < 0.7:
        settings["optimized"] = True
    return Program(
        seed, pieces, rng.choice(outputs) if rng.random() < 0.6 else "h", settings, rng.random() < 0.2,
        tuple(_random_events(rng, settings, pieces, without)),
    )  # fmt: skip


def _random_events(
    rng: random.Random, settings: dict[str, Any], pieces: Collection[str], without: Collection[str]
) -> Iterator[tuple[Any, ...]]:
    """Runs of calls that are long enough for replays, with changes in between."""
    if rng.random() < 0.15 and NO_COPIES.isdisjoint(pieces):
        yield "capture", rng.choice([1, 2, 4])
    calls = [name for name in sorted(CALLS) if CALL_PROMISES.get(name) not in without]
    sizes = [*settings["capture_sizes"], *settings["capture_sizes"], 1, 2, 3, 5, 7]
    changes = [name for name in CHANGES if CHANGE_PROMISES.get(name) not in without]
    # Under autocast folded weights are rounded once more than the layer's own; and beside breaks, where no half of the
    # rows is run, rows that are mixed by less than its rounding are not found.
    mixed = any("break" in name for name in pieces) and not MIXING.keys().isdisjoint(pieces)
    modes = [mode for mode in MODES if not ((settings.get("optimized") or mixed) and "autocast" in mode)]
    for _ in range(rng.randint(2, 4)):
        mode, arguments = rng.choice(modes), rng.choice(calls) if rng.random() < 0.6 else "x"
        size = rng.choice(sizes)
        for _ in range(rng.randint(3, 6)):
            yield "call", size if rng.random() < 0.7 else rng.choice(sizes), mode, arguments
        for _ in range(rng.choice([0, 1, 1, 2])):
            yield ("graphs", rng.choice(sorted(GRAPHS))) if rng.random() < 0.1 else ("change", rng.choice(changes))
        if rng.random() < 0.5:
            yield "call", size, mode, arguments


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program found that still fails: without events, pieces and settings that do not matter."""
    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            if fails(smaller):
                program, again = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    events = program.events
    for length in (len(events) // 2, len(events) // 4, 1):
        for start in range(0, len(events), max(1, length)) if length else ():
            yield dataclasses.replace(program, events=events[:start] + events[start + length :])
    for index in range(len(program.pieces)):
        yield dataclasses.replace(program, pieces=program.pieces[:index] + program.pieces[index + 1 :])
    if program.output != "h":
        yield dataclasses.replace(program, output="h")
    for name in program.settings.keys() - {"capture_sizes"}:
        yield dataclasses.replace(program, settings={k: v for k, v in program.settings.items() if k != name})
    if program.grads:
        yield dataclasses.replace(program, grads=False)
    for index, event in enumerate(events):
        if event[0] == "call" and event[2:] != ("no_grad", "x"):
            for simpler in (("call", event[1], "no_grad", event[3]), ("call", event[1], event[2], "x")):
                if simpler != event:
                    yield dataclasses.replace(program, events=(*events[:index], simpler, *events[index + 1 :]))


def prepare() -> None:
    """Make this process run programs quickly, also one of its own."""
    torch.set_num_threads(1)
    leave_absent_devices_unseeded()


def report(seed: int, device: str, without: Collection[str] = (), *, whole: bool = False) -> str | None:
    """Run the program of a seed; return what differs, with its text, or None."""
    prepare()
    program = random_program(seed, without)
    found = program.difference(device)
    if found is None:
        return None
    small = program if whole else shrunk(program, lambda tried: tried.difference(device) is not None)
    return f"# seed {seed}: {found}\n# made smaller: {small.difference(device)}\n{small.text(device)}"
