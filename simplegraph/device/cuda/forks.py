"""Find the side streams that a thread's capture forked to and did not join, and the lines that forked.

All functions that order streams in Python call `torch.cuda.Event.record` and `wait`. Both are replaced while a capture
runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from simplegraph.base import patches
from simplegraph.base.failures import current_user_location


def start(stream: int) -> None:
    """Begin to follow a capture of this thread, on a stream given by its raw handle."""
    stop()
    for name, note in _WATCHED.items():
        patches.replace(torch.cuda.Event, name, functools.partial(_watched, note))
    _watching.open = _Open(stream)


def stop() -> None:
    """Stop following the thread's capture, which is over; does nothing if there is none."""
    if getattr(_watching, "open", None) is not None:
        for name in _WATCHED:
            patches.restore(torch.cuda.Event, name)
    _watching.open = None


def explained(error: RuntimeError) -> RuntimeError:
    """Add the lines that forked to unjoined streams to an error about unjoined work; return other errors unchanged."""
    opened: _Open | None = getattr(_watching, "open", None)
    if opened is None or not opened.forked or "unjoined" not in str(error).lower():
        return error
    lines = ", ".join(opened.forked.values())
    return RuntimeError(f"unjoined work on a side stream, forked at {lines}: {str(error).splitlines()[0]}")


class _Open:
    """A current capture: its streams, the lines that forked to them, and the stream that recorded each event."""

    def __init__(self, stream: int) -> None:
        self.streams = {stream}
        self.forked: dict[int, str] = {}
        # By id, and kept alive: torch's events crash if they end with a weak reference to them.
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


_WATCHED: dict[str, Callable[[_Open, Any, Any], None]] = {"record": _Open.record, "wait": _Open.wait}


def _watched(note: Callable[[_Open, Any, Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(self: Any, stream: Any = None) -> Any:
        opened: _Open | None = getattr(_watching, "open", None)
        if opened is not None:
            note(opened, self, stream)
        return original(self, stream)

    return watched
