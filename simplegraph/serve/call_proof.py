"""Prove the graphs of a wrapped module on its calls: the first of each batch size, and later ones from time to time."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

from simplegraph.base.context import bypassed
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import wait_collectives
from simplegraph.call.call import Call
from simplegraph.call.external_memory import MemoryInUse, drawn_generators
from simplegraph.call.inputs import InputSet
from simplegraph.call.plan import Plan
from simplegraph.call.rehearsals import Undo
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.saved_state import SavedMemory
from simplegraph.guard.place_history import IN_BREAK
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.replay_proof import OTHER_OPERATORS, Effects, ReplayProof, by_least_precise, first_difference
from simplegraph.program.escapes import quoted
from simplegraph.program.index_checks import IndexChecks
from simplegraph.program.observe import MemoryObserver

logger = logging.getLogger("simplegraph")

_REMEDY = (
    "simplegraph.check(module, inputs) says more, and tries what padding writes. If the forward mixes rows, set "
    "padding=False, or declare pad_values; if it depends on state outside Python (a file, a C library), return that "
    "state from state_key."
)


_SHARE = 0.01  # the time of later proofs, as a share of the time of replays, at verify=1
_COST_WITH_RANKS = 100.0  # the assumed time of a proof with several ranks, in replays


class GraphOwner(Protocol):
    """Owns the graphs of a module, and receives the results of proofs; see `GraphBuilder`.

    Attributes:
        manager: holds the Programs.
        inputs_of: the static inputs that each Program reads, by key.
        seen: memory that observed runs of the forward used beside the arguments.
    """

    manager: CudaGraphManager
    inputs_of: dict[Hashable, InputSet]
    seen: MemoryInUse

    def keep_external(self, call: Call, observers: Sequence[MemoryObserver], inputs: set[int]) -> None:
        """Keep alive the memory that observed runs read, except inputs and tensors of the module."""

    def refuse(self, call: Call, cause: str, remedy: str) -> None:
        """Drop the graph of the call's size."""


def prove(owner: GraphOwner, call: Call, plan: Plan) -> Any:
    """Serve a call eagerly, and compare it with replays of its graph from the same start.

    If the effects differ, the size runs eagerly from now on. If padding may be the cause, all padded batches of the
    signature run eagerly instead.

    Raises:
        VerificationError: the effects differ, and ``on_capture_failure`` is "raise".
    """
    # Under the lock: a capture in another thread must not use the random generators meanwhile.
    with plan.table.ranks.together(), CAPTURE_LOCK, plan.proving():
        return _CallProof(owner, call, plan).run()


def learn_writes(
    owner: GraphOwner, call: Call, proof: ReplayProof, observer: MemoryObserver, saved: SavedMemory
) -> bool:
    """Note the writes of a proof's eager run; True if it wrote to unknown memory: a replay could not be undone then."""
    binding, memory = call.binding, call.memory
    unknown = not proof.written_inputs <= binding.written
    binding.written |= proof.written_inputs
    binding.note_written(observer, memory)
    owner.keep_external(call, [observer], set(memory.values()))
    return unknown or not observer.written <= saved.keys


def first_distance(cost: float, verify: int) -> int:
    """Return the number of replays until the next comparison, if a comparison takes the time of `cost` replays."""
    return math.ceil(cost / (_SHARE * verify))


