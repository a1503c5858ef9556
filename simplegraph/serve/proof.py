"""Proves the graphs of a wrapped module on its calls: the first of each batch size, and one now and then."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from simplegraph.base.context import bypassed
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import wait_collectives
from simplegraph.call.call import Call
from simplegraph.call.memory import MemoryInUse, Undo, drawn_generators
from simplegraph.call.plan import Plan
from simplegraph.device.memory import SavedMemory
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.manager.proof import OTHER_OPERATORS, Effects, ReplayProof, by_least_precise, first_difference
from simplegraph.program.index_checks import IndexChecks
from simplegraph.program.observe import MemoryObserver

logger = logging.getLogger("simplegraph")

_REMEDY = (
    "simplegraph.check(module, inputs) says more, and tries what padding writes. If the forward mixes rows, set "
    "padding=False, or declare pad_values; if it reads numbers or flags of Python, name them in state_key."
)


_SHARE = 0.01  # of the time that replays take: what comparing some of them again may add, for verify=1
_COST_WITH_RANKS = 100.0  # replays that are taken to last as long as a proof


class GraphOwner(Protocol):
    """Owns the graphs of a module, as a `GraphBuilder` does: is told what a proof finds.

    Attributes:
        seen: memory that the forward was seen to use beside its arguments.
    """

    seen: MemoryInUse

    def keep_external(self, call: Call, observers: Sequence[MemoryObserver], inputs: set[int]) -> None:
        """Own what runs were seen to read, beside their inputs and what the module holds."""

    def refuse(self, call: Call, cause: str, remedy: str) -> None:
        """Give up the graph of the call's size."""


def prove(owner: GraphOwner, call: Call, plan: Plan) -> Any:
    """Serve a call eagerly, and prove its graph by replays that start where eager did.

    A graph whose effects differ serves no call: its size runs eagerly from now on or, if padding made the difference,
    every padded batch of such calls does.

    Raises:
        VerificationError: they differ, and ``on_capture_failure`` is "raise".
    """
    # Alone: a capture in another thread has the random generators for itself.
    with plan.table.ranks.together(), CAPTURE_LOCK, plan.proving():
        return _CallProof(owner, call, plan).run()


def learn_writes(
    owner: GraphOwner, call: Call, proof: ReplayProof, observer: MemoryObserver, saved: SavedMemory
) -> bool:
    """Note what a proof's eager run wrote; True if it is more than was known, so that a replay could not be undone."""
    binding, memory = call.binding, call.memory
    unknown = not proof.written_inputs <= binding.written
    binding.written |= proof.written_inputs
    binding.note_written(observer, memory)
    owner.keep_external(call, [observer], set(memory.values()))
    return unknown or not observer.written <= saved.keys


def first_distance(cost: float, verify: int) -> int:
    """Return after how many replays a call is compared again, if that takes as long as `cost` replays."""
    return math.ceil(cost / (_SHARE * verify))


