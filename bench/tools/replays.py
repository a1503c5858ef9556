"""Checks that graphs served what was timed, so that no figure is of a run that did not happen."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from simplegraph import Reason
from simplegraph.manager.stats import GraphStats

# Reasons of the first calls of a kind, after which its graphs serve.
SOON = frozenset(
    {
        Reason.FIRST_CALL,
        Reason.WARMUP,
        Reason.PROOF,
        Reason.BATCH_DIM_UNCONFIRMED,
        Reason.OUTPUT_SHAPE_UNKNOWN,
    }
)
# Of an engine's steps, by its own settings: what its mode or its sizes leave without a graph.
PLANNED = frozenset({Reason.SWITCHED_OFF, Reason.MIXED_BATCH, Reason.BATCH_TOO_LARGE})


class NotReplayed(RuntimeError):
    """Calls of ours that were timed were not replayed, so their times must not count."""


class Replays:
    """Counts the replays and the eager calls of what this library serves, while it is timed.

    Args:
        by: wrappers, training steps, managers, handles of integrations; none for an arm without our graphs, which
            passes every check.
        name: of the arm, in the error.
        expected: reasons of eager calls that belong to what is measured, such as prompts where decode steps have graphs
            alone.

    Attributes:
        steps: replays that were due; replays: replays that were counted; proofs: calls that compared one with eager.
    """

    def __init__(self, *by: Any, name: str = "", expected: frozenset[Reason] = frozenset()) -> None:
        self.by, self._name, self._expected = by, name, expected
        self.steps = self.replays = self.proofs = 0
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._before = self._counts()

    def end(self, steps: int) -> None:
        """Stop counting.

        Args:
            steps: replays that are due since `begin`.

        Raises:
            NotReplayed: there were fewer, or a call ran eagerly for a reason that is not expected.
        """
        if not self.by:
            return
        (replays_before, eager_before), (replays, eager) = self._before, self._counts()
        replays, eager = replays - replays_before, eager - eager_before
        proofs, expected = eager[Reason.PROOF], sum(eager[reason] for reason in self._expected - {Reason.PROOF})
        self.steps, self.replays, self.proofs = self.steps + steps, self.replays + replays, self.proofs + proofs
        strange = set(eager) - self._expected - {Reason.PROOF}
        if strange or replays + proofs + expected < steps or replays <= proofs:
            reasons = ", ".join(f"{count} {reason}" for reason, count in eager.items()) or "none"
            raise NotReplayed(
                f"{self._name or 'an arm'}: {replays} of {steps} timed steps were replayed; eager calls: {reasons}.\n"
                + "\n".join(map(report_of, self.by))
            )

    def figures(self) -> dict[str, int]:
        """Return what was counted while it was timed, for the JSON."""
        return {"steps": self.steps, "replays": self.replays, "proofs": self.proofs} if self.by else {}

    def _counts(self) -> tuple[int, collections.Counter[Reason]]:
        every = list(stats_of(*self.by))
        eager = sum((stats.eager for stats in every), collections.Counter[Reason]())
        return sum(stats.replays for stats in every), eager


class Served:
    """A call that graphs must serve whenever it is timed; clocks of `bench.tools.measure` check it.

    Args:
        call: what is called.
        replays: of the arm.
        each: replays of one call.
    """

    def __init__(self, call: Callable[..., Any], replays: Replays, each: int = 1) -> None:
        self.call, self.replays, self.each = call, replays, each

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def bound(call: Callable[..., Any], *args: Any, each: int = 1, **kwargs: Any) -> Callable[[], Any]:
    """Bind a call to its arguments; one that graphs must serve remains one, with so many replays each time."""
    if isinstance(call, Served):
        return Served(functools.partial(call.call, *args, **kwargs), call.replays, each)
    return functools.partial(call, *args, **kwargs)


@contextlib.contextmanager
def timed(call: Callable[..., Any], times: int) -> Iterator[Callable[..., Any]]:
    """Yield the call to make `times` times in this context; one that graphs must serve is checked at the end.

    Raises:
        NotReplayed: graphs did not serve all of them.
    """
    if not isinstance(call, Served):
        yield call
        return
    call.replays.begin()
    yield call.call
    call.replays.end(times * call.each)


def report_of(by: Any) -> str:
    """Return what a wrapper, a manager or a handle reports."""
    return str((getattr(by, "graph_report", None) or by.report)())


def stats_of(*by: Any) -> Iterator[GraphStats]:
    """Yield the counters of wrappers, managers and handles, or those of their parts."""
    for each in by:
        own = getattr(each, "graph_stats", None) or getattr(each, "stats", None)
        yield from (own,) if own is not None else stats_of(*each.parts.values())
