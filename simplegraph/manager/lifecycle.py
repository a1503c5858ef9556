"""The lifecycle of calls: the stage of each size, the verdict of each row count, and refusals; every change of them.

A `ModuleRecord` is about all calls of a module, a `SignatureRecord` about all sizes of a signature, a `SizeRecord`
about one size of it. docs/design.md draws `EDGES`, `VERDICT_EDGES` and `REFUSALS`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import CaptureError
from simplegraph.base.nested import TreeSpec
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.sizes import BatchDescriptor

if TYPE_CHECKING:
    from simplegraph.manager.stats import GraphCounters
    from simplegraph.program.program import Program

_STALE_LIMIT = 3  # drops in a row before a single replay; after that, capturing is a waste
_UNSETTLED = 3  # eager runs in a row that change a setting of torch; the first in a process may
_TRIES = 3  # eager runs of a graph that wrote to memory not known to be written; then it stays unverified


class Stage(enum.Enum):
    """The stage of one size of one signature. The value says what the next such call does."""

    UNSEEN = "runs eagerly, and shows what the forward reads and writes"
    LEARNT = "runs eagerly: a warmup"
    WARM = "captures the size"
    CAPTURED = "replays the graph, or proves it"


class Event(enum.Enum):
    """An event that may change the stage of a size; the value describes it."""

    CALLED = "a call of the signature ran eagerly"
    WARMED = "no warmup is left to run"
    COOLED = "another warmup is needed: a constant, a break or Python state changed"
    RECORDED = "the size is captured"
    DROPPED = "the graph is dropped: its capture was undone, or a replay differs"
    MOVED = "what graphs read was moved or replaced"
    FORGOTTEN = "graphs are reset or configured, or a signature is one too many"


# An event that a stage has no edge for leaves it as it is.
EDGES: dict[tuple[Stage, Event], Stage] = {
    (Stage.UNSEEN, Event.CALLED): Stage.LEARNT,
    (Stage.LEARNT, Event.WARMED): Stage.WARM,
    (Stage.WARM, Event.RECORDED): Stage.CAPTURED,
    (Stage.UNSEEN, Event.RECORDED): Stage.CAPTURED,  # `capture_graphs` and engines need no call
    (Stage.LEARNT, Event.RECORDED): Stage.CAPTURED,
    (Stage.WARM, Event.COOLED): Stage.LEARNT,
    (Stage.CAPTURED, Event.DROPPED): Stage.LEARNT,
    (Stage.WARM, Event.MOVED): Stage.LEARNT,
    (Stage.CAPTURED, Event.MOVED): Stage.LEARNT,
    (Stage.LEARNT, Event.FORGOTTEN): Stage.UNSEEN,
    (Stage.WARM, Event.FORGOTTEN): Stage.UNSEEN,
    (Stage.CAPTURED, Event.FORGOTTEN): Stage.UNSEEN,
}


class RowVerdict(enum.Enum):
    """The verdict of a row count that a captured size serves. The value says what its next call does."""

    DUE = "runs eagerly, and is compared with a replay"
    PROVEN = "replays"
    UNVERIFIED = "replays, though nothing was compared"
    REFUSED = "runs eagerly"


SERVED = frozenset({RowVerdict.PROVEN, RowVerdict.UNVERIFIED})
# (before, after) -> what leads there.
VERDICT_EDGES: dict[tuple[RowVerdict, RowVerdict], str] = {
    (RowVerdict.DUE, RowVerdict.PROVEN): "a replay equals eager",
    (
        RowVerdict.PROVEN,
        RowVerdict.DUE,
    ): "so many replays came that one is compared, or the size is captured again",
    (RowVerdict.DUE, RowVerdict.UNVERIFIED): "a call writes more memory than can be compared, or `verify` is 0",
    (RowVerdict.UNVERIFIED, RowVerdict.DUE): "the size is captured again",
    (RowVerdict.DUE, RowVerdict.REFUSED): "only this batch size was seen so far",
    (RowVerdict.REFUSED, RowVerdict.DUE): "another call runs eagerly, or the graph is gone",
}


class Scope(enum.Enum):
    """The calls that a refusal is about."""

    MODULE = "all calls of the module"
    SIGNATURE = "all calls of the signature"
    PADDING = "padded calls of the signature"
    SIZE = "calls of the size"
    ROWS = "calls of the row count"


class RefusalRule(NamedTuple):
    """A kind of refusal that is remembered: the calls it is about, its reasons, and what ends it."""

    scope: Scope
    reasons: tuple[Reason, ...]
    until: str


# Other reasons are about the one call, and nothing is remembered.
REFUSALS = (
    RefusalRule(Scope.MODULE, (Reason.SWITCHED_OFF,), "`configure_graphs` sets another mode"),
    RefusalRule(Scope.MODULE, (Reason.ALLOCATOR,), "the process ends"),
    RefusalRule(Scope.MODULE, (Reason.STALE_TOO_OFTEN,), "`reset_graphs`"),
    RefusalRule(Scope.MODULE, (Reason.PYTHON_STATE,), "an eager run leaves torch's settings as they are"),
    RefusalRule(
        Scope.SIGNATURE,
        (
            *(Reason.UNSUPPORTED_OUTPUT, Reason.CHANGED_ARGUMENTS, Reason.WRONG_DEVICE),
            *(Reason.UNTRAINABLE, Reason.PYTHON_STATE),
        ),
        "`reset_graphs`",
    ),
    RefusalRule(
        Scope.PADDING,
        (Reason.PADDING_SHOWS, Reason.OUTPUT_SHAPE_UNKNOWN, Reason.SIZE_NOT_CAPTURED),
        "`reset_graphs`",
    ),
    RefusalRule(Scope.SIZE, (Reason.CAPTURE_FAILED, Reason.NOT_CAPTURED_UPFRONT), "graphs are captured again"),
    RefusalRule(Scope.ROWS, (Reason.OUTPUT_SHAPE_UNKNOWN, Reason.BATCH_DIM_UNCONFIRMED), "another call runs eagerly"),
)
# Such a refusal stays while nothing more is learnt of the module: it is not about the memory of one call.
LASTING = frozenset(reason for rule in REFUSALS if rule.scope is not Scope.MODULE for reason in rule.reasons)


@dataclasses.dataclass(slots=True, eq=False)
class SizeRecord:
    """The lifecycle of one size of one signature, or of one descriptor of an engine.

    Attributes:
        stage: changed by events alone, as `EDGES` says.
        rows: the verdict of each row count that has one of its own.
        others: the verdict of all other row counts.
        failure: why the capture failed, or the graph was dropped, for the report.
        refusal: why calls of the size run eagerly.
    """

    stage: Stage = Stage.UNSEEN
    rows: dict[int, RowVerdict] = dataclasses.field(default_factory=dict)
    others: RowVerdict = RowVerdict.DUE
    failure: CaptureError | None = None
    refusal: CannotBind | None = None

    def happened(self, event: Event) -> None:
        """Change the stage as the event says; row counts that were refused are tried again."""
        self.stage = EDGES.get((self.stage, event), self.stage)
        self.rows = {rows: verdict for rows, verdict in self.rows.items() if verdict is not RowVerdict.REFUSED}

    def count_warmups(self, remaining: int) -> None:
        """Note how many warmups remain before the capture."""
        self.happened(Event.COOLED if remaining > 0 else Event.WARMED)

    def note_captured(self, *, compare: bool) -> None:
        """Note that the size is captured; `compare` if calls are to be compared with replays."""
        self.happened(Event.RECORDED)
        self.refusal = self.failure = None
        self.others = RowVerdict.DUE if compare else RowVerdict.UNVERIFIED

    def refuse(self, why: CannotBind, failure: CaptureError | None = None) -> None:
        """Let calls of the size run eagerly; `failure` is the capture's, for the report."""
        self.refusal, self.failure = why, failure or self.failure

    def retry(self) -> None:
        """Let the next call of the size try again what failed."""
        self.refusal = self.failure = None

    def check(self) -> None:
        """Refuse a call of the size. Raises CannotBind."""
        if self.refusal is not None:
            raise self.refusal.again()

    def refuse_row_count(self, rows: int) -> None:
        """Let calls of this row count run eagerly, until another call runs eagerly or the graph is gone."""
        self.rows[rows] = RowVerdict.REFUSED

    def note_dropped(self, event: Event) -> None:
        """Note that the graph is gone; one comparison of the next graph proves all row counts that were proven."""
        self.happened(event)
        self.refusal = self.failure = None


