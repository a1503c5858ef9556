"""Runs functions in fresh processes side by side, and lets each measure times while all others stand still.

A process that wants to measure waits until some do; then those that still run are halted, and the waiting ones measure
one after the other, one on each GPU at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from multiprocessing import connection
from typing import Any, TypeVar

from bench.tools import fresh
from bench.tools.fresh import OVER, WANTED, FreshProcess, ProcessFailed
from bench.tools.measure import Figures, say


def answer(function: Callable[..., Figures], *args: Any, seconds: float) -> Figures:
    """Call a function in a fresh process; on an error return `failed`, and the `reason` in one line."""
    try:
        figures: Figures = fresh.call(function, *args, seconds=seconds)
    except (TimeoutError, fresh.ProcessFailed) as error:
        return _failure(error)
    return figures


def side_by_side(
    tasks: Mapping[K, Task], seconds: float, workers: int | None = None, total: float = math.inf
) -> Iterator[tuple[K, Figures]]:
    """Answer tasks by processes at once, all by default, which take turns at being timed; see `SideBySide`."""
    for name, found in SideBySide(workers=workers or len(tasks), seconds=seconds, total=total).run(tasks):
        yield name, _failure(found) if isinstance(found, Exception) else found


def _failure(error: Exception) -> Figures:
    say(str(error))
    return {"failed": str(error), "reason": getattr(error, "reason", str(error))}


DRAINED = 0.3  # seconds after which GPUs have done what halted processes gave to them

K = TypeVar("K", bound=Hashable)
Task = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass
class _Member:
    """A process that runs one task.

    Attributes:
        gpu: that it uses; left: seconds that it may still run; the time in which it waits or is halted does not count.
    """

    name: Hashable
    process: FreshProcess
    gpu: int
    left: float


class SideBySide:
    """Runs tasks in fresh processes.

    Args:
        workers: processes that run at once, beside those that wait for their turn to measure.
        gpus: of the machine, which are dealt to processes in turn.
        seconds: that a task may run.
        total: seconds after which the rest is given up.
    """

    def __init__(self, *, workers: int, gpus: int = 1, seconds: float, total: float) -> None:
        self._workers, self._seconds = workers, seconds
        self._together = max(1, workers // 2)  # so many wait before the others are halted
        self._end = time.monotonic() + total
        self._running: list[_Member] = []
        self._waiting: list[_Member] = []
        self._gpus = collections.deque(range(gpus))

    def run(self, tasks: Mapping[K, Task]) -> Iterator[tuple[K, Any]]:
        """Yield each task's name and result, or the error it ended with, as they are done.

        Args:
            tasks: by name, a function at module level and its arguments; it is passed the number of its GPU and a
                `Turn` in addition.
        """
        todo = collections.deque(tasks.items())
        try:
            while todo or self._running or self._waiting:
                if time.monotonic() > self._end:
                    return
                while todo and len(self._running) < self._workers:
                    self._start(*todo.popleft())
                if self._waiting and (len(self._waiting) >= self._together or not todo):
                    yield from self._measure()
                else:
                    yield from self._advance(self._running, self._waiting)
        finally:
            for member in self._running + self._waiting:
                member.process.close()

    def _start(self, name: Hashable, task: Task) -> None:
        function, args = task
        self._gpus.rotate(-1)
        gpu = self._gpus[0]
        process = FreshProcess(function, *args, gpu, turns=True)
        self._running.append(_Member(name, process, gpu, self._seconds))

    def _measure(self) -> Iterator[tuple[Any, Any]]:
        """Let all that wait measure, one on each GPU at a time, while the others are halted."""
        for member in self._running:
            member.process.stop()
        if self._running:
            time.sleep(DRAINED)
        later: list[_Member] = []
        while self._waiting and time.monotonic() < self._end:
            first = {member.gpu: member for member in reversed(self._waiting)}
            measuring = list(first.values())
            for member in measuring:
                self._waiting.remove(member)
                member.process.give_turn()
            while measuring and time.monotonic() < self._end:
                yield from self._advance(measuring, later)
            for member in measuring:  # no time was left
                member.process.close()
        self._running += later
        for member in self._running:
            member.process.go_on()

    def _advance(self, members: list[_Member], wanting: list[_Member]) -> Iterator[tuple[Any, Any]]:
        """Wait a moment for messages: yields results, and moves members whose turn begins or is over to `wanting`."""
        began = time.monotonic()
        ready = connection.wait([member.process.connection for member in members], timeout=0.2)
        passed = time.monotonic() - began
        for member in list(members):
            member.left -= passed
            found: Any = None
            if member.process.connection in ready:
                try:
                    message = member.process.receive()
                    if message in (WANTED, OVER):
                        members.remove(member)
                        wanting.append(member)
                        if message == OVER:
                            member.process.stop()
                        continue
                    found = member.process.result(message)
                except ProcessFailed as error:
                    found = error
            elif member.left < 0:
                found = TimeoutError(f"took more than {self._seconds:g} s")
            else:
                continue
            members.remove(member)
            member.process.close()
            yield member.name, found
