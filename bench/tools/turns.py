"""Lets processes that prepare side by side, such as build models or compile, be timed one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import Any, TypeVar

from bench.tools import fresh
from bench.tools.measure import Figures, say

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Turn:
    """Lets processes that prepare side by side be timed one after the other.

    Args:
        all_ready: a barrier of `multiprocessing` for all of them.
        alone: a lock of `multiprocessing`.
        seconds: the longest wait for the others to be ready.
    """

    all_ready: Any
    alone: Any
    seconds: float

    @classmethod
    def among(cls, count: int, seconds: float) -> Turn:
        """Make the turns of so many processes, which the caller passes each of them."""
        context = multiprocessing.get_context("forkserver")
        return cls(context.Barrier(count), context.Lock(), seconds)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Wait until every process is ready, then until no other is being timed."""
        with contextlib.suppress(BrokenBarrierError):  # one of them failed, or takes too long: go on without it
            self.all_ready.wait(self.seconds)
        with self.undisturbed():
            yield

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Wait until no other process is being timed, but not for one that was killed meanwhile."""
        mine = self.alone.acquire(timeout=self.seconds)
        try:
            yield
        finally:
            if mine:
                self.alone.release()


def answer(function: Callable[..., Figures], *args: Any, seconds: float) -> Figures:
    """Call a function in a fresh process; on an error return `failed`, and the `reason` in one line."""
    try:
        figures: Figures = fresh.call(function, *args, seconds=seconds)
    except TimeoutError as error:
        return {"failed": str(error), "reason": str(error)}
    except fresh.ProcessFailed as error:
        say(str(error))
        return {"failed": str(error), "reason": error.reason}
    return figures


def side_by_side(calls: Mapping[K, tuple[Any, ...]], seconds: float, *, timed: bool = True) -> dict[K, Figures]:
    """Answer calls by processes at once.

    Args:
        calls: a function and its arguments each; where they time, and there are several, a `Turn` is the last one.
        seconds: that each may take.
        timed: True if they time; `beside` is then in the figures, the number of other processes.
    """
    turns = (Turn.among(len(calls), seconds),) if timed and len(calls) > 1 else ()

    def answered(call: tuple[Any, ...]) -> Figures:
        found = answer(*call, *turns, seconds=seconds)
        for turn in turns:
            if "failed" in found or "skipped" in found:
                turn.all_ready.abort()  # the others would wait for it
        return found | ({"beside": len(calls) - 1} if timed else {})

    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        return dict(zip(calls, threads.map(answered, calls.values()), strict=True))