@dataclasses.dataclass(slots=True, eq=False)
class CapturedGraph:
    """The graph of one size, ready to be replayed. A size that is captured again gets a new one.

    Attributes:
        record: the record of the size.
        replays_until_proof: replays until the next comparison with eager; 0 if the next call is compared, or the graph
            was dropped; negative if there will be no comparison.
        proof_distance: replays between its last such comparison and the next; it doubles. 0 before the first.
        uncompared_runs: how many calls could not be compared.
        operators: a hash of the operators that eager ran on as many rows as the graph has; None before it ran.
        describe_freed: describes a kernel that uses memory freed since the capture; returns None if there is none.
            Called before the graph's first proof only.
    """

    mode: CudaGraphMode
    descriptor: BatchDescriptor
    program: Program
    counters: GraphCounters
    record: SizeRecord = dataclasses.field(default_factory=SizeRecord)
    replays_until_proof: int = 0
    proof_distance: int = 0
    uncompared_runs: int = 0
    operators: int | None = None
    describe_freed: Callable[[], str | None] = lambda: None

    def verdict(self, rows: int) -> RowVerdict:
        """Return the verdict of calls of this row count."""
        record = self.record
        if record.others is RowVerdict.UNVERIFIED:
            return record.others
        verdict = record.rows.get(rows, record.others)
        return RowVerdict.DUE if verdict is RowVerdict.PROVEN and not self.replays_until_proof else verdict

    @property
    def rows(self) -> Collection[int] | None:
        """The row counts that were compared with this graph or one before it; empty before this one's first comparison.

        None if one comparison stands for all row counts, or none is made.
        """
        if self.record.others is not RowVerdict.DUE:
            return None
        proven = self.record.rows if self.proof_distance else {}
        return [rows for rows, verdict in proven.items() if verdict is RowVerdict.PROVEN]

    def keeps_writing_elsewhere(self) -> bool:
        """Count a run that wrote to unknown memory and was not compared; True if it was the last to try."""
        self.uncompared_runs += 1
        return self.uncompared_runs == _TRIES

    def prove(self, rows: int, distance: int = 0, *, per_row_count: bool = False) -> None:
        """Note that a call equalled eager.

        Args:
            rows: its batch size.
            distance: replays until a call is compared again, if this was the first; 0 if none is.
            per_row_count: True if each row count is compared; else this comparison stands for all.
        """
        if self.replays_until_proof <= 0:
            self.proof_distance = 2 * self.proof_distance or distance
            self.replays_until_proof = self.proof_distance or -1
        if per_row_count:
            self.record.rows[rows] = RowVerdict.PROVEN
        else:
            self.record.others = RowVerdict.PROVEN
        self._note("exact" if rows == self.descriptor.num_tokens else "padded")

    def compare_again(self) -> None:
        """Compare the next call of each row count that has a verdict of its own with eager again."""
        rows = self.record.rows.items()
        self.record.rows = {count: verdict for count, verdict in rows if verdict is not RowVerdict.PROVEN}

    def leave_unverified(self, why: str) -> None:
        """Note that no call can be compared, and why."""
        self.record.others, self.replays_until_proof = RowVerdict.UNVERIFIED, -1
        self._note(f"unverified: {why}")

    def drop(self, event: Event) -> None:
        """Free its memory; it serves no call any more."""
        self.program.drop()
        self.replays_until_proof = 0
        self.record.note_dropped(event)

    def _note(self, text: str) -> None:
        if text not in self.counters.proof:
            self.counters.proof = ", ".join(filter(None, (self.counters.proof, text)))


