"""Every exception the library raises, saying what was found, what was expected and what to do; and parts of these."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path


class SimpleGraphError(Exception):
    """Base class of everything this library raises on purpose."""


class ConfigError(SimpleGraphError, ValueError):
    """A setting is invalid, alone or beside another."""


class InputError(SimpleGraphError, ValueError):
    """A call's arguments cannot be bound to a graph."""


class CaptureSizeError(SimpleGraphError, ValueError):
    """A batch is empty, or larger than every size that could serve it."""


class CaptureError(SimpleGraphError, RuntimeError):
    """A forward could not be captured.

    Attributes:
        location: "file:line `source`" of the user's line, or None where CUDA did not say.
        cause: what that line did that a graph cannot record.
    """

    def __init__(self, message: str, *, location: str | None = None, cause: str | None = None) -> None:
        super().__init__(message)
        self.location = location
        self.cause = cause


class EscapeError(CaptureError):
    """A forward left tensors of its graph in Python objects that outlive it: a global, a closure, a cache."""


class BreakError(SimpleGraphError, RuntimeError):
    """An eager break cannot be part of a captured forward, or returned something else than it did before."""


class ReplayError(SimpleGraphError, RuntimeError):
    """A replay was asked for that cannot be served: nothing captured, or the graphs were dropped."""


class RankError(SimpleGraphError, RuntimeError):
    """Ranks that must act together did not: one is missing, failed, or does something else."""


class StaleGraphError(SimpleGraphError, RuntimeError):
    """Something a graph reads was moved or replaced since capture, so a replay would use old values."""


class VerificationError(SimpleGraphError, RuntimeError):
    """A replay's output differs from the eager output for the same inputs."""


class EmulatorError(SimpleGraphError, RuntimeError):
    """The emulated device saw something that a CUDA graph does not allow."""


class HostError(SimpleGraphError, RuntimeError):
    """A forward that is captured did something with a CPU tensor that a replay would not do.

    Attributes:
        remedy: what to do.
    """

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.remedy = remedy


def did_you_mean(names: Iterable[str], known: Collection[str]) -> str:
    """Return a question in parentheses that suggests known names like these; nothing if there are none."""
    close = dict.fromkeys(found for name in names for found in difflib.get_close_matches(name, known, 1))
    return f" (did you mean {', '.join(close)}?)" if close else ""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package: into a checkout where it runs from one."""
    in_checkout = Path(__file__).parents[1].joinpath("setup.cfg").is_file()
    return f'pip install -e ".[{extra}]"' if in_checkout else f'pip install "simple-cuda-graph[{extra}]"'
