"""A pair of graphs: a module's forward and its backward, as one node of the caller's autograd graph."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from simplegraph.errors import ReplayError
from simplegraph.graph.tensors import storage_key
from simplegraph.manager.jobs import CaptureJob
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.table import CapturedGraph
from simplegraph.module.plan import Copies, Plan, check_places
from simplegraph.nested import TreeSpec
from simplegraph.reasons import CannotBind
from simplegraph.training.handed import GraphGradients, HandingOut, alone_in_memory
from simplegraph.training.lessons import Lessons

_version = operator.attrgetter("_version")
_DOUBLE = (
    "this module's forward ran as a graph, whose backward is a graph, too, and has no backward of its own: "
    "create_graph=True is not possible. Call it inside simplegraph.eager(), or wrap it without training=True."
)


class Lane:
    """Memory for the pairs of all signatures, of which one at a time is between its forward and its backward.

    Args:
        new_manager: makes what keeps the graphs, in a pool that nothing else uses.
        number: tells it from others.
        handing_out: the permission of all lanes to hand out gradients as they are.

    Attributes:
        serial: the number of forwards so far.
        handed: the gradients that the last backward handed out as they are, until all were taken back.
    """

    def __init__(self, new_manager: Callable[[], CudaGraphManager], number: int, handing_out: HandingOut) -> None:
        self._new_manager, self.number, self.serial = new_manager, number, 0
        self._ticket: weakref.ref[Ticket] | None = None
        self.handing_out = handing_out
        self.handed: GraphGradients | None = None

    @functools.cached_property
    def manager(self) -> CudaGraphManager:
        """Keeps the graphs; made at the first use, since most loops need one lane."""
        return self._new_manager()

    def drop(self) -> None:
        """Drop the graphs, unless a backward needs them: then they go with it."""
        if "manager" not in vars(self):
            return
        if self.free:
            self.manager.reset()
        else:
            self.manager.stats.dropped(self.manager.table.graphs)

    @property
    def free(self) -> bool:
        """True unless what a forward left here waits for its backward, or a gradient that lies here is in use."""
        ticket = None if self._ticket is None else self._ticket()
        return (ticket is None or ticket.done) and (self.handed is None or self._take_back(self.handed))

    def _take_back(self, handed: GraphGradients) -> bool:
        """Take back the memory of gradients, from `.grad` by a copy; True if nobody else has one of them."""
        if not handed.unused:
            if not self.handing_out.may_move(handed):
                return False
            manager = self.manager
            with manager.pool.lock:
                manager.table.order_streams()
                handed.move()
        self.handed = None
        return True

    def take(self, ticket: Ticket) -> None:
        """Let a forward leave here what its backward reads."""
        self.serial += 1
        ticket.serial = self.serial
        self._ticket = weakref.ref(ticket)


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """A captured backward.

    Attributes:
        graph: what is replayed.
        outputs: the numbers of the outputs that it takes gradients of.
        places: for each gradient that it makes, the number of its leaf.
    """

    graph: CapturedGraph
    outputs: frozenset[int]
    places: Sequence[int]


class Route(NamedTuple):
    """The way of a backward: its graph, what that is given, and where the gradients that eager makes, too, go.

    Attributes:
        loaded: (number of an output, buffer of its gradient); zeroed: buffers of gradients that are missing.
        made: (place among the leaves, output of the graph) of all gradients.
        handed: those that may be handed out as they are; copied: the others; gradients: those, None if there are none.
    """

    graph: CapturedGraph
    loaded: Sequence[tuple[int, Tensor]]
    zeroed: Sequence[Tensor]
    made: Sequence[tuple[int, Tensor]]
    handed: Sequence[tuple[int, Tensor]]
    copied: Sequence[tuple[int, Tensor]]
    gradients: GraphGradients | None

    def load(self, grads: Sequence[Tensor | None]) -> None:
        """Copy gradients of outputs to where the graph reads them; those that are missing count as zeros."""
        if len(self.loaded) == 1:
            ((number, buffer),) = self.loaded
            buffer.copy_(cast(Tensor, grads[number]))
        elif self.loaded:
            buffers = [buffer for _, buffer in self.loaded]
            torch._foreach_copy_(buffers, [cast(Tensor, grads[number]) for number, _ in self.loaded])
        for buffer in self.zeroed:
            buffer.zero_()


@dataclasses.dataclass(frozen=True)
class Returned:
    """Turns what a graph writes into what the caller gets.

    Attributes:
        spec: how it nests.
        leaves: values that are the same at each call, None where another place has something.
        written: place -> the number of the graph's output.
        given: place -> the index of the argument that is returned.
        constant: numbers of the outputs that have no gradient.
    """

    spec: TreeSpec
    leaves: Sequence[Any]
    written: dict[int, int]
    given: dict[int, int]
    constant: frozenset[int]

    def nest(self, outputs: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
        """Return what the caller gets."""
        leaves = list(self.leaves)
        for place, number in self.written.items():
            leaves[place] = outputs[number]
        for place, index in self.given.items():
            leaves[place] = arguments[index]
        return self.spec.unflatten(leaves)


@dataclasses.dataclass(eq=False)
class GraphPair:
    """A forward graph and its backward graphs.

    Attributes:
        lane: where they live; jobs: what they were captured from.
        plan: serves the forward.
        backwards: the one for the usual outputs first; the last takes gradients of all outputs.
        returned: how outputs reach the caller.
        gradients: buffers for the gradients of outputs, by their number; None where there is none.
        reaches: for each output, the numbers of the leaves in its history.
        leaves: by number, what gradients flow to: arguments, given by their index, and then tensors of the module.
        read: those of the module that a backward reads.
        retains: a second backward finds what the first one read.
        refused: why it serves no call any more.
    """

    lane: Lane
    jobs: Sequence[CaptureJob]
    plan: Plan
    backwards: Sequence[Backward]
    returned: Returned
    gradients: Sequence[Tensor | None]
    reaches: Sequence[frozenset[int]]
    leaves: Mapping[int, int | Tensor]
    read: Sequence[Tensor]
    retains: bool
    refused: CannotBind | None = None
    _routes: dict[tuple[bool, ...], Route] = dataclasses.field(default_factory=dict)

    @property
    def unproven(self) -> bool:
        """True if the next call is to be compared with eager."""
        return self.plan.graph.unproven > 0 or self.backwards[0].graph.unproven > 0

    def attached(self, arguments: Sequence[Any]) -> list[Tensor]:
        """List the tensors of a call that gradients flow to."""
        return [arguments[leaf] if isinstance(leaf, int) else leaf for leaf in self.leaves.values()]

    def route(self, grads: Sequence[Tensor | None]) -> Route:
        """Find the way of a backward that is given these gradients of outputs."""
        present = tuple([grad is not None for grad in grads])
        known = self._routes.get(present)
        if known is None:
            known = self._routes[present] = self._new_route(present)
        return known

    def _new_route(self, present: tuple[bool, ...]) -> Route:
        given = {number for number, there in enumerate(present) if there}
        backward = next((known for known in self.backwards if known.outputs >= given), self.backwards[-1])
        buffers = {number: self.gradients[number] for number in backward.outputs}
        reached = frozenset().union(*(self.reaches[number] for number in given))
        outputs = {leaf: backward.graph.program.outputs[at] for at, leaf in enumerate(backward.places)}
        order = list(self.leaves)
        made = [(order.index(leaf), outputs[leaf]) for leaf in backward.places if leaf in reached]
        held = [leaf for leaf in self.leaves.values() if isinstance(leaf, Tensor)]
        shared = collections.Counter(map(storage_key, backward.graph.program.outputs))
        alone = [
            (place, out)
            for place, out in made
            if shared[storage_key(out)] == 1 and not self.retains and self._is_handed(order[place], out)
        ]
        return Route(
            backward.graph,
            loaded=[(number, buffer) for number, buffer in buffers.items() if buffer is not None and number in given],
            zeroed=[buffer for number, buffer in buffers.items() if buffer is not None and number not in given],
            made=made,
            handed=alone,
            copied=[(place, out) for place, out in made if place not in dict(alone)],
            gradients=GraphGradients([out for _, out in alone], held) if alone else None,
        )

    def _is_handed(self, leaf: int, output: Tensor) -> bool:
        """True if a gradient is one of the module's tensors and lies in memory that its graph writes."""
        device, pool = self.plan.device, self.plan.pool
        return isinstance(self.leaves[leaf], Tensor) and device.in_pool(pool, output) and alone_in_memory(output)