@dataclasses.dataclass(eq=False)
class SignatureRecord:
    """The lifecycle of the calls of one signature.

    Attributes:
        called: True once a call ran eagerly with its own arguments.
        refusal: why its calls run eagerly; padding_refusal: why those do that would be padded.
        warm: warmup runs by padded size.
        ran: the batch sizes that ran eagerly as they were called, by nesting.
        sizes: by the keys of their graphs.
        plans: by the nesting of arguments and then the batch size, how calls are replayed, or why they are not.
    """

    called: bool = dataclasses.field(default=False, init=False)
    refusal: CannotBind | None = dataclasses.field(default=None, init=False)
    padding_refusal: CannotBind | None = dataclasses.field(default=None, init=False)
    warm: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter, init=False)
    ran: set[tuple[TreeSpec, int]] = dataclasses.field(default_factory=set, init=False)
    sizes: dict[Hashable, SizeRecord] = dataclasses.field(default_factory=dict, init=False)
    plans: dict[TreeSpec, dict[Any, Any]] = dataclasses.field(default_factory=dict, init=False)

    def size(self, key: Hashable) -> SizeRecord:
        """Find or make the record of a size, by the key of its graph."""
        record = self.sizes.get(key)
        if record is None:
            record = self.sizes[key] = SizeRecord()
            if self.called:
                record.happened(Event.CALLED)
        return record

    def note_eager_run(self) -> None:
        """Note that a call ran eagerly."""
        self.called = True
        for record in self.sizes.values():
            record.happened(Event.CALLED)

    def note_eager_call(self, spec: TreeSpec, rows: int, padded: int) -> None:
        """Note that a call of `rows` rows ran eagerly, which counts as a warmup of its padded size."""
        self.ran.add((spec, rows))
        self.warm[padded] += 1
        self.note_eager_run()

    def refuse(self, why: CannotBind) -> None:
        """Let all calls run eagerly."""
        self.refusal = why
        self.forget_plans()

    def refuse_padding(self, why: CannotBind) -> None:
        """Let calls that would be padded run eagerly."""
        self.padding_refusal = why
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop the plans of all calls, so that the next ones are planned again."""
        for plans in self.plans.values():
            plans.clear()

    def note_moved(self) -> None:
        """Note that what graphs read was moved: sizes need warmups again, and are captured again."""
        self._end(Event.MOVED)

    def forget(self) -> None:
        """Forget all sizes and plans."""
        self._end(Event.FORGOTTEN)
        self.sizes.clear()
        self.plans.clear()

    def _end(self, event: Event) -> None:
        self.forget_plans()
        self.warm.clear()
        self.ran.clear()
        for record in self.sizes.values():
            record.note_dropped(event)


class ModuleRecord:
    """The lifecycle that all calls of one module share.

    Args:
        disabled: why all calls run eagerly from the start; None if they do not.
    """

    def __init__(self, disabled: Reason | None = None) -> None:
        self.disabled = disabled
        self._strikes = 0  # drops since graphs served a call
        self._served_before = 0  # replays when the latest capture was paid for
        self._unsettled: list[str] = []

    def check(self) -> None:
        """Refuse a call of the module. Raises CannotBind."""
        if self.disabled is not None:
            raise CannotBind(self.disabled, "")

    def check_settled(self) -> None:
        """Refuse to capture a forward that changes settings of torch whenever it runs. Raises CannotBind."""
        if len(self._unsettled) >= _UNSETTLED:
            raise CannotBind(Reason.PYTHON_STATE, f"settings of torch: {self._unsettled[-1]}")

    def settle(self, changed: str) -> None:
        """Note which settings of torch an eager run changed; empty if none."""
        self._unsettled = [*self._unsettled, changed] if changed else []

    def refuse(self, reason: Reason) -> None:
        """Let all calls run eagerly."""
        self.disabled = reason

    def note_captured(self, replays: int) -> None:
        """Note a capture made after `replays` replays; it paid off if more follow before the graphs are dropped."""
        self._served_before = replays

    def note_stale(self, replays: int) -> None:
        """Note that graphs went stale after `replays` replays; if that happens too often, calls run eagerly."""
        self._strikes = 0 if replays > self._served_before else self._strikes + 1
        if self._strikes >= _STALE_LIMIT:
            self.refuse(Reason.STALE_TOO_OFTEN)

    def forgive(self) -> None:
        """Forget earlier drops: they cost no request."""
        self._strikes = 0

    def reset(self) -> None:
        """Start over: graphs may go stale as often as at first."""
        self.forgive()
        if self.disabled is Reason.STALE_TOO_OFTEN:
            self.disabled = None