class _CallProof:
    def __init__(self, owner: GraphOwner, call: Call, plan: Plan) -> None:
        self._owner = owner
        self._call = call
        self._plan = plan
        self._table = plan.table
        self._ranks = self._table.ranks
        self._label = plan.graph.counters.label
        self._memory = owner.seen.save(self._table, call)
        self._generators = drawn_generators(call, self._table.device.torch_device)
        self._shown = True  # what would differ

    def run(self) -> Any:
        """Run eagerly, replay, compare, and let everything be as eager left it."""
        plan, memory, unsaved = self._plan, self._memory, self._memory is None
        if self._ranks.any(f"memory that a proof of {self._label} cannot copy", unsaved) or memory is None:
            plan.graph.leave_unverified("it writes more memory than a proof copies")
            return plan.replay(self._call.leaves, plan.copies(self._call.leaves))
        self._table.stats.ran_eagerly(Reason.PROOF, size=self._call.batch)
        found, freed = None, False
        with ReplayProof(self._table, plan.graph, memory, self._generators) as proof:
            proof.callback(plan.inputs.forget_padding)
            _, observer = proof.run_eager(self._run, self._call.batch)
            number = self._call.binding.learn_numbers(self._table, observer.numbers)
            unknown = self._ranks.any(
                f"unknown memory that {self._label} writes",
                learn_writes(self._owner, self._call, proof, observer, memory),
            )
            gone = plan.graph.freed()
            if self._ranks.any(f"freed memory that {self._label} touches", gone is not None):
                unknown, found, freed = False, gone, True  # it may not be replayed at all
            elif not unknown:
                found = self._compare(proof, observer)
                found = (number if plan.padding else None) or found
        if unknown:
            if plan.graph.keeps_writing_elsewhere():
                plan.graph.leave_unverified("it keeps writing to other memory")
            return self._result
        self._note(proof, found, freed=freed)
        return self._result if found is not None else plan.handed_out(self._result)

    def _run(self) -> Any:
        with bypassed(Reason.NESTED):
            self._result = self._call.run(self._call.args, self._call.kwargs)
        return self._plan.whole(self._result)

    # The comparison.

    def _compare(self, proof: ReplayProof, observer: MemoryObserver) -> str | None:
        """Say how replays differ from eager, or from each other under other padding; None if they do not."""
        if proof.structure_mismatch:
            return proof.structure_mismatch
        again = functools.partial(self._replay, proof)
        if not self._plan.padding:
            self._plan.graph.operators = observer.operators
            # Kernels are chosen by alignment and strides, too: another one may round otherwise.
            return proof.compare(again, alike=self._plan.same_layout(self._call.leaves))
        try:
            first = again()
            # What was declared as padding may be written somewhere: then only real rows count.
            declared = any(static.arg.pad is not None for static in self._plan.inputs.inputs.values())
            memory = not (declared or getattr(self._call.module, "writes_padding_rows", False))
            other = self._replay(proof, repeat_rows=True)
            found = proof.differs_beyond_noise(first, other, again, memory=memory)
            if found is not None and observer.rounds_by_group:  # padding rows are in some group, too
                found = proof.difference(first, other, rounded=True, memory=memory)
            if found is None and memory:
                found = proof.written_in_part()
                self._shown = found is None
            if proof.draws:
                found = found or "it draws random numbers, and other ones for padding rows, too"
            found = found or proof.difference(first, proof.expected, rounded=True, memory=memory)
            found = found or self._compare_parts(proof, first, again, memory=memory)
            if found is None and self._plan.graph.operators not in (None, observer.operators):
                proof.rounding = by_least_precise(OTHER_OPERATORS, observer.dtypes)
                found = proof.difference(first, proof.expected, rounded=True, memory=memory)
            return found
        except Exception as error:
            return proof.failure(error)

    def _compare_parts(
        self, proof: ReplayProof, first: Effects, again: Callable[[], Effects], *, memory: bool
    ) -> str | None:
        """Say how a graph's first padded replay differs from eager on the padded rows, or eager's half from its whole.

        Rounding differs between batch sizes, and hides what depends on a number of rows that is nearly the same. Half
        of the rows change that twofold.
        """
        plan, graph = self._plan, self._plan.graph
        known = graph.rows is None or any(rows < plan.padded for rows in graph.rows)
        # Ranks may have other batch sizes. Breaks run once a call, and a draw of fewer numbers draws others.
        if known or graph.program.breaks or proof.draws or self._ranks.size > 1:
            return None
        found, half = None, (plan.rows + 1) // 2
        with Undo(None, ()) as undo:
            undo.watch(self._call.module, code=True)
            if not graph.rows:
                try:
                    eager, found = self._run_part(proof, plan.padded)
                except Exception as error:
                    return f"eager fails with {plan.padded} rows: {type(error).__name__}: {error}"
                found = found or proof.differs_beyond_noise(first._replace(inputs=()), eager, again, memory=memory)
            # The replay had twice the rows, or rows beside the real ones are what somebody declared.
            if found is not None or plan.padded >= 2 * plan.rows or not memory:
                return found
            expected = self._call.binding.outputs.cut(proof.expected.outputs, half, plan.rows)
            try:
                eager, found = self._run_part(proof, half)
            except Exception:  # where no half can be told from a whole
                logger.debug("%s fails with %d rows", self._label, half, exc_info=True)
                return None
            found = found or first_difference(eager.outputs, expected, tolerance=proof.rounding)
            return found and f"with {half} of {plan.rows} rows {found}"

    def _run_part(self, proof: ReplayProof, rows: int) -> tuple[Effects, str | None]:
        """Run eagerly on the first rows of the static inputs; say if a number follows the batch size."""
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
        return effects, call.binding.learn_numbers(self._table, observer.numbers)

    def _replay(self, proof: ReplayProof, *, repeat_rows: bool = False) -> Effects:
        """Replay the caller's rows; `repeat_rows` pads with these over and over, where no rule is declared."""
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
        """Begin again where eager did, with the caller's rows in the static inputs."""
        proof.rewind()
        self._plan.inputs.forget_padding()
        self._plan.load(self._plan.copies(self._call.leaves))

    # The verdict.

    def _note(self, proof: ReplayProof, found: str | None, *, freed: bool) -> None:
        """Remember the verdict of all ranks.

        Args:
            proof: is closed.
            found: the difference.
            freed: True if the graph touches memory that was given back, whatever the padding.
        """
        plan, call, table, graph = self._plan, self._call, self._table, self._plan.graph
        if found is not None and graph.distance and not graph.replays_until_proof:
            total = graph.counters.replays
            found += (
                f"; the graph equalled eager after {total - graph.distance:,} replays, and now, after {total:,}, it "
                "does not: answers since then may be wrong"
            )
        verdict = proof.agree(found)
        if verdict is None:
            # Batch sizes of ranks may differ, and their clocks do.
            alone = self._ranks.size == 1
            cost = proof.seconds / proof.replay_seconds if alone else _COST_WITH_RANKS
            graph.prove(call.batch, first_distance(cost, table.config.verify), per_row_count=alone)
            return
        text, where, said = verdict
        if plan.padding and not freed:
            verb = "changes" if self._shown else "may change"
            text = f"padding {call.batch} rows to {call.padded} {verb} the answer{where}"
            if call.binding.padding_refusal is None:  # else a number of the batch size was found, and warned of
                warn = table.config.on_capture_failure != "raise"
                call.binding.stop_padding(table, text, said, _REMEDY, warn=warn)
        else:
            self._owner.refuse(call, f"{text}: {said}", _REMEDY)
        proof.fail(text, said, _REMEDY)
