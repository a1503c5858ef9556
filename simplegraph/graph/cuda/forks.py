"""Side streams that a capture forked to and did not join, and the lines that did."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from simplegraph.graph import patches
from simplegraph.graph.failures import current_user_location


class Forks:
    """Side streams that a thread's capture forked to, and has not joined yet.

    Every way of ordering streams in Python ends in `torch.cuda.Event.record` and `wait`, which are watched
    while a capture runs.

    Args:
        index: the CUDA device.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def start(self) -> None:
        """A capture begins in this thread, on the current stream."""
        _watch_events()
        _watching.open = _Open(torch._C._cuda_getCurrentRawStream(self._index))

    def stop(self) -> None:
        """The thread's capture is over."""
        _watching.open = None

    def explained(self, error: RuntimeError) -> RuntimeError:
        """The error, with the lines that forked to streams which were not joined, if that is what it is about."""
        opened: _Open | None = getattr(_watching, "open", None)
        if opened is None or not opened.forked or "unjoined" not in str(error).lower():
            return error
        lines = ", ".join(opened.forked.values())
        return RuntimeError(f"unjoined work on a side stream, forked at {lines}: {str(error).splitlines()[0]}")


class _Open:
    """One capture: its stream, which streams it forked to and where, and on which stream each event was recorded."""

    def __init__(self, stream: int) -> None:
        self.streams = {stream}
        self.forked: dict[int, str] = {}
        # By id, and held: torch's events crash when they die with a weak reference to them.
        self.recorded: dict[int, tuple[Any, int]] = {}

    def record(self, event: Any, stream: Any) -> None:
        self.recorded[id(event)] = event, _handle(stream)

    def wait(self, event: Any, stream: Any) -> None:
        _, source = self.recorded.get(id(event), (event, 0))
        waiting = _handle(stream)
        if source not in self.streams:
            return
        if waiting in self.streams:
            self.forked.pop(source, None)
        else:
            self.streams.add(waiting)
            self.forked[waiting] = current_user_location()


_watching = threading.local()


def _handle(stream: Any) -> int:
    return int((stream if stream is not None else torch.cuda.current_stream()).cuda_stream)


@patches.installer
def _watch_events() -> None:
    event: Any = torch.cuda.Event
    record, wait = event.record, event.wait

    @functools.wraps(record)
    def watched_record(self: Any, stream: Any = None) -> Any:
        opened: _Open | None = getattr(_watching, "open", None)
        if opened is not None:
            opened.record(self, stream)
        return record(self, stream)

    @functools.wraps(wait)
    def watched_wait(self: Any, stream: Any = None) -> Any:
        opened: _Open | None = getattr(_watching, "open", None)
        if opened is not None:
            opened.wait(self, stream)
        return wait(self, stream)

    patches.replace(event, "record", watched_record)
    patches.replace(event, "wait", watched_wait)
