"""The lifecycle of calls: the stage of each size, the verdict of each row count, refusals, and all their changes.

A `ModuleRecord` is about all calls of a module, a `SignatureRecord` about all sizes of a signature, a `SizeRecord`
about one size of it. docs/tools/lifecycle.py draws `EDGES`, the changes of verdicts, and `REFUSALS`.
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

_STALE_LIMIT = 3  # drops of graphs in a row without a replay in between, after which nothing is captured
_UNSETTLED = 3  # eager runs in a row that may change a setting of torch, as a process's first run does
_TRIES = 3  # proofs of a graph that found writes to unknown memory, after which the graph stays unverified


class Stage(enum.Enum):
    """The stage of one size of one signature. The value describes the next call of the size."""

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


# An event without an edge from a stage leaves the stage as it is.
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
    """The verdict on a row count of a captured size. The value describes the next call with this number of rows."""

    DUE = "runs eagerly, and is compared with a replay"
    PROVEN = "replays"
    UNVERIFIED = "replays, though nothing was compared"
    REFUSED = "runs eagerly"


SERVED = frozenset({RowVerdict.PROVEN, RowVerdict.UNVERIFIED})


class Scope(enum.Enum):
    """The calls that a refusal applies to."""

    MODULE = "all calls of the module"
    SIGNATURE = "all calls of the signature"
    PADDING = "padded calls of the signature"
    SIZE = "calls of the size"
    ROWS = "calls of the row count"


class RefusalRule(NamedTuple):
    """A kind of refusal that is remembered: the calls that it applies to, its reasons, and the event that ends it."""

    scope: Scope
    reasons: tuple[Reason, ...]
    until: str


# Refusals with other reasons apply to a single call, and are not remembered.
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
# Refusals that stay until something new is learnt of the module: they do not depend on the memory of one call.
LASTING = frozenset(reason for rule in REFUSALS if rule.scope is not Scope.MODULE for reason in rule.reasons)


@dataclasses.dataclass(slots=True, eq=False)
class SizeRecord:
    """The lifecycle of one size of one signature, or of one descriptor of an engine.

    Attributes:
        stage: the stage; only events change it, by `EDGES`.
        rows: the verdicts on row counts that have one of their own.
        others: the verdict on all other row counts.
        failure: why the capture failed, or the graph was dropped, for the report; else None.
        refusal: why calls of the size run eagerly; None if they need not.
    """

    stage: Stage = Stage.UNSEEN
    rows: dict[int, RowVerdict] = dataclasses.field(default_factory=dict)
    others: RowVerdict = RowVerdict.DUE
    failure: CaptureError | None = None
    refusal: CannotBind | None = None

    def apply(self, event: Event) -> None:
        """Change the stage by an event; refused row counts are tried again."""
        self.stage = EDGES.get((self.stage, event), self.stage)
        self.rows = {rows: verdict for rows, verdict in self.rows.items() if verdict is not RowVerdict.REFUSED}

    def count_warmups(self, remaining: int) -> None:
        """Note how many warmups remain before the capture."""
        self.apply(Event.COOLED if remaining > 0 else Event.WARMED)

    def note_captured(self, *, compare: bool) -> None:
        """Note that the size is captured; `compare` is True if calls must be compared with replays."""
        self.apply(Event.RECORDED)
        self.refusal = self.failure = None
        self.others = RowVerdict.DUE if compare else RowVerdict.UNVERIFIED

    def refuse(self, why: CannotBind, failure: CaptureError | None = None) -> None:
        """Let calls of the size run eagerly; `failure` is the error of the capture, for the report."""
        self.refusal, self.failure = why, failure or self.failure

    def retry(self) -> None:
        """Let the next call of the size try again."""
        self.refusal = self.failure = None

    def check(self) -> None:
        """Raise CannotBind if calls of the size are refused."""
        if self.refusal is not None:
            raise self.refusal.again()

    def refuse_row_count(self, rows: int) -> None:
        """Let calls of this row count run eagerly, until another call runs eagerly or the graph is gone."""
        self.rows[rows] = RowVerdict.REFUSED

    def note_dropped(self, event: Event) -> None:
        """Note that the graph is gone. If the next graph passes its first comparison, proven row counts stay proven."""
        self.apply(event)
        self.refusal = self.failure = None


@dataclasses.dataclass(slots=True, eq=False)
class CapturedGraph:
    """The captured graph of one size. A size that is captured again gets a new `CapturedGraph`.

    Attributes:
        record: the record of the size.
        replays_until_proof: replays until the next comparison with eager; 0 if the next call is compared, or if the
            graph was dropped; negative if there will be no comparison.
        proof_distance: replays between the last comparison and the next one; it doubles. 0 before the first comparison.
        uncompared_runs: the number of calls that could not be compared.
        operators: a hash of the operators of an eager run with as many rows as the graph; None before such a run.
        set_by_breaks: by place, the values that runs with eager breaks found where they set Python state. Only runs
            that a replay equalled are noted.
        unread_places: the places among these that the graph was shown not to read; see `BreakChanges.note_equal`.
        describe_freed: called before the graph's first proof. It describes a kernel that uses memory freed since the
            capture, and returns None if there is none.
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
    set_by_breaks: dict[Any, Any] = dataclasses.field(default_factory=dict)
    unread_places: set[Any] = dataclasses.field(default_factory=set)
    describe_freed: Callable[[], str | None] = lambda: None

    def verdict(self, rows: int) -> RowVerdict:
        """Return the verdict on calls with this number of rows."""
        record = self.record
        if record.others is RowVerdict.UNVERIFIED:
            return record.others
        verdict = record.rows.get(rows, record.others)
        return RowVerdict.DUE if verdict is RowVerdict.PROVEN and not self.replays_until_proof else verdict

    @property
    def compared_row_counts(self) -> Collection[int] | None:
        """The row counts that this graph or an earlier one was compared at; empty before the first comparison.

        None if one comparison stands for all row counts, or if no comparison is made.
        """
        if self.record.others is not RowVerdict.DUE:
            return None
        proven = self.record.rows if self.proof_distance else {}
        return [rows for rows, verdict in proven.items() if verdict is RowVerdict.PROVEN]

    def count_uncompared_run(self) -> bool:
        """Count a run that could not be compared, since it wrote to unknown memory; True if it was the last try."""
        self.uncompared_runs += 1
        return self.uncompared_runs == _TRIES

    def note_proven(self, rows: int, distance: int = 0, *, per_row_count: bool = False) -> None:
        """Note that a replay equalled eager.

        Args:
            rows: the batch size of the call.
            distance: replays until the next comparison, if this was the first one; 0 if there will be none.
            per_row_count: True if each row count is compared; False if this comparison stands for all.
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
        """Forget which row counts are proven one by one, so that each is compared again."""
        rows = self.record.rows.items()
        self.record.rows = {count: verdict for count, verdict in rows if verdict is not RowVerdict.PROVEN}

    def leave_unverified(self, why: str) -> None:
        """Note that no call can be compared, and the cause."""
        self.record.others, self.replays_until_proof = RowVerdict.UNVERIFIED, -1
        self._note(f"unverified: {why}")

    def drop(self, event: Event) -> None:
        """Free the graph's memory; the graph serves no more calls."""
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
        refusal: why all its calls run eagerly; padding_refusal: why calls run eagerly that would be padded.
        warm: the number of warmup runs of each padded size.
        ran: (structure of the arguments, batch size) of calls that ran eagerly with their own arguments.
        sizes: the records of sizes, by the keys of their graphs.
        plans: structure of the arguments -> batch size -> the plan or the refusal of such calls.
    """

    called: bool = dataclasses.field(default=False, init=False)
    refusal: CannotBind | None = dataclasses.field(default=None, init=False)
    padding_refusal: CannotBind | None = dataclasses.field(default=None, init=False)
    warm: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter, init=False)
    ran: set[tuple[TreeSpec, int]] = dataclasses.field(default_factory=set, init=False)
    sizes: dict[Hashable, SizeRecord] = dataclasses.field(default_factory=dict, init=False)
    plans: dict[TreeSpec, dict[Any, Any]] = dataclasses.field(default_factory=dict, init=False)

    def size(self, key: Hashable) -> SizeRecord:
        """Return the record of a size, by the key of its graph; make it if there is none."""
        record = self.sizes.get(key)
        if record is None:
            record = self.sizes[key] = SizeRecord()
            if self.called:
                record.apply(Event.CALLED)
        return record

    def note_eager_run(self) -> None:
        """Note that a call ran eagerly."""
        self.called = True
        for record in self.sizes.values():
            record.apply(Event.CALLED)

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
        """Let calls run eagerly that would be padded."""
        self.padding_refusal = why
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop the plans of all calls, so that the next ones are planned again."""
        for plans in self.plans.values():
            plans.clear()

    def note_moved(self) -> None:
        """Note that memory that graphs read was moved: sizes need warmups, and are captured again."""
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
        disabled: why all calls run eagerly from the start; None if they need not.
    """

    def __init__(self, disabled: Reason | None = None) -> None:
        self.disabled = disabled
        self._strikes = 0  # drops of graphs since the last capture that paid off
        self._served_before = 0  # the count of replays at the latest capture
        self._unsettled: list[str] = []

    def check(self) -> None:
        """Raise CannotBind if calls of the module are refused."""
        if self.disabled is not None:
            raise CannotBind(self.disabled, "")

    def check_settled(self) -> None:
        """Raise CannotBind if the forward changes settings of torch whenever it runs."""
        if len(self._unsettled) >= _UNSETTLED:
            raise CannotBind(Reason.PYTHON_STATE, f"settings of torch: {self._unsettled[-1]}")

    def settle(self, changed: str) -> None:
        """Note the settings of torch that an eager run changed; `changed` is empty if it changed none."""
        self._unsettled = [*self._unsettled, changed] if changed else []

    def refuse(self, reason: Reason) -> None:
        """Let all calls run eagerly."""
        self.disabled = reason

    def note_captured(self, replays: int) -> None:
        """Note a capture at this count of replays. It pays off if the count grows before graphs are dropped."""
        self._served_before = replays

    def note_stale(self, replays: int) -> None:
        """Note that graphs went stale at this count of replays. If that happens too often, calls run eagerly."""
        self._strikes = 0 if replays > self._served_before else self._strikes + 1
        if self._strikes >= _STALE_LIMIT:
            self.refuse(Reason.STALE_TOO_OFTEN)

    def forgive(self) -> None:
        """Forget earlier drops, for captures that no call waited for."""
        self._strikes = 0

    def reset(self) -> None:
        """Forget drops of graphs, and capture again if they were too many. Other refusals end as `REFUSALS` says."""
        self.forgive()
        if self.disabled is Reason.STALE_TOO_OFTEN:
            self.disabled = None