class Ticket:
    """One call that graphs serve, from its forward to its backward.

    Args:
        pair: the graphs.
        leaves: the arguments; copies: which of them have to be copied.

    Attributes:
        serial: the number of the forward in its lane.
        done: a backward ran.
    """

    serial = 0

    def __init__(self, pair: GraphPair, lessons: Lessons, copies: Copies) -> None:
        self.pair, self._lessons, self._copies = pair, lessons, copies
        self.done, self._keeps = False, pair.retains
        self._versions: list[int] = []

    def forward(self) -> list[Tensor]:
        """Replay the forward; return its outputs in memory of their own. Call with the pool's lock held."""
        pair = self.pair
        if pair.plan.debug:
            check_places(pair.plan)
        pair.lane.take(self)
        pair.plan.table.replay(pair.plan.graph, 0, pair.plan.load, self._copies)
        self._copies = ([], [])
        self._versions = list(map(_version, pair.read))
        return [output.clone() for output in pair.plan.program.outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; return the gradients of the leaves, in memory of their own or of the graph.

        Raises:
            ReplayError: what it reads is gone, or it shall be differentiated itself.
        """
        pair, manager = self.pair, self.pair.lane.manager
        self.check()
        route = pair.route(grads)
        with manager.pool.lock:
            if self.serial != pair.lane.serial:
                raise ReplayError(
                    "a second backward of a forward that ran as a graph, after another forward wrote over what it "
                    "reads. Run both before the next forward, or call that module inside simplegraph.eager()."
                )
            manager.table.replay(route.graph, 0, route.load, grads)
            found: list[Tensor | None] = [None] * len(pair.leaves)
            copied = route.made
            if pair.lane.handing_out.permitted and route.gradients is not None:
                pair.lane.handed, copied = route.gradients, route.copied
                for place, output in route.handed:
                    found[place] = output.detach()
            # The others in new memory, by one call: what the caller keeps, no replay may write to.
            if copied:
                made = torch._foreach_mul([output for _, output in copied], 1)
                for (place, _), grad in zip(copied, made, strict=True):
                    found[place] = grad
        self.finish(grads)
        return found

    def check(self) -> None:
        """Refuse a backward that eager would refuse, or that no graph can do. Raises ReplayError."""
        if torch.is_grad_enabled():
            self._lessons.twice = True
            raise ReplayError(_DOUBLE)
        if self.done and not self._keeps:
            raise ReplayError(
                "a second backward of a forward that ran as a graph, whose first one wrote over what it reads. The "
                "calls after this one keep it: training graphs are captured again for retain_graph=True."
            )
        names = [
            tuple(leaf.shape) for leaf, was in zip(self.pair.read, self._versions, strict=False) if leaf._version != was
        ]
        if names:
            raise ReplayError(
                f"a weight of shape {names[0]} was changed between a forward and its backward, which reads it. Run the "
                "backward before the optimizer's step, as eager asks for, too."
            )

    def finish(self, grads: Sequence[Tensor | None]) -> None:
        """Note that a backward ran, and what it was like."""
        self.done = True
        self._lessons.note([number for number, grad in enumerate(grads) if grad is not None])


_NOTHING = torch.empty(0)


class GraphedCall(torch.autograd.Function):
    """The node that stands in the caller's autograd graph for a module whose forward and backward are graphs."""

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run a ticket's forward; `leaves` are what its gradients flow to."""
        outputs = ticket.forward()
        ctx.ticket = ticket
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_NOTHING)  # so that torch tells of a second backward without retain_graph
        ctx.mark_non_differentiable(*(outputs[number] for number in ticket.pair.returned.constant))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the ticket's backward."""
        _ = ctx.saved_tensors
        if all(grad is None for grad in grads):  # what follows needs none of them, nor does eager make any then
            return (None,) * len(ctx.needs_input_grad)
        return None, *ctx.ticket.backward(grads)


# Past the Python of `Function.apply`, which looks at each argument for functorch: no such call comes here.
apply: Callable[..., Any] = super(torch.autograd.Function, GraphedCall).apply
