"""Serve calls of many random modules with everything around them in motion: memory, weights, streams, threads."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from quiet import quiet
from torch import Tensor

import simplegraph as sg
from tests.stress.twin import Streams, Twin

GROUP = 10  # modules that live at a time
USELESS = 40  # calls without a replay, after which another module takes a module's place
MAX_DIFFERENCES = 10
THREADS = 3


@dataclasses.dataclass
class Outcome:
    """The work done so far."""

    modules: int = 0
    replays: int = 0
    calls: int = 0
    refused: int = 0
    bursts: int = 0
    actions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    differences: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        done = ", ".join(f"{name} {count}" for name, count in sorted(self.actions.items()))
        return (
            f"{self.modules} modules, {self.replays} replays of {self.calls} calls, {self.refused} modules without "
            f"replays, {len(self.differences)} differences; {done}"
        )


class Stress:
    """A run.

    Args:
        device: where.
        replays, modules: how many to reach together.
        seconds: when to stop in any case.
        seed: of the first module, and of the order of things.
        tell: is told of progress and differences, as they come.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        replays: int,
        modules: int,
        seconds: float,
        seed: int = 0,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.device = torch.device(device)
        self.replays, self.modules = replays, modules
        self._ends, self._started = time.perf_counter() + seconds, time.perf_counter()
        self._seeds, self._rng = itertools.count(seed), random.Random(seed)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._tell, self._told = tell, self._started
        self._streams = Streams(self.device)
        self._garbage: list[tuple[Tensor, float]] = []
        self._group: list[Twin] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Serve until there were enough replays, the time is over, or too much differs."""
        with quiet():
            while self._going_on and self.outcome.modules < self.modules:
                self._serve_group(min(GROUP, self.modules - self.outcome.modules))
                self._say()
        return self.outcome

    @property
    def _going_on(self) -> bool:
        return time.perf_counter() < self._ends and len(self.outcome.differences) < MAX_DIFFERENCES

    def _say(self) -> None:
        self._told = time.perf_counter()
        self._tell(f"{self._told - self._started:6.1f} s: {self.outcome}")

    def _serve_group(self, count: int) -> None:
        """Make some modules, half of which share a pool, and serve them until their share of replays is done."""
        goal = self.replays * (self.outcome.modules + count) // self.modules
        self._pool = sg.graph_pool(self.device)
        self._group = [self._new() for _ in range(count)]
        done = self.outcome.replays
        actions: Sequence[tuple[Callable[[], None], int]] = (
            (self._calls, 60),
            (self._churn, 20),
            (self._burst, 6),
            (self._move, 8),
            (self._empty_cache, 4),
            (self._drop, 2),
            (self._clear_workspaces, 2),
        )
        steps, weights = zip(*actions, strict=True)
        while self._going_on and done < goal:
            step = self._rng.choices(steps, weights)[0]
            self.outcome.actions[step.__name__.strip("_")] += 1
            self._try(step)
            self._replace_useless()
            done = self._finished + sum(twin.replays for twin in self._group)
            self.outcome.replays = done
            if time.perf_counter() - self._told > 5:
                self._say()
        self._try(self._check_states)
        for twin in self._group:
            self._retire(twin)
        self.outcome.modules += count
        self._group.clear()

    _finished = 0  # replays of modules that are gone

    def _new(self) -> Twin:
        seed = next(self._seeds)
        return Twin(seed, self._streams, self._pool if seed % 2 else None)

    def _retire(self, twin: Twin) -> None:
        self._finished += twin.replays
        self.outcome.calls += twin.calls

    def _replace_useless(self) -> None:
        for index, twin in enumerate(self._group):
            if twin.calls >= USELESS and not twin.replays:
                self._retire(twin)
                self.outcome.refused += 1
                self._group[index] = self._new()

    def _try(self, step: Callable[[], None], *twins: Twin) -> None:
        try:
            step()
        except Exception as error:
            self._note(error)

    def _note(self, error: BaseException) -> None:
        said = "".join(traceback.format_exception(error))
        self.outcome.differences.append(said)
        seed = next((twin for twin in self._group if f"seed {twin.seed}," in said), None)
        self._tell(f"DIFFERENCE {said}\n{seed.text if seed else ''}\n{seed.program if seed else ''}")

    # What happens.

    def _calls(self) -> None:
        for _ in range(20):
            self._rng.choice(self._group).call(self._rng, self._generator)

    def _churn(self) -> None:
        """Fill freed memory with garbage on some stream, so that reading it shows, and writing to it."""
        self._streams.synchronize()
        for tensor, value in self._garbage:
            if not bool((tensor == value).all()):
                raise AssertionError(f"{len(tensor)} elements of garbage were written by somebody")
        with self._streams.current(self._rng.randrange(Streams.COUNT), after=0):
            sizes = [self._rng.choice([1, 6, 36, 64, 300, 1 << 12, 1 << 16, 1 << 20]) for _ in range(8)]
            pairs = [(n, self._rng.choice([1e30, -7.0, 3.0])) for n in sizes]
            made = [(torch.full((n,), value, device=self.device, dtype=torch.float64), value) for n, value in pairs]
        self._garbage = [*self._garbage, *made][-self._rng.randint(0, 16) :]
        self._streams.synchronize()

    def _burst(self) -> None:
        """Call from several threads at the same time, each on modules of its own; another one churns memory."""
        twins = [twin for twin in self._group if not twin.shared_draws]
        self._rng.shuffle(twins)
        self._streams.synchronize()
        stop = threading.Event()
        work = [threading.Thread(target=self._serve_thread, args=(twins[at::THREADS], at)) for at in range(THREADS)]
        churn = threading.Thread(target=self._churn_thread, args=(stop,))
        for thread in (churn, *work):
            thread.start()
        for thread in work:
            thread.join()
        stop.set()
        churn.join()
        self._streams.synchronize()
        self.outcome.bursts += 1

    def _serve_thread(self, twins: Sequence[Twin], number: int) -> None:
        seed = self.outcome.bursts * THREADS + number
        rng, generator = random.Random(seed), torch.Generator(self.device).manual_seed(seed)
        try:
            for turn in range(20 * len(twins)):
                if turn % 25 == 24:
                    rng.choice(twins).drop()
                rng.choice(twins).call(rng, generator)
        except Exception as error:
            self._note(error)

    def _churn_thread(self, stop: threading.Event) -> None:
        kept: collections.deque[Tensor] = collections.deque(maxlen=8)
        rng = random.Random(self.outcome.bursts)
        while not stop.is_set():
            kept.append(torch.full((rng.choice([6, 64, 1 << 12, 1 << 18]),), float("nan"), device=self.device))
            stop.wait(0.001)

    def _move(self) -> None:
        self._streams.synchronize()
        self._rng.choice(self._group).move(self._rng)
        self._streams.synchronize()

    def _empty_cache(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop(self) -> None:
        self._streams.synchronize()
        self._rng.choice(self._group).drop()

    def _clear_workspaces(self) -> None:
        self._streams.synchronize()
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()

    def _check_states(self) -> None:
        self._streams.synchronize()
        for twin in self._group:
            twin.check_state("at the end")
