"""Proves a pair of graphs on a call of the caller's, whose forward and backward run eagerly, beside replays."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from simplegraph.base.context import bypassed
from simplegraph.base.errors import VerificationError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import wait_collectives
from simplegraph.call.call import Call, invoke
from simplegraph.call.memory import ModuleMemory
from simplegraph.call.plan import NOTHING
from simplegraph.device.generators import put_random_states, random_states
from simplegraph.device.memory import SavedMemory
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.manager.proof import Effects, ReplayProof
from simplegraph.manager.table import CapturedGraph
from simplegraph.program.observe import MemoryObserver
from simplegraph.training.leaves import Leaves, StandIns
from simplegraph.training.lessons import Lessons, keeps_graph
from simplegraph.training.pair import GraphPair, Ticket
from simplegraph.training.recording import written_outputs

logger = logging.getLogger("simplegraph")

_REMEDY = "Python state is frozen in a graph (state_key); simplegraph.eager() keeps calls out of it."


class PairOwner(Protocol):
    """Owns the pairs that are proven; `leaves` are the tensors of their module that may want gradients."""

    leaves: Leaves

    def memory(self, call: Call) -> ModuleMemory:
        """Find the memory that a call's forward may write."""

    def note_seen(self, module: nn.Module, observers: Sequence[MemoryObserver], inputs: set[int]) -> None:
        """Own what runs were seen to read, beside their inputs and what the module holds; note what they wrote."""


