"""Explain to a user why a capture failed: at which of their lines, why, and what to do."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Sequence

import torch

from simplegraph.errors import BreakError, CaptureError, EmulatorError

_CAUSES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # (words any of which torch's or the emulator's message holds, cause, remedy); the first that fits is used
    (
        ("out of memory",),
        "the device ran out of memory.",
        "Capture fewer or smaller sizes (capture_sizes, max_capture_size), or free memory first.",
    ),
    (
        ("unjoined", "streamcaptureunjoined"),
        "work was forked to another stream and not joined before the end.",
        "Call torch.cuda.current_stream().wait_stream(side) before the forward ends, and before every eager break.",
    ),
    (
        ("cpu tensor is pinned", "host memory that is not pinned"),
        "data was copied from or to host memory that is not pinned.",
        "Create it on the device, or once, outside the forward; read back in an @simplegraph.eager_break (PIECEWISE).",
    ),
    (
        ("pinned memory was allocated", "cudahostalloc"),
        "pinned memory was allocated, which synchronises.",
        "Allocate it once, outside the forward.",
    ),
    (
        ("set_current_seed", "generator was reseeded"),
        "a random generator was reseeded.",
        "Seed outside the forward; a replay goes on where the last one stopped, as eager does.",
    ),
    (
        ("offset increment outside graph capture", "cuda generator", "generator that the capture"),
        "a random generator was used that the graph does not know.",
        "Keep the generator as an attribute of the module, and seed outside the forward.",
    ),
    (
        (
            "read back",
            "stream is capturing",
            "during capture",
            "graph capture",
            "stream capture",
            "a capturing stream",
            "a capturing blocking stream",
        ),
        "a tensor was read back to Python while its value does not exist yet, or the device was synchronised.",
        "Keep the test on the device (torch.where), or mark the function with @simplegraph.eager_break (PIECEWISE).",
    ),
)


def capture_error(error: Exception, label: str) -> CaptureError:
    """Make the error a user sees: what failed, at which of their lines, why, and what to do."""
    location = user_location(error)
    said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    cause, remedy = said, "Fix it, or leave graphs alone here."
    if isinstance(error, BreakError):
        cause = str(error)
    elif isinstance(error, (RuntimeError, EmulatorError)):
        text = str(error).lower()
        known = next((entry for entry in _CAUSES if any(word in text for word in entry[0])), None)
        if known is not None:
            cause = str(error) if isinstance(error, EmulatorError) else f"{known[1]} ({said})"
            remedy = known[2]
    where = f" at {location}" if location else ""
    return CaptureError(f"capturing {label} failed{where}\n  {cause}\n  {remedy}", location=location, cause=cause)


def user_location(error: BaseException) -> str | None:
    """``file:line `source` `` of the innermost frame of an error that is neither torch's nor this library's."""
    return _users_line(traceback.extract_tb(error.__traceback__))


def current_user_location() -> str:
    """``file:line `source` `` of the running line that is neither torch's nor this library's."""
    return _users_line(traceback.extract_stack()) or "an unknown line"


def _users_line(frames: Sequence[traceback.FrameSummary]) -> str | None:
    for frame in reversed(frames):
        if _is_users(frame.filename):
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{os.path.relpath(frame.filename)}:{frame.lineno} `{source}`"
    return None


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = os.path.abspath(filename)
    if path.startswith(_STDLIB) and "site-packages" not in path:
        return False
    return not path.startswith((_OWN, _TORCH))
