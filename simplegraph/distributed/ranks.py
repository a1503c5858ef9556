"""What ranks ask each other around captures and steps, and the answers of a model that has one rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from simplegraph.base.config import CudaGraphMode
from simplegraph.device.protocol import GraphDevice


class Stopwatch(dict[str, float]):
    """Seconds of wall time by part; parts may come again, but not within each other."""

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that a block takes, whatever happens in it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self[part] = self.get(part, 0.0) + time.perf_counter() - started


class SingleRank:
    """The ranks of a model that has one, and the questions that `RankGroup` asks all of its.

    Attributes:
        seconds: what the parts of the last capture session took; see `CaptureSummary`.
    """

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self.seconds = Stopwatch()

    def check_alive(self) -> None:
        """Refuse to replay after a process group was destroyed; see `RankGroup.check_alive`."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Wrap an action of all ranks: an exception on one rank is raised on the others as well."""
        return contextlib.nullcontext()

    def begin(self, settings: Mapping[str, str], captures: str, device: GraphDevice) -> None:
        """Start a capture session; see `RankGroup.begin`."""

    def failure(self, operation: str, error: Exception | None) -> tuple[int, str] | None:
        """Return the first rank on which the operation failed and its message; None if it succeeded on all ranks.

        Raises:
            RankError: a rank did not come, or is at another point of the program.
        """
        return self.failures(operation, {} if error is None else {operation: error}).get(operation)

    def failures(self, operation: str, errors: Mapping[str, Exception]) -> dict[str, tuple[int, str]]:
        """Return what failed on any rank, by name: the first rank that it failed on, and its message.

        Args:
            operation: the operation that was tried, for messages.
            errors: errors of this rank, by name.

        Raises:
            RankError: a rank did not come, or is at another point of the program.
        """
        words = self._ask(f"the result of {operation}", {name: str(error) for name, error in errors.items()})
        failed: dict[str, tuple[int, str]] = {}
        for rank, messages in enumerate(words):
            for name, message in messages.items():
                failed.setdefault(name, (rank, message))
        return failed

    def any(self, operation: str, flag: bool) -> bool:
        """True if `flag` is True on any rank.

        Raises:
            RankError: a rank did not come, or is at another point of the program.
        """
        return any(self._ask(operation, flag))

    def _ask(self, question: str, answer: Any) -> list[Any]:
        """Return the answers of all ranks."""
        return [answer]


class Vote(NamedTuple):
    """A rank's proposal for a step, or the outcome for all ranks.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        num_tokens: padded rows; 0 if a rank has nothing to run.
        num_active_loras: LoRA adapters in use.
    """

    mode: CudaGraphMode
    num_tokens: int
    num_active_loras: int = 0


class Consensus(Protocol):
    """Protocol by which ranks agree; an engine that has such an exchange already may pass its own."""

    def agree(self, vote: Vote) -> Vote:
        """Return the outcome, the same on each rank: the lowest mode, the largest of the other numbers.

        Raises:
            RankError: the ranks did not reach an agreement.
        """
