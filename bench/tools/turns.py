"""Lets processes that prepare side by side, such as build models or compile, be timed one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterator
from threading import BrokenBarrierError
from typing import Any


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