class _CallProof:
    """One proof, on a call of a wrapped module."""

    def __init__(self, owner: GraphOwner, call: Call, plan: Plan) -> None:
        self._owner = owner
        self._call = call
        self._plan = plan
        self._table = plan.table
        self._ranks = self._table.ranks
        self._label = plan.graph.counters.label
        self._memory = owner.seen.save(self._table, call)
        self._generators = drawn_generators(call, self._table.device.torch_device)
        self._is_certain = True  # False if padding rows may have written values that were there already

    def run(self) -> Any:
        """Run eagerly, replay, compare, and restore the effects of the eager run."""
        plan = self._plan
        memory: Any = self._memory
        if self._ranks.any(f"memory that a proof of {self._label} cannot copy", memory is None):
            plan.graph.leave_unverified("it writes more memory than a proof copies")
            return plan.replay(self._call.leaves, plan.copies(self._call.leaves))
        self._table.stats.ran_eagerly(Reason.PROOF, size=self._call.batch)
        mismatch, freed = None, False
        with ReplayProof(self._table, plan.graph, memory, self._generators) as proof:
            proof.callback(plan.inputs.forget_padding)
            _, observer = proof.run_eager(self._run, self._call.batch)
            number = self._call.binding.learn_numbers(self._table, observer.numbers, in_graph=True)
            unknown = self._ranks.any(
                f"unknown memory that {self._label} writes",
                learn_writes(self._owner, self._call, proof, observer, memory),
            )
            gone = plan.graph.describe_freed()
            if self._ranks.any(f"freed memory that {self._label} touches", gone is not None):
                unknown, mismatch, freed = False, gone, True  # a replay would read freed memory
            elif not unknown:
                mismatch = self._compare(proof, observer)
                mismatch = (number if plan.padding else None) or mismatch
        if unknown:
            if plan.graph.count_uncompared_run():
                plan.graph.leave_unverified("it keeps writing to other memory")
            return self._result
        # Then eager read another number than the graph.
        is_other = mismatch is not None and bool(self._call.plain.set_by_others(self._call.module))
        if self._ranks.any(f"a number that other code set during a proof of {self._label}", is_other):
            return self._result  # the next call is compared
        self._note(proof, mismatch, freed=freed)
        return self._result if mismatch is not None else plan.in_static_outputs(self._result)

    def _run(self) -> Any:
        with bypassed(Reason.NESTED):
            self._result = self._call.run(self._call.args, self._call.kwargs)
        return self._plan.for_comparison(self._result)

    # The comparison.

    def _compare(self, proof: ReplayProof, observer: MemoryObserver) -> str | None:
        """Describe how replays differ from eager, or from replays with other padding; None if they do not."""
        if proof.structure_mismatch:
            return proof.structure_mismatch
        again = functools.partial(self._replay, proof)
        if not self._plan.padding:
            self._plan.graph.operators = observer.operators
            # Torch chooses kernels by alignment and strides, too, and another kernel may round differently.
            return proof.compare(again, same_kernels=self._plan.same_layout(self._call.leaves))
        # Ranks may have different batch sizes. Breaks may run only once. Fewer rows draw other random numbers.
        runs_parts = not (self._plan.program.breaks or proof.draws or self._ranks.size > 1)
        try:
            padded, mismatch = self._run_padded(proof) if runs_parts else (None, None)
            if mismatch is not None:
                return mismatch
            first = again()
            # With declared padding values, padding rows may be written to memory: only real rows are compared.
            declared = any(static.arg.pad is not None for static in self._plan.inputs.inputs.values())
            memory = not (declared or getattr(self._call.module, "writes_padding_rows", False))
            other = self._replay(proof, repeat_rows=True)
            mismatch = proof.differs_beyond_noise(first, other, again, memory=memory)
            if mismatch is not None and observer.rounds_by_group:  # padding rows change the size of a group
                mismatch = proof.difference(first, other, rounded=True, memory=memory)
            if mismatch is None and memory:
                mismatch = proof.written_in_part()
                self._is_certain = mismatch is None
            if proof.draws:
                mismatch = mismatch or "it draws random numbers, and other ones for padding rows, too"
            mismatch = mismatch or proof.difference(first, proof.expected, rounded=True, memory=memory)
            if runs_parts:
                mismatch = mismatch or self._compare_parts(proof, first, padded, again, memory=memory)
            if mismatch is None and self._plan.graph.operators not in (None, observer.operators):
                proof.rounding = by_least_precise(OTHER_OPERATORS, observer.dtypes)
                mismatch = proof.difference(first, proof.expected, rounded=True, memory=memory)
            return mismatch
        except Exception as error:
            return proof.describe_error(error)

    def _run_padded(self, proof: ReplayProof) -> tuple[tuple[Effects, str | None] | None, str | None]:
        """Run eagerly on all padded rows, if that is compared, or an index may be out of range.

        A replay with such an index would end the process's use of the GPU. Arguments are padded by valid indices.

        Returns:
            What `_run_part` returned if it is compared; else None. And how the run fails; None if it does not.
        """
        plan, indices, row_counts = self._plan, self._plan.program.indices, self._plan.graph.compared_row_counts
        is_first = row_counts is not None and not row_counts
        can_fail = indices is not None and (indices.may_fault or plan.padded in indices.computed_sizes)
        if not (is_first or can_fail):
            return None, None
        with self._undoing():
            try:
                found = self._run_part(proof, plan.padded)
                return (found if is_first else None), None
            except Exception as error:
                if is_first or isinstance(error, IndexError):
                    return None, f"eager raises {type(error).__name__} with {plan.padded} rows: {error}"
                # Replays show if that counts.
                logger.debug("%s fails with %d rows", self._label, plan.padded, exc_info=True)
        return None, None

    def _compare_parts(
        self,
        proof: ReplayProof,
        first: Effects,
        padded: tuple[Effects, str | None] | None,
        again: Callable[[], Effects],
        *,
        memory: bool,
    ) -> str | None:
        """Compare a graph's first padded replay with eager runs on all padded rows, and on half of the real rows.

        Rounding differs between batch sizes, and can hide an effect of the number of rows if the two numbers are close.
        Half of the rows double such an effect. Return the difference; None if there is none.
        """
        plan, row_counts = self._plan, self._plan.graph.compared_row_counts
        if row_counts is None or any(rows < plan.padded for rows in row_counts):
            return None
        mismatch, half = None, (plan.rows + 1) // 2
        with self._undoing():
            if padded is not None:
                eager, mismatch = padded
                mismatch = mismatch or proof.differs_beyond_noise(
                    first._replace(inputs=()), eager, again, memory=memory
                )
            # Not if the replay had twice the rows already, or if padding values are declared.
            if mismatch is not None or plan.padded >= 2 * plan.rows or not memory:
                return mismatch
            expected = self._call.binding.outputs.cut(proof.expected.outputs, half, plan.rows)
            try:
                eager, mismatch = self._run_part(proof, half)
            except Exception:  # the forward refuses such a batch
                logger.debug("%s fails with %d rows", self._label, half, exc_info=True)
                return None
            mismatch = mismatch or first_difference(eager.outputs, expected, tolerance=proof.rounding)
            return mismatch and f"with {half} of {plan.rows} rows {mismatch}"

    @contextlib.contextmanager
    def _undoing(self) -> Iterator[None]:
        """Surround runs on parts of the rows, whose changes of Python state are undone."""
        with Undo(None, ()) as undo:
            undo.watch(self._call.module, code=True, plain=self._call.plain)
            yield

    def _run_part(self, proof: ReplayProof, rows: int) -> tuple[Effects, str | None]:
        """Run eagerly on the first `rows` rows of the static inputs; return its effects, and `learn_numbers` of it."""
        plan, call = self._plan, self._call
        self._load(proof)
        leaves = plan.inputs.passed(call.layout.args, lambda static: static.copied_part(plan.padded, rows))
        args, kwargs = call.spec.unflatten(leaves)
        with Undo(None, self._generators, kept=self._memory) as undo, bypassed(Reason.NESTED):
            with IndexChecks(), MemoryObserver(rows=rows, before_write=undo.copy) as observer:
                leaves, _ = flatten(wait_collectives(call.run(args, kwargs)))
            effects = proof.effects(call.binding.outputs.cut(leaves, min(rows, plan.rows), rows))
        if rows == plan.padded:
            plan.graph.operators = observer.operators
        return effects, call.binding.learn_numbers(self._table, observer.numbers, in_graph=True)

    def _replay(self, proof: ReplayProof, *, repeat_rows: bool = False) -> Effects:
        """Replay the caller's rows; `repeat_rows` pads by repeating them, except inputs with declared padding."""
        plan = self._plan
        names = [name for name, _ in self._memory.inputs] if self._memory is not None else []
        self._load(proof)
        for static in plan.inputs.inputs.values() if repeat_rows else ():
            if static.arg.pad is None:
                static.repeat(plan.rows, plan.padded)
        proof.repeats = repeat_rows
        statics = [plan.inputs.inputs[name].part(plan.padded, 0, plan.rows) for name in names]
        return proof.replay(plan.compared, statics)

    def _load(self, proof: ReplayProof) -> None:
        """Restore the start of the eager run, and load the caller's rows into the static inputs."""
        proof.rewind()
        self._plan.inputs.forget_padding()
        self._plan.load(self._plan.copies(self._call.leaves))

    # The verdict.

    def _note(self, proof: ReplayProof, mismatch: str | None, *, freed: bool) -> None:
        """Note the verdict of all ranks.

        Args:
            proof: the closed proof.
            mismatch: the difference of the effects; None if there is none.
            freed: True if the graph touches freed memory, which padding does not cause.
        """
        plan, call, table, graph = self._plan, self._call, self._table, self._plan.graph
        if mismatch is not None and graph.proof_distance and not graph.replays_until_proof:
            total = graph.counters.replays
            proven = total - graph.proof_distance
            mismatch += (
                f"; the graph equalled eager after {proven:,} replays, and now, after {total:,}, it does not: answers "
                "since then may be wrong"
            )
        verdict = proof.agree(mismatch)
        if verdict is None:
            # The batch sizes of ranks may differ, and measured times do.
            alone = self._ranks.size == 1
            cost = proof.seconds / proof.replay_seconds if alone else _COST_WITH_RANKS
            graph.note_proven(call.batch, first_distance(cost, table.config.verify), per_row_count=alone)
            if plan.program.breaks and not call.plain.note_equal(graph.set_by_breaks, graph.unread_places):
                graph.compare_again()  # with what the breaks have set now
            return
        text, where, difference = verdict
        remedy = _REMEDY
        if plan.program.breaks and (names := call.plain.set_by_latest_run(graph.unread_places)):
            remedy = (
                f"The call set {quoted(names)}, which it may read. If an eager break did, {IN_BREAK}. Else: {_REMEDY}"
            )
        if plan.padding and not freed:
            verb = "changes" if self._is_certain else "may change"
            text = f"padding {call.batch} rows to {call.padded} {verb} the answer{where}"
            if call.binding.padding_refusal is None:  # `learn_numbers` may have warned already
                warn = table.config.on_capture_failure != "raise"
                call.binding.stop_padding(table, text, difference, remedy, warn=warn)
        else:
            self._owner.refuse(call, f"{text}: {difference}", remedy)
        proof.raise_if_configured(text, difference, remedy)
