"""A random module with graphs and its eager twin, called from any stream and thread, and compared at every call."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from eager_twin import difference
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.emulator.device import emulator
from tests.fuzz.grammar import CHANGES, PLAIN
from tests.fuzz.program import SIZES, Program
from tests.fuzz.twins import Box

WIDTHS = (6, 64, 256)
MORE = ("positions", "x written", "x's column written", "y written")
OUTPUTS = ("h", "h", "pair", "dict", "list", "two for one", "columns", "views", "twice", "constant")
# Moves of what graphs read, in place and otherwise.
MOVES = (
    *("weight data", "weight in place", "weight filled", "weight replaced", "load", "load, assign", "swap"),
    *("to and back", "buffer replaced", "buffer in place", "plain tensor replaced", "plain tensor in a list"),
    *("plain tensor's data", "hidden bias in place", "submodule replaced", "submodule in a container"),
)
KEPT = 6  # outputs of earlier calls that must stay as they were


class Different(AssertionError):
    """The module with graphs and its twin differ."""


def random_net(seed: int) -> tuple[Program, int]:
    """Make the text of a module that graphs can serve, with its settings, and choose its width."""
    rng = random.Random(seed)
    names = sorted([*PLAIN, *MORE])
    pieces = tuple(rng.choice(names) for _ in range(rng.randint(1, 5)))
    settings: dict[str, Any] = {"capture_sizes": rng.choice(SIZES)}
    if rng.random() < 0.2:
        settings["padding"] = False
    if any("break" in name for name in pieces) or rng.random() < 0.1:
        settings["mode"] = "PIECEWISE"
    return Program(seed, pieces, rng.choice(OUTPUTS), settings, False, ()), rng.choice(WIDTHS)


class Streams:
    """Streams of a device by number; 0 is the default one."""

    COUNT = 5

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: list[Any] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.default_stream(device), *(torch.cuda.Stream() for _ in range(self.COUNT - 1))]

    @contextlib.contextmanager
    def current(self, number: int, after: int) -> Iterator[None]:
        """Make a stream current, once another one's work is done."""
        if not self._streams:
            with emulator().stream(number + 100 if number else 0):
                yield
            return
        with torch.cuda.stream(self._streams[number]):
            self._streams[number].wait_stream(self._streams[after])
            yield

    def synchronize(self) -> None:
        """Wait for everything."""
        if self._streams:
            torch.cuda.synchronize(self.device)


class Twin:
    """Two modules of one random class with the same weights; one has graphs.

    Args:
        seed: of everything.
        streams: those that it is called on.
        pool: memory that its graphs share with others'; None for its own.

    Attributes:
        shared_draws: True if it draws from the generator that all share, so that calls need to have it alone.
    """

    def __init__(self, seed: int, streams: Streams, pool: Any = None) -> None:
        self.seed, self.streams, self.turn, self.calls = seed, streams, seed << 20, 0
        self.program, self.width = random_net(seed)
        self.text = self.program.text(str(streams.device)).partition("twins = ")[0]
        space: dict[str, Any] = {"__name__": "stress"}
        exec(compile(self.text, f"<stress {seed}>", "exec"), space)
        space["W"] = self.width
        self.eager, module = (self._made(space["Net"]) for _ in range(2))
        self.model: Any = sg.wrap(module, pool=pool, progress=False, **self.program.settings)
        self.shared_draws = bool({"noise", "noisy break"} & set(self.program.pieces))
        self._stream = 0
        self._kept: collections.deque[tuple[Any, Any]] = collections.deque()

    def _made(self, kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(self.seed)
        return kind().to(self.streams.device).eval().requires_grad_(False)

    @property
    def replays(self) -> int:
        return int(self.model.graph_stats.replays)

    def call(self, rng: random.Random, generator: torch.Generator) -> None:
        """Call both with the same inputs on some stream, and compare what they return and leave."""
        self.calls += 1
        number = rng.randrange(Streams.COUNT)
        sizes = self.program.settings["capture_sizes"]
        rows = rng.choice(sizes) if rng.random() < 0.7 else rng.randint(1, 9)
        mode = rng.choice([torch.no_grad, torch.inference_mode])
        with self.streams.current(number, after=self._stream), mode():
            inputs = [torch.randn(rows, self.width, device=self.streams.device, generator=generator) for _ in range(2)]
            twins = [x.clone() for x in inputs]
            if self.shared_draws:
                torch.manual_seed(self.calls)
            result = self.model(*inputs)
            if self.shared_draws:
                torch.manual_seed(self.calls)
            expected = self.eager(*twins)
            self._compare(result, expected, "the output")
            self._compare(inputs, twins, "an argument")
            self._kept.append((result, expected))
            if len(self._kept) > KEPT:  # each stream has waited for the one before
                self._compare(*self._kept.popleft(), "an earlier output")
        self._stream = number

    def move(self, rng: random.Random) -> None:
        """Move weights, buffers or other things of both; call it alone, with nothing under way."""
        name = rng.choice(MOVES)
        seed = rng.randrange(1 << 30)
        for module in (self.model, self.eager):
            torch.manual_seed(seed)
            names = {"torch": torch, "nn": nn, "W": self.width, "m": module, "Box": Box, "device": self.streams.device}
            with torch.no_grad():
                exec(CHANGES[name], names)
        self.check_state(f"after {name!r}")

    def check_state(self, when: str) -> None:
        """Compare what both hold; call it alone, with nothing under way."""
        self._compare(_held(self.model), _held(self.eager), f"the state {when}")

    def drop(self) -> None:
        """Drop the graphs; they are captured again by later calls."""
        self.model.reset_graphs()

    def _compare(self, actual: Any, expected: Any, what: str) -> None:
        found = difference(actual, expected)
        if found is not None:
            raise Different(f"seed {self.seed}, call {self.calls}: {what}: {found}\n{self.model.graph_report()}")


def _held(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
