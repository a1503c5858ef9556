"""A pair of graphs, of a module's forward and its backward, and the calls that they serve."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

from simplegraph.base.errors import ReplayError
from simplegraph.base.nested import LEAF
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key
from simplegraph.call.call import Call
from simplegraph.call.inputs import InputSet, Spans
from simplegraph.call.plan import NOTHING, Copies, Plan
from simplegraph.guard.guards import CapturedState
from simplegraph.guard.torch_state import GLOBAL_BACKWARD_HOOKS, GLOBAL_BACKWARD_PRE_HOOKS
from simplegraph.manager.lifecycle import SERVED, CapturedGraph
from simplegraph.manager.table import CaptureJob, ProgramTable
from simplegraph.training.notes import keeps_graph
from simplegraph.training.recording import Recording

_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_grad_enabled = torch.is_grad_enabled  # looked up once
_DOUBLE = (
    "this module's forward ran as a graph, whose backward is a graph, too, and has no backward of its own: "
    "create_graph=True is not possible. Call it inside simplegraph.eager(), or wrap it without training=True."
)


class LastForward:
    """The forward that last wrote the graphs' memory, which its backward reads.

    Attributes:
        serial: the number of forwards so far.
    """

    def __init__(self) -> None:
        self.serial = 0
        self._replay: Callable[[], PairReplay | None] = lambda: None

    @property
    def pending(self) -> bool:
        """True if its backward may still come."""
        replay = self._replay()
        return replay is not None and not replay.done

    def take(self, replay: PairReplay) -> None:
        """Make another forward the last. Call with the pool's lock held, and with none pending."""
        replay.serial = self.serial = self.serial + 1
        self._replay = weakref.ref(replay)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GradientPath:
    """The path of gradients through a backward: its graph, its inputs, and the outputs that eager makes, too.

    Attributes:
        given: the numbers of the outputs that it is given gradients of.
        loaded: (number of an output, buffer of its gradient); zeroed: buffers of gradients that are missing.
        places: the places, among all leaves, of leaves that get gradients; made: these gradients in the graph's memory.
    """

    graph: CapturedGraph
    given: frozenset[int]
    loaded: Sequence[tuple[int, Tensor]]
    zeroed: Sequence[Tensor]
    places: Sequence[int]
    made: list[Tensor]

    def load(self, grads: Sequence[Any]) -> None:
        """Copy gradients of outputs to the buffers that the graph reads; missing ones count as zeros."""
        if len(self.loaded) == 1:
            number, buffer = self.loaded[0]
            buffer.copy_(grads[number])
        elif self.loaded:
            buffers = [buffer for _, buffer in self.loaded]
            torch._foreach_copy_(buffers, [grads[number] for number, _ in self.loaded])
        for buffer in self.zeroed:
            buffer.zero_()


