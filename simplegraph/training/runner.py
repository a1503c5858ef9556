"""Serves the calls of a module wrapped for training: calls under grad mode by pairs of graphs, others as in inference.

A pair is proven on one of the caller's calls, whose forward and backward run eagerly, beside replays.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphConfig, CudaGraphMode
from simplegraph.base.context import CALLS
from simplegraph.base.errors import ConfigError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.dispatch import Dispatch
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.call.call import Call
from simplegraph.call.external_memory import drawn_generators
from simplegraph.call.plan import NOTHING
from simplegraph.device.protocol import CAPTURE_LOCK, GraphPool
from simplegraph.device.saved_state import SavedMemory, put_random_states, random_states
from simplegraph.distributed.ranks import SingleRank
from simplegraph.manager.lifecycle import CapturedGraph
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.replay_proof import Effects, ReplayProof
from simplegraph.manager.stats import GraphReport, GraphStats
from simplegraph.serve.call_proof import learn_writes
from simplegraph.serve.runner import GraphRunner
from simplegraph.training.builder import PairBuilder
from simplegraph.training.notes import keeps_graph, refuse_hooks
from simplegraph.training.pair import PairPlan, PairReplay
from simplegraph.training.recording import StandIns

_grad_enabled = torch.is_grad_enabled  # looked up once


class NothingToDifferentiate(Exception):
    """Nothing in a call wants gradients; internal."""


class PairRunner(GraphRunner):
    """The pairs of one module in one mode, training or not, each for the exact shapes of its calls.

    They share no pool: a forward's memory must last until its backward, whatever runs in between.

    Args:
        config: the wrapper's settings; stats: its counters.
    """

    trains = True
    carries = False
    builder_kind = PairBuilder
    replays_per_call = 2

    def __init__(self, config: CudaGraphConfig, stats: GraphStats) -> None:
        exact = {"mode": CudaGraphMode.FULL, "exact_shapes": True, "lengths": None, "length_dims": {}}
        super().__init__(config.replace(**exact, progress=False), stats=stats)

    def _gradients(self, builder: Any, module: Any, leaves: Sequence[Any], names: Sequence[str]) -> Hashable:
        """Describe the tensors that require gradients, and whether autocast caches casts, which affects a backward."""
        if not builder.seen.read.wants_grad(module, leaves):
            raise NothingToDifferentiate
        refuse_hooks(module)
        wanting = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        return wanting, builder.leaves_of(module).wanting_names, torch.is_autocast_cache_enabled()

    def _dispatch(
        self, manager: CudaGraphManager, size: int, leaves: Sequence[Any], names: Sequence[str]
    ) -> tuple[int, Dispatch]:
        """Return the rows of the first tensor with a dimension, and a graph of exactly these; see `GraphRunner`."""
        shapes = ((name, leaf.shape) for leaf, name in zip(leaves, names, strict=True) if isinstance(leaf, Tensor))
        name, shape = next(((name, shape) for name, shape in shapes if shape), ("", torch.Size([1])))
        rows = shape[0]
        if rows == 0:
            raise CannotBind(Reason.EMPTY_BATCH, f"{name} has shape {tuple(shape)}")
        return rows, Dispatch(CudaGraphMode.FULL, BatchDescriptor(rows), Reason.EXACT, 0)

    @staticmethod
    def prove(builder: PairBuilder, call: Call, plan: PairPlan) -> Any:
        """Run forward and backward eagerly, and compare replays with them."""
        return plan.serve(PairProof(plan, builder, call), call.leaves)


class TrainingRunner(GraphRunner):
    """The graphs of a module wrapped with ``training=True``."""

    carries = False

    def _use(
        self, settings: CudaGraphConfig, config: CudaGraphConfig, pool: GraphPool | None, ranks: SingleRank | None
    ) -> None:
        if ranks is not None:
            raise ConfigError("training=True does not go with ranks: training graphs are captured by each rank alone.")
        super()._use(settings, config, pool, ranks)
        self._pairs = {mode: PairRunner(config, self.stats) for mode in (False, True)}
        self._graphs_training = config.training and config.mode is not CudaGraphMode.NONE

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call."""
        context = CALLS.context
        if self._graphs_training and _grad_enabled() and (context is None or context.bypass is None):
            try:
                return self._pairs[module.training].call(module, args, kwargs)
            except NothingToDifferentiate:
                return super().call(module, args, kwargs)
        return super().call(module, args, kwargs)

    @property
    def builders(self) -> list[Any]:
        return [*super().builders, *(builder for pairs in self._pairs.values() for builder in pairs.builders)]

    def report(self) -> GraphReport:
        """See `CudaGraphWrapper.graph_report`."""
        used = next((builder.manager for builder in self.builders), None)
        return super().report() if used in (None, self.manager) else used.report()

    def reset(self, operation: str = "reset_graphs") -> None:
        """Drop all graphs; see `GraphRunner.reset`."""
        super().reset(operation)
        for pairs in self._pairs.values():
            pairs.reset(operation)


