"""Proves a pair of graphs on a call of the caller's, whose forward and backward run eagerly, beside replays."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from simplegraph.base.errors import VerificationError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Call, invoke
from simplegraph.call.memory import drawn_generators
from simplegraph.call.plan import NOTHING
from simplegraph.device.memory import SavedMemory, put_random_states, random_states
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.manager.proof import Effects, ReplayProof
from simplegraph.manager.table import CapturedGraph
from simplegraph.serve.proof import learn_writes
from simplegraph.training.builder import PairBuilder
from simplegraph.training.notes import keeps_graph
from simplegraph.training.pair import PairPlan, PairReplay
from simplegraph.training.recording import Arguments

logger = logging.getLogger("simplegraph")

_REMEDY = "Python state is frozen in a graph (state_key); simplegraph.eager() keeps calls out of it."


class PairProof(PairReplay):
    """One call that runs eagerly, and proves graphs by replays that start where eager did.

    The eager run has an autograd graph of its own behind the caller's node, so that each gradient is made once.

    Args:
        builder: of the plan.
        call: the call.
    """

    def __init__(self, plan: PairPlan, builder: PairBuilder, call: Call) -> None:
        super().__init__(plan, NOTHING)
        self._builder, self._call = builder, call
        self._table = plan.table
        self._seen = builder.seen
        self._generators, self._key = drawn_generators(call, plan.table.device.torch_device), builder.key(call)
        self._eager: tuple[list[Tensor], list[Tensor]] = [], []
        self._forward: ReplayProof | None = None

    def forward(self) -> list[Tensor]:
        """Run the forward eagerly, and compare a replay. Call with the pool's lock held."""
        plan, call = self.plan, self._call
        saved = self._seen.save(self._table, self._call)
        if saved is None:
            self._leave_unverified("it writes more memory than a proof copies")
            self._copies = plan.copies(call.leaves)
            return super().forward()
        started = time.perf_counter()
        plan.last.take(self)
        self._keeps = True  # if torch does
        self._table.stats.ran_eagerly(Reason.PROOF, size=call.batch)
        with CAPTURE_LOCK:
            proof = ReplayProof(self._table, plan.graph, saved, self._generators)
            try:
                outputs, observer = proof.run_eager(self._run, call.batch)
                if learn_writes(self._builder, call, proof, observer, saved):
                    if plan.graph.keeps_writing_elsewhere():
                        self._leave_unverified("it keeps writing to other memory")
                else:
                    self._forward = proof
                    replay = functools.partial(self._replay_forward, proof, saved)
                    alike = plan.laid_alike(call.leaves)
                    self._verdict(plan.graph, self._compared(proof, replay, alike=alike))
            finally:
                proof.close()
        self._versions = [tensor._version for tensor in plan.read]
        plan.graph.counters.proof_seconds += time.perf_counter() - started
        return [output.detach() for output in outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the backward eagerly, and compare a replay."""
        if not self._eager[0]:
            return super().backward(grads)
        plan = self.plan
        self.check()
        first, saved = self._forward, self._seen.save(self._table, self._call)
        run = functools.partial(self._run_backward, grads)
        proves = self._key not in self._builder.refused and not self.done and self.serial == plan.last.serial
        if first is None or saved is None or not proves:
            found = run()
        else:
            started, graph = time.perf_counter(), plan.path(grads).graph
            with plan.pool.lock, CAPTURE_LOCK:
                kept = SavedMemory(saved.tensors)  # it reads no input of the caller's
                proof = ReplayProof(self._table, graph, kept, self._generators)
                try:
                    found, _ = proof.run_eager(run, self._call.batch)
                    self._prove_backward(proof, first, grads, found)
                finally:
                    proof.close()
            graph.counters.proof_seconds += time.perf_counter() - started
        if not keeps_graph():
            self._forward = None  # but the eager run stays: outputs that share nothing have backwards one by one
        self.finish(frozenset(number for number, grad in enumerate(grads) if grad is not None))
        return found

    # The eager runs.

    def _run(self) -> list[Tensor]:
        call = self._call
        arguments = Arguments(call, call.leaves, self._builder.leaves_of(call.module))
        outputs = arguments.written(flatten(arguments.run(functools.partial(invoke, call.module)))[0])
        targets = arguments.targets
        self._eager = outputs, [targets[number] for number in self.plan.leaves]
        return outputs

    def _run_backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        outputs, targets = self._eager
        given = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        made = torch.autograd.grad(
            [output for output, _ in given],
            targets,
            [grad for _, grad in given],
            retain_graph=keeps_graph(),
            allow_unused=True,
        )
        return list(made)

    # The comparison.

    def _replay_forward(self, proof: ReplayProof, saved: SavedMemory) -> Effects:
        plan = self.plan
        statics = [plan.inputs.inputs[name].view(plan.padded) for name, _ in saved.inputs]
        copies = plan.copies(self._call.leaves)
        proof.rewind()
        plan.load(copies)
        return proof.replay(plan.program.outputs, statics)

    def _prove_backward(
        self,
        proof: ReplayProof,
        first: ReplayProof,
        grads: Sequence[Tensor | None],
        found: Sequence[Tensor | None],
    ) -> None:
        plan = self.plan
        path = plan.path(grads)
        places = dict(zip(path.places, path.made, strict=True))
        if {place for place, grad in enumerate(found) if grad is not None} != places.keys():
            self._verdict(path.graph, "it makes gradients of other tensors")
            return
        outputs = list(map(places.get, range(len(plan.leaves))))
        again = False

        def replay() -> Effects:
            nonlocal again
            if again:  # the first one may have written over what the forward left
                states = random_states(self._generators)
                saved = self._seen.save(self._table, self._call)
                if saved is not None:
                    self._replay_forward(first, saved)
                put_random_states(self._generators, states)
            again = True
            proof.rewind()
            path.load(grads)
            return proof.replay(outputs)

        buffers = zip(plan.gradients, grads, strict=True)
        alike = all(grad is None or buffer is None or grad.stride() == buffer.stride() for buffer, grad in buffers)
        self._verdict(path.graph, self._compared(proof, replay, alike=alike))

    def _compared(self, proof: ReplayProof, replay: Callable[[], Effects], *, alike: bool) -> str | None:
        """Say how replays differ from eager; `alike` if eager's kernels are the graph's, so that bits count."""
        try:
            effects = replay()
            found = proof.beyond_noise(effects, proof.expected, replay)
            return found if alike or found is None else proof.difference(effects, proof.expected, rounded=True)
        except Exception as error:
            logger.debug("a replay of %s failed in its proof", self.plan.graph.counters.label, exc_info=True)
            return f"a replay fails with {type(error).__name__}: {error}"

    # The verdict.

    def _verdict(self, graph: CapturedGraph, found: str | None) -> None:
        plan, table = self.plan, self._table
        if found is None:
            graph.prove(graph.descriptor.num_tokens)
            plan.proven = not plan.unproven
            return
        cause = f"a replay of {graph.counters.label} does not equal eager: {found}"
        table.refuse(plan.jobs[:1], cause, _REMEDY)
        table.forget(plan.jobs[1:])
        self._builder.refused[self._key] = CannotBind(Reason.CAPTURE_FAILED, cause)
        self._forward = None
        if table.config.on_capture_failure == "raise":
            raise VerificationError(f"{cause}.\n  {_REMEDY}")

    def _leave_unverified(self, why: str) -> None:
        for graph in (self.plan.graph, *(backward.graph for backward in self.plan.backwards)):
            graph.leave_unverified(why)