class ProvenTicket(Ticket):
    """One call that runs eagerly, and proves graphs by replays that start where eager did.

    The eager run has an autograd graph of its own behind the caller's node, so that each gradient is made once.

    Args:
        builder: of the pair.
        call: the call.
    """

    def __init__(self, pair: GraphPair, lessons: Lessons, builder: PairOwner, call: Call) -> None:
        super().__init__(pair, lessons, NOTHING)
        self._builder, self._call = builder, call
        self._table = pair.plan.table
        self._memory = builder.memory(call)
        self._eager: tuple[list[Tensor], list[Tensor]] = [], []
        self._forward: ReplayProof | None = None

    def forward(self) -> list[Tensor]:
        """Run the forward eagerly, and compare a replay. Call with the pool's lock held."""
        pair, plan, call = self.pair, self.pair.plan, self._call
        saved = self._memory.save()
        if saved is None:
            self._leave_unverified("it writes more memory than a proof copies")
            self._copies = plan.copies(call.leaves)
            return super().forward()
        started = time.perf_counter()
        pair.lane.take(self)
        self._keeps = True  # if torch does
        self._table.stats.ran_eagerly(Reason.PROOF, size=call.batch)
        with CAPTURE_LOCK:
            proof = ReplayProof(self._table, plan.graph, saved, self._memory.generators())
            try:
                outputs, observer = proof.run_eager(self._run, call.batch)
                if self._learn(proof, observer, saved):
                    if plan.graph.keeps_writing_elsewhere():
                        self._leave_unverified("it keeps writing to other memory")
                else:
                    self._forward = proof
                    replay = functools.partial(self._replay_forward, proof, saved)
                    alike = plan.laid_alike(call.leaves)
                    self._verdict(plan.graph, self._compared(proof, replay, alike=alike))
            finally:
                proof.close()
        self._versions = [tensor._version for tensor in pair.read]
        plan.graph.counters.proof_seconds += time.perf_counter() - started
        return [output.detach() for output in outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the backward eagerly, and compare a replay."""
        if not self._eager[0]:
            return super().backward(grads)
        pair = self.pair
        self.check()
        first, saved = self._forward, self._memory.save()
        run = functools.partial(self._run_backward, grads)
        proves = pair.refused is None and not self.done and self.serial == pair.lane.serial
        if first is None or saved is None or not proves:
            found = run()
        else:
            started, graph = time.perf_counter(), pair.route(grads).graph
            with pair.lane.manager.pool.lock, CAPTURE_LOCK:
                kept = SavedMemory(saved.tensors)  # it reads no input of the caller's
                proof = ReplayProof(self._table, graph, kept, self._memory.generators())
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
        call, leaves = self._call, self._builder.leaves
        held = StandIns(leaves, leaves.wanting())
        wanting = [at for at, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        passed = [leaf.detach().requires_grad_() if at in wanting else leaf for at, leaf in enumerate(call.leaves)]
        args, kwargs = call.spec.unflatten(passed)
        with leaves.replaced(held), bypassed(Reason.NESTED), torch.enable_grad():
            result = wait_collectives(invoke(call.module, args, kwargs))
        outputs = written_outputs(flatten(result)[0], [*passed, *held.tensors])
        targets = [*(passed[at] for at in wanting), *held.tensors]
        self._eager = outputs, [targets[number] for number in self.pair.leaves]
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

    def _learn(self, proof: ReplayProof, observer: MemoryObserver, saved: SavedMemory) -> bool:
        """Note what the forward wrote; True if it is more than was known, so that a replay could not be undone."""
        binding, memory = self._call.binding, self._call.memory
        unknown = not proof.written_inputs <= binding.written
        binding.written |= proof.written_inputs
        binding.note_written(observer, memory)
        own = set(memory.values())
        self._builder.note_seen(self._call.module, [observer], own)
        return unknown or any(key not in saved and key not in own for key in observer.written)

    # The comparison.

    def _replay_forward(self, proof: ReplayProof, saved: SavedMemory) -> Effects:
        plan = self.pair.plan
        statics = [plan.inputs.inputs[name].view(plan.padded) for name, _ in saved.inputs]
        copies = plan.copies(self._call.leaves)
        return proof.replay(plan.program.outputs, statics, lambda _: plan.load(copies))

    def _prove_backward(
        self,
        proof: ReplayProof,
        first: ReplayProof,
        grads: Sequence[Tensor | None],
        found: Sequence[Tensor | None],
    ) -> None:
        pair = self.pair
        route = pair.route(grads)
        places = dict(route.made)
        if {place for place, grad in enumerate(found) if grad is not None} != places.keys():
            self._verdict(route.graph, "it makes gradients of other tensors")
            return
        outputs = list(map(places.get, range(len(pair.leaves))))
        again = False

        def replay() -> Effects:
            nonlocal again
            if again:  # the first one may have written over what the forward left
                states = random_states(self._memory.generators())
                saved = self._memory.save()
                if saved is not None:
                    self._replay_forward(first, saved)
                put_random_states(self._memory.generators(), states)
            again = True
            return proof.replay(outputs, (), lambda _: route.load(grads))

        buffers = zip(pair.gradients, grads, strict=True)
        alike = all(grad is None or buffer is None or grad.stride() == buffer.stride() for buffer, grad in buffers)
        self._verdict(route.graph, self._compared(proof, replay, alike=alike))

    def _compared(self, proof: ReplayProof, replay: Callable[[], Effects], *, alike: bool) -> str | None:
        """Say how replays differ from eager; `alike` if eager's kernels are the graph's, so that bits count."""
        try:
            effects = replay()
            found = proof.beyond_noise(effects, proof.expected, replay)
            return found if alike or found is None else proof.difference(effects, proof.expected, rounded=True)
        except Exception as error:
            logger.debug("a replay of %s failed in its proof", self.pair.plan.graph.counters.label, exc_info=True)
            return f"a replay fails with {type(error).__name__}: {error}"

    # The verdict.

    def _verdict(self, graph: CapturedGraph, found: str | None) -> None:
        pair, table = self.pair, self._table
        if found is None:
            graph.prove(graph.descriptor.num_tokens)
            pair.note_proofs()
            return
        cause = f"a replay of {graph.counters.label} does not equal eager: {found}"
        table.refuse(pair.jobs[:1], cause, _REMEDY)
        table.forget(pair.jobs[1:])
        pair.refused = CannotBind(Reason.CAPTURE_FAILED, cause)
        self._forward = None
        if table.config.on_capture_failure == "raise":
            raise VerificationError(f"{cause}.\n  {_REMEDY}")

    def _leave_unverified(self, why: str) -> None:
        for graph in (self.pair.plan.graph, *(backward.graph for backward in self.pair.backwards)):
            graph.leave_unverified(why)
        self.pair.note_proofs()
