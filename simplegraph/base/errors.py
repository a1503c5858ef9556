"""The library's exceptions, and parts of their messages: what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

# The package's name in pip; it is in no registry.
DISTRIBUTION = "simple-cuda-graph"


class SimpleGraphError(Exception):
    """Base class of all exceptions that this library raises itself."""


class ConfigError(SimpleGraphError, ValueError):
    """A setting is invalid, alone or together with another."""


class InputError(SimpleGraphError, ValueError):
    """A call's arguments cannot be bound to a graph."""


class CaptureSizeError(SimpleGraphError, ValueError):
    """A batch is empty, or larger than every size that could serve it."""


class CaptureError(SimpleGraphError, RuntimeError):
    """A forward could not be captured.

    Attributes:
        location: "file:line `source`" of the user's line; None if CUDA did not report it.
        cause: what the line did that a graph cannot record; None if unknown.
        part: the pattern of the innermost submodule that was called there, for `break_at`; empty for the whole module.
    """

    def __init__(self, message: str, *, location: str | None = None, cause: str | None = None, part: str = "") -> None:
        super().__init__(message)
        self.location = location
        self.cause = cause
        self.part = part


class EscapeError(CaptureError):
    """A forward left tensors of its graph in Python objects that outlive it: a global, a closure, a cache."""


class BreakError(SimpleGraphError, RuntimeError):
    """An eager break cannot be part of a captured forward, or its result differs in kind from the captured one."""


class ReplayError(SimpleGraphError, RuntimeError):
    """A replay is not possible: nothing was captured or prepared, or the graphs were dropped."""


class RankError(SimpleGraphError, RuntimeError):
    """Ranks that must act together did not: one is missing, failed, or acted differently."""


class StaleGraphError(SimpleGraphError, RuntimeError):
    """A tensor that a graph reads was moved or replaced since capture, so a replay would use old values."""


class VerificationError(SimpleGraphError, RuntimeError):
    """A replay's output differs from the eager output for the same inputs."""


class EmulatorError(SimpleGraphError, RuntimeError):
    """The emulated device found an action that a CUDA graph does not allow."""


class HostError(SimpleGraphError, RuntimeError):
    """A forward that is being captured used a CPU tensor in a way that a replay would not repeat.

    Attributes:
        remedy: what the user can do; empty if only an eager break helps.
        breaks: True if an eager break around it helps as well.
    """

    def __init__(self, cause: str, remedy: str, *, breaks: bool = False) -> None:
        super().__init__(cause)
        self.remedy, self.breaks = remedy, breaks


def refuse_inside_capture(is_capturing: bool) -> None:
    """Refuse to start work that a capture cannot contain: for some of it CUDA ends the process.

    Raises:
        CaptureError: the stream of this thread is being captured.
    """
    if is_capturing:
        raise CaptureError("the stream is being captured by someone else; capture graphs before or after that.")


def did_you_mean(names: Iterable[str], valid_names: Collection[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean ...?)" with known names at least that similar (of 1) to these; "" if there are none."""
    close = dict.fromkeys(match for name in names for match in difflib.get_close_matches(name, valid_names, 1, cutoff))
    return f" (did you mean {', '.join(close)}?)" if close else ""


def install_command(extra: str) -> str:
    """Return the command that installs an extra: the editable install in a checkout, else the extra's packages."""
    if Path(__file__).parents[2].joinpath("setup.cfg").is_file():
        return f'pip install -e ".[{extra}]"'
    required = (line.partition(";") for line in importlib.metadata.requires(DISTRIBUTION) or ())
    named = [name.strip() for name, _, marker in required if re.search(rf"""extra == ["']{extra}["']""", marker)]
    packages = shlex.join(named)
    return f"pip install {packages}"