_REMEDY = "Python state is frozen in a graph (state_key); simplegraph.eager() keeps calls out of it."


class PairProof(PairReplay):
    """One call that runs eagerly, and proves graphs by replays from the same start.

    The eager run has a separate autograd graph behind the caller's node, so that each gradient is made once.

    Args:
        builder: the builder of the plan.
        call: the call.
    """

    def __init__(self, plan: PairPlan, builder: PairBuilder, call: Call) -> None:
        super().__init__(plan, NOTHING)
        self._builder, self._call = builder, call
        self._table = plan.table
        self._seen = builder.seen
        self._generators = drawn_generators(call, plan.table.device.torch_device)
        self._record = builder.record(call)
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
        plan.last.take(self)
        self._keeps = True  # if torch does
        self._table.stats.ran_eagerly(Reason.PROOF, size=call.batch)
        with CAPTURE_LOCK:
            with ReplayProof(self._table, plan.graph, saved, self._generators) as proof:
                outputs, observer = proof.run_eager(self._run, call.batch)
                unknown = learn_writes(self._builder, call, proof, observer, saved)
                if not unknown:
                    replay = functools.partial(self._replay_forward, proof, saved)
                    mismatch = proof.compare(replay, same_kernels=plan.same_layout(call.leaves))
            if not unknown:
                self._forward = proof
                self._verdict(proof, plan.graph, mismatch)
            elif plan.graph.count_uncompared_run():
                self._leave_unverified("it keeps writing to other memory")
        self._versions = [tensor._version for tensor in plan.read]
        return [output.detach() for output in outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the backward eagerly, and compare a replay."""
        if not self._eager[0]:
            return super().backward(grads)
        plan = self.plan
        self.check()
        first, saved = self._forward, self._seen.save(self._table, self._call)
        run = functools.partial(self._run_backward, grads)
        proves = self._record.refusal is None and not self.done and self.serial == plan.last.serial
        if first is None or saved is None or not proves:
            made = run()
        else:
            kept = SavedMemory(saved.tensors)  # a backward reads none of the caller's inputs
            graph = plan.path(grads).graph
            with plan.pool.lock, CAPTURE_LOCK:
                with ReplayProof(self._table, graph, kept, self._generators) as proof:
                    made, _ = proof.run_eager(run, self._call.batch)
                    mismatch = self._compare_backward(proof, first, grads, made)
                self._verdict(proof, graph, mismatch)
        if not keeps_graph():
            self._forward = None  # the eager run stays, since unrelated outputs may have their own backwards
        self.finish(frozenset(number for number, grad in enumerate(grads) if grad is not None))
        return made

    # The eager runs.

    def _run(self) -> list[Tensor]:
        call = self._call
        arguments = StandIns(call, call.leaves, self._builder.leaves_of(call.module))
        outputs = arguments.written(flatten(arguments.run(call.run))[0])
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

    def _compare_backward(
        self,
        proof: ReplayProof,
        first: ReplayProof,
        grads: Sequence[Tensor | None],
        made: Sequence[Tensor | None],
    ) -> str | None:
        plan = self.plan
        path = plan.path(grads)
        places = dict(zip(path.places, path.made, strict=True))
        if {place for place, grad in enumerate(made) if grad is not None} != places.keys():
            return "it makes gradients of other tensors"
        outputs = list(map(places.get, range(len(plan.leaves))))
        again = False

        def replay() -> Effects:
            nonlocal again
            if again:  # the first replay may have overwritten what the forward left
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
        return proof.compare(replay, same_kernels=alike)

    # The verdict.

    def _verdict(self, proof: ReplayProof, graph: CapturedGraph, mismatch: str | None) -> None:
        plan, table, verdict = self.plan, self._table, proof.agree(mismatch)
        if verdict is None:
            graph.note_proven(graph.descriptor.num_tokens)
            plan.proven = not plan.unproven
            return
        cause = f"{verdict.text}: {verdict.difference}"
        table.refuse(plan.jobs[:1], cause, _REMEDY)
        table.forget(plan.jobs[1:])
        self._record.refuse(CannotBind(Reason.CAPTURE_FAILED, cause))
        self._forward = None
        proof.raise_if_configured(verdict.text, verdict.difference, _REMEDY)

    def _leave_unverified(self, why: str) -> None:
        for graph in (self.plan.graph, *self.plan.backwards):
            graph.leave_unverified(why)
