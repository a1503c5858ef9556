"""The questions that ranks ask each other around captures and steps, with the answers of a single rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from simplegraph.base.config import CudaGraphMode
from simplegraph.device.protocol import GraphDevice


class Stopwatch(dict[str, float]):
    """Seconds of wall time by part. A part may be timed several times, but parts must not nest."""

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to a part, also if it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self[part] = self.get(part, 0.0) + time.perf_counter() - started


class SingleRank:
    """The single rank of a model without other ranks; `RankGroup` asks the same questions of several ranks.

    Attributes:
        seconds: the times of the parts of the last capture session; see `CaptureSummary`.
    """

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self.seconds = Stopwatch()

    def check_alive(self) -> None:
        """Refuse to replay after a process group was destroyed; see `RankGroup.check_alive`."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Surround an action of all ranks: an exception on one rank raises a RankError on the others."""
        return contextlib.nullcontext()

    def begin(self, settings: Mapping[str, str], captures: str, device: GraphDevice) -> None:
        """Start a capture session; see `RankGroup.begin`."""

    def failure(self, operation: str, error: Exception | None) -> tuple[int, str] | None:
        """Return (first rank on which the operation failed, its message); None if it succeeded on all ranks.

        Raises:
            RankError: a rank did not come, or is at another point of the program.
        """
        return self.failures(operation, {} if error is None else {operation: error}).get(operation)

    def failures(self, operation: str, errors: Mapping[str, Exception]) -> dict[str, tuple[int, str]]:
        """Return the failures of all ranks: name -> (first rank that failed, its message).

        Args:
            operation: the name of the operation, for messages.
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
    """Protocol of an agreement of ranks on a step. An engine may pass an implementation of its own."""

    def agree(self, vote: Vote) -> Vote:
        """Return the same outcome on each rank: the lowest mode, and the largest of the other numbers.

        Raises:
            RankError: the ranks did not reach an agreement.
        """