class PairPlan(Plan):
    """Serves calls under grad mode by a forward graph and its backward graphs; see `Plan`.

    Args:
        jobs: the jobs of the graphs: forward, the backward for the usual outputs, and perhaps one for all outputs.
        recording: the runs that were captured.
        read: the storage keys of tensors that the backwards read.
        last: the forward that last ran in their memory.

    Attributes:
        backwards: the captured backwards, in the order of `jobs`.
        gradients: buffers for the gradients of outputs, by their number; None for an output without one.
        leaves: leaves that get gradients, by number: first arguments, given by their index, then tensors of the module.
        read: tensors of the module that a backward reads.
        retains: True if a second backward is possible: the first one keeps saved tensors.
        constant: numbers of the outputs that have no gradient.
        proven: True if no replay came since the proof.
    """

    differentiable = True
    only_replays = False  # a forward waits for its backward

    def __init__(
        self,
        call: Call,
        table: ProgramTable,
        inputs: InputSet,
        state: CapturedState,
        forbidden_memory: Sequence[tuple[int, Spans]],
        jobs: Sequence[CaptureJob],
        recording: Recording,
        read: Set[int],
        last: LastForward,
    ) -> None:
        forward, *self.backwards = (table.graphs[job.key] for job in jobs)
        super().__init__(call, table, forward, inputs, state, forbidden_memory)
        self.jobs, self.last, self.proven = jobs, last, False
        self.gradients, self.retains, self.notes = recording.gradients, recording.retains, recording.notes
        tape, arguments = recording.tape, recording.arguments
        self._reaches = tape.reaches
        self._made = recording.backwards
        for other in self.backwards[1:]:
            other.leave_unverified("for gradients of other outputs than the calls before")
        self.constant = frozenset(range(len(tape.reaches))) - tape.wanting
        self._nested = tape
        self._is_tensor = tape.spec == LEAF and tape.written == {0: 0}
        self.read = [tensor for tensor in arguments.originals if storage_key(tensor) in read]
        reached = frozenset().union(*tape.reaches)  # eager's graph does not contain leaves that no output depends on
        self.leaves = {number: leaf for number, leaf in enumerate(arguments.leaves) if number in reached}
        self._attached = list(self.leaves.values())
        self._passed = [(place, leaf) for place, leaf in enumerate(self._attached) if isinstance(leaf, int)]
        self._module_tensors = recording.module_tensors
        self._wanting = list(map(_requires_grad, self._module_tensors))
        self._arguments = [(at, leaf.requires_grad) for at, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        self._needs = self.notes.needs
        self._caches = torch.is_autocast_cache_enabled()
        self._paths: dict[tuple[bool, ...], GradientPath] = {}

    @property
    def unproven(self) -> bool:
        """True if the next call is to be compared with eager."""
        graphs = self.graph, self.backwards[0]
        return any(graph.verdict(graph.descriptor.num_tokens) not in SERVED for graph in graphs)

    def bind(self, leaves: Sequence[Any]) -> Copies | None:
        """Return the copies that this call needs; None if it requires other gradients, needs more, or has hooks."""
        if (
            self.notes.needs != self._needs
            or self.notes.twice
            or GLOBAL_BACKWARD_HOOKS
            or GLOBAL_BACKWARD_PRE_HOOKS
            or torch.is_autocast_cache_enabled() is not self._caches
            or list(map(_requires_grad, self._module_tensors)) != self._wanting
        ):
            return None
        copies = super().bind(leaves)
        if copies is None or any(leaves[at].requires_grad is not wants for at, wants in self._arguments):
            return None
        return copies

    def replay(self, leaves: Sequence[Any], copies: Copies) -> Any:
        """Replay the forward, and make a node for the backward; call with the pool's lock held. Raises CannotBind."""
        return self.serve(PairReplay(self, copies), leaves)

    def serve(self, replay: PairReplay, leaves: Sequence[Any]) -> Any:
        """Run a replay's forward, and return the caller's result. Raises CannotBind."""
        if self.last.pending:
            raise CannotBind(Reason.BACKWARD_PENDING, "")
        attached: list[Any] = self._attached
        if self._passed:
            attached = attached.copy()
            for place, index in self._passed:
                attached[place] = leaves[index]
        outputs = _apply(replay, *attached)
        return outputs[0] if self._is_tensor else self._nested.nest(outputs, leaves)

    def path(self, grads: Sequence[Tensor | None]) -> GradientPath:
        """Return the path of a backward that is given these gradients of outputs."""
        present = tuple([grad is not None for grad in grads])
        path = self._paths.get(present)
        if path is None:
            path = self._paths[present] = self._new_path(present)
        return path

    def _new_path(self, present: tuple[bool, ...]) -> GradientPath:
        given = frozenset(number for number, there in enumerate(present) if there)
        captured = list(zip(self.backwards, self._made, strict=True))
        graph, (outputs, leaves) = next((backward for backward in captured if backward[1][0] >= given), captured[-1])
        buffers = [(number, buffer) for number in outputs if (buffer := self.gradients[number]) is not None]
        reached = frozenset().union(*(self._reaches[number] for number in given))
        order = list(self.leaves)
        pairs = zip(leaves, graph.program.outputs, strict=True)
        made = [(order.index(leaf), output) for leaf, output in pairs if leaf in reached]
        return GradientPath(
            graph,
            given,
            loaded=[(number, buffer) for number, buffer in buffers if number in given],
            zeroed=[buffer for number, buffer in buffers if number not in given],
            places=[place for place, _ in made],
            made=[output for _, output in made],
        )


class PairReplay:
    """One call that a pair serves, from its forward to its backward.

    Args:
        plan: the plan with the graphs.
        copies: the arguments that have to be copied.

    Attributes:
        serial: the number of the forward in its memory.
        done: True if a backward ran; released: numbers of outputs whose backward ran without retain_graph.
    """

    __slots__ = ("__weakref__", "_copies", "_keeps", "_versions", "done", "plan", "released", "serial")

    def __init__(self, plan: PairPlan, copies: Copies) -> None:
        self.plan, self._copies = plan, copies
        self.serial, self.done, self.released = 0, False, frozenset[int]()
        self._keeps = plan.retains

    def forward(self) -> list[Tensor]:
        """Replay the forward; return its outputs, in memory of their own. Call with the pool's lock held."""
        plan = self.plan
        if plan.debug:
            plan.check_places()
        if plan.proven:  # release the proof's memory
            plan.proven = False
            plan.device.release_cached_memory()
        plan.last.take(self)
        copies, self._copies = self._copies, NOTHING
        plan.table.order_streams()
        if copies is not NOTHING:
            plan.load(copies)
        copied = plan.device.mark() if plan.waits else None
        plan.table.replay(plan.graph)
        if copied is not None:  # while the graph runs
            copied.wait()
        self._versions = list(map(_version, plan.read))
        return [output.clone() for output in plan.program.outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Replay the backward; return the gradients of the leaves, in memory of their own.

        Raises:
            ReplayError: its saved tensors were overwritten, or it is to be differentiated itself.
        """
        plan, path = self.plan, self.plan.path(grads)
        self.check()
        with plan.pool.lock:
            if self.serial != plan.last.serial:
                raise ReplayError(
                    "a second backward of a forward that ran as a graph, after another forward wrote over what it "
                    "reads. Run both before the next forward, or call that module inside simplegraph.eager()."
                )
            plan.table.order_streams()
            path.load(grads)
            plan.table.replay(path.graph)
            leaf_grads: list[Tensor | None] = [None] * len(plan.leaves)
            # In new memory, by one call: no replay may write to gradients that the caller keeps.
            if path.places:
                for place, grad in zip(path.places, torch._foreach_mul(path.made, 1), strict=True):
                    leaf_grads[place] = grad
        self.finish(path.given)
        return leaf_grads

    def check(self) -> None:
        """Refuse a backward that eager would refuse, or that no graph can do. Raises ReplayError."""
        if _grad_enabled():
            self.plan.notes.twice = True
            raise ReplayError(_DOUBLE)
        if self.done and not self._keeps:
            self.plan.notes.add((), again=True)
            raise ReplayError(
                "this forward ran as a graph, and its first backward overwrote what a second one reads. Later calls "
                "keep it: their graphs are captured again for retain_graph=True."
            )
        read, before = self.plan.read, self._versions
        now = list(map(_version, read))
        if now != before:
            changed = next(leaf for leaf, is_, was in zip(read, now, before, strict=True) if is_ != was)
            raise ReplayError(
                f"a weight of shape {tuple(changed.shape)} was changed between a forward and its backward, which reads "
                "it. Run the backward before the optimizer's step, as eager asks for, too."
            )

    def finish(self, given: frozenset[int]) -> None:
        """Note that a backward ran, and the outputs that it was given gradients of."""
        self.plan.notes.add(given, again=self.done)
        self.done = True
        if not keeps_graph():
            self.released |= given


# torch's own message for a node that saves tensors; saving one would cost more than noting the release.
_RELEASED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved "
    "tensors after calling backward."
)


class GraphedCall(torch.autograd.Function):
    """The node of the caller's autograd graph: runs a `PairReplay`'s forward, and later its backward."""

    @staticmethod
    def forward(ctx: Any, replay: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run a replay's forward; `leaves` are the tensors that get gradients."""
        outputs = replay.forward()
        ctx.replay = replay
        ctx.materialize_grads = False  # as `set_materialize_grads` does
        constant = replay.plan.constant
        if constant:
            ctx.mark_non_differentiable(*(outputs[number] for number in constant))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the replay's backward."""
        replay = ctx.replay
        if replay.released and any(grads[number] is not None for number in replay.released):
            raise RuntimeError(_RELEASED)
        if all(grad is None for grad in grads):  # eager makes no gradients then, either
            return None, *(None for _ in replay.plan.leaves)
        return None, *replay.backward(grads)


# Skip the Python code of `Function.apply`, which checks each argument for functorch: no such call comes here.
_apply: Callable[..., Any] = super(torch.autograd.Function, GraphedCall).apply
# Likewise skip the Python code that supports all styles of autograd functions.
cast(Any, GraphedCall)._backward_cls.apply = GraphedCall.backward
