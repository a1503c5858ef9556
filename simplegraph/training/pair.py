"""A pair of graphs: a module's forward and its backward, and a call that they serve."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.errors import ReplayError
from simplegraph.base.nested import LEAF, TreeSpec
from simplegraph.base.reasons import CannotBind
from simplegraph.base.tensors import storage_key
from simplegraph.call.plan import NOTHING, Copies, Plan, check_places
from simplegraph.manager.jobs import CaptureJob
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.training.handed import GraphGradients, HandedOut, HandingOut, alone_in_memory
from simplegraph.training.leaves import requires_grad
from simplegraph.training.lessons import Lessons, keeps_graph
from simplegraph.training.routes import Backward, Route

_version = operator.attrgetter("_version")
_grad_enabled = torch.is_grad_enabled  # looked up once
_DOUBLE = (
    "this module's forward ran as a graph, whose backward is a graph, too, and has no backward of its own: "
    "create_graph=True is not possible. Call it inside simplegraph.eager(), or wrap it without training=True."
)


def _no_ticket() -> None:
    """Stands for the weak reference to a ticket before there is one."""


class Lane:
    """Memory for the pairs of all signatures, of which one at a time is between its forward and its backward.

    Args:
        new_manager: makes what keeps the graphs, in a pool that nothing else uses.
        number: tells it from others.
        handing_out: the permission of all lanes to hand out outputs and gradients as they are.

    Attributes:
        serial: the number of forwards so far.
        lent: the outputs that the last forward handed out as they are; handed: the gradients of the last backward.
    """

    def __init__(self, new_manager: Callable[[], CudaGraphManager], number: int, handing_out: HandingOut) -> None:
        self._new_manager, self.number, self.serial = new_manager, number, 0
        self._ticket: Callable[[], Ticket | None] = _no_ticket
        self.handing_out = handing_out
        self.lent: HandedOut | None = None
        self.handed: GraphGradients | None = None

    @functools.cached_property
    def manager(self) -> CudaGraphManager:
        """Keeps the graphs; made at the first use, since most loops need one lane."""
        return self._new_manager()

    def drop(self) -> Lane:
        """Drop the graphs, unless a backward needs them: then they go with it. Return what serves from now on."""
        if "manager" in vars(self):
            if not self.vacate():
                self.manager.stats.dropped(self.manager.table.graphs)
                self.manager.table.graphs.clear()
                return Lane(self._new_manager, self.number, self.handing_out)
            self.lent = self.handed = None
            self.manager.reset()
        return self

    def vacate(self) -> bool:
        """Make the lane free for a forward if that can be; gradients that only `.grad` has get memory of their own.

        Returns:
            False if what a forward left here waits for its backward, or something that was handed out here is in use.
        """
        ticket, lent, handed = self._ticket(), self.lent, self.handed
        if ticket is not None and not ticket.done:
            return False
        if lent is not None and not lent.unused():
            self.handing_out.output_kept()
            return False
        return handed is None or handed.unused() or self._move(handed)

    @property
    def lends(self) -> bool:
        """True if it is free but for an output that is in use."""
        ticket, lent = self._ticket(), self.lent
        return (ticket is None or ticket.done) and lent is not None and not lent.unused()

    def _move(self, handed: GraphGradients) -> bool:
        """Give gradients in `.grad` memory of their own; False if anybody else has one of them."""
        if not self.handing_out.may_move(handed):
            return False
        manager = self.manager
        with manager.pool.lock:
            manager.table.order_streams()
            handed.move()
        return True

    def take(self, ticket: Ticket) -> None:
        """Let a forward leave here what its backward reads. Call with the pool's lock held, and with the lane free."""
        ticket.serial = self.serial = self.serial + 1
        self._ticket = weakref.ref(ticket)
        self.lent = self.handed = None


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
        held: all tensors of the module that may want gradients; others: those that are no leaves; flags: if they do.
        lent: the outputs, if they may be handed out as they are.
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
    held: Sequence[Tensor]
    lent: HandedOut | None = None
    refused: CannotBind | None = None
    _routes: dict[tuple[bool, ...], Route] = dataclasses.field(default_factory=dict)
    _gradients_of: dict[Backward, GraphGradients] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.note_proofs()
        self.single = self.returned.spec == LEAF and self.returned.written == {0: 0}
        self.constant = self.returned.constant
        self._attached = list(self.leaves.values())
        self.needs = (False, *(True for _ in self._attached))  # as torch tells a node of it, the ticket first
        own = set(map(id, self._attached))
        self.others = [tensor for tensor in self.held if id(tensor) not in own]
        self.flags = list(map(requires_grad, self.others))
        self._passed = [(place, leaf) for place, leaf in enumerate(self._attached) if isinstance(leaf, int)]

    def note_proofs(self) -> None:
        """Look if the next call is to be compared with eager."""
        graphs = self.plan.graph, self.backwards[0].graph
        self.unproven = any(graph.unproven(graph.descriptor.num_tokens) for graph in graphs)

    def lend(self, written: Sequence[int], given: Set[int]) -> None:
        """Let outputs be handed out as they are, if that can be.

        Whoever has one may write to it, so none is lent that a backward reads, as eager would refuse to, nor two that
        share memory.

        Args:
            written: the storage keys of the outputs while they were captured.
            given: those of all that the backwards were passed.
        """
        outputs, device, pool = self.plan.program.outputs, self.plan.device, self.plan.pool
        apart = len(set(written)) == len(outputs) and given.isdisjoint(written)
        if apart and all(device.in_pool(pool, output) and alone_in_memory(output) for output in outputs):
            self.lent = HandedOut(outputs)

    def attached(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """List the tensors of a call that gradients flow to."""
        attached: list[Any] = self._attached
        if self._passed:
            attached = attached.copy()
            for place, index in self._passed:
                attached[place] = arguments[index]
        return attached

    def route(self, grads: Sequence[Tensor | None]) -> Route:
        """Find the way of a backward that is given these gradients of outputs."""
        present = tuple([grad is not None for grad in grads])
        known = self._routes.get(present)
        if known is None:
            known = self._routes[present] = self._new_route(present)
        return known

    def _new_route(self, present: tuple[bool, ...]) -> Route:
        given = frozenset(number for number, there in enumerate(present) if there)
        backward = next((known for known in self.backwards if known.outputs >= given), self.backwards[-1])
        buffers = {number: self.gradients[number] for number in backward.outputs}
        reached = frozenset().union(*(self.reaches[number] for number in given))
        outputs = {leaf: backward.graph.program.outputs[at] for at, leaf in enumerate(backward.places)}
        order = list(self.leaves)
        made = [(order.index(leaf), outputs[leaf]) for leaf in backward.places if leaf in reached]
        gradients = self._handed_by(backward)
        alone = [] if gradients is None else [(place, out) for place, out in made if storage_key(out) in gradients.keys]
        return Route(
            backward.graph,
            given,
            loaded=[(number, buffer) for number, buffer in buffers.items() if buffer is not None and number in given],
            zeroed=[buffer for number, buffer in buffers.items() if buffer is not None and number not in given],
            made=made,
            handed=alone,
            copied=[(place, out) for place, out in made if place not in dict(alone)],
            gradients=gradients if alone else None,
        )

    def _handed_by(self, backward: Backward) -> GraphGradients | None:
        """Return the gradients that a graph may hand out as they are: of tensors of the module, each in memory alone.

        They are the same for all ways through the graph: each look at their memory counts as a use of it.
        """
        known = self._gradients_of.get(backward)
        if known is None and not self.retains:
            held = {number: leaf for number, leaf in self.leaves.items() if isinstance(leaf, Tensor)}
            device, pool, outputs = self.plan.device, self.plan.pool, backward.graph.program.outputs
            shared = collections.Counter(map(storage_key, outputs))
            alone = [
                out
                for leaf, out in zip(backward.places, outputs, strict=True)
                if leaf in held and shared[storage_key(out)] == 1 and device.in_pool(pool, out) and alone_in_memory(out)
            ]
            known = self._gradients_of[backward] = GraphGradients(alone, list(held.values()))
        return known


class Ticket:
    """One call that graphs serve, from its forward to its backward.

    Args:
        pair: the graphs.
        leaves: the arguments; copies: which of them have to be copied.

    Attributes:
        serial: the number of the forward in its lane.
        done: a backward ran; released: the outputs of which one ran that kept nothing for another.
    """

    __slots__ = ("__weakref__", "_copies", "_keeps", "_lessons", "_versions", "done", "pair", "released", "serial")

    def __init__(self, pair: GraphPair, lessons: Lessons, copies: Copies) -> None:
        self.pair, self._lessons, self._copies = pair, lessons, copies
        self.serial, self.done, self.released = 0, False, frozenset[int]()
        self._keeps = pair.retains

    def forward(self) -> list[Tensor]:
        """Replay the forward; return its outputs, in memory of their own or of the graph.

        Call with the pool's lock held.
        """
        pair = self.pair
        plan, lane = pair.plan, pair.lane
        if plan.debug:
            check_places(plan)
        lane.take(self)
        copies, self._copies = self._copies, NOTHING
        plan.table.replay(plan.graph, 0, None if copies is NOTHING else plan.load, copies)
        self._versions = list(map(_version, pair.read))
        if pair.lent is not None and lane.handing_out.outputs:
            lane.lent = pair.lent
            return [output.detach() for output in plan.program.outputs]
        return [output.clone() for output in plan.program.outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Replay the backward; return the gradients of the leaves, in memory of their own or of the graph.

        Raises:
            ReplayError: what it reads is gone, or it shall be differentiated itself.
        """
        pair = self.pair
        lane, route = pair.lane, pair.route(grads)
        self.check()
        with lane.manager.pool.lock:
            if self.serial != lane.serial:
                raise ReplayError(
                    "a second backward of a forward that ran as a graph, after another forward wrote over what it "
                    "reads. Run both before the next forward, or call that module inside simplegraph.eager()."
                )
            lane.manager.table.replay(route.graph, 0, route.load, grads)
            found: list[Tensor | None] = [None] * len(pair.leaves)
            copied = route.made
            if route.gradients is not None and lane.handing_out.permitted:
                lane.handed, copied = route.gradients, route.copied
                for place, output in route.handed:
                    found[place] = output.detach()
            # The others in new memory, by one call: what the caller keeps, no replay may write to.
            if copied:
                made = torch._foreach_mul([output for _, output in copied], 1)
                for (place, _), grad in zip(copied, made, strict=True):
                    found[place] = grad
        self.finish(route.given)
        return found

    def check(self) -> None:
        """Refuse a backward that eager would refuse, or that no graph can do. Raises ReplayError."""
        if _grad_enabled():
            self._lessons.twice = True
            raise ReplayError(_DOUBLE)
        if self.done and not self._keeps:
            self._lessons.note((), again=True)
            raise ReplayError(
                "a second backward of a forward that ran as a graph, whose first one wrote over what it reads. The "
                "calls after this one keep it: training graphs are captured again for retain_graph=True."
            )
        read, before = self.pair.read, self._versions
        now = list(map(_version, read))
        if now != before:
            changed = next(leaf for leaf, is_, was in zip(read, now, before, strict=True) if is_ != was)
            raise ReplayError(
                f"a weight of shape {tuple(changed.shape)} was changed between a forward and its backward, which reads "
                "it. Run the backward before the optimizer's step, as eager asks for, too."
            )

    def finish(self, given: frozenset[int]) -> None:
        """Note that a backward ran, and of which outputs it was given gradients."""
        self._lessons.note(given, again=self.done)
        self.done = True
        if not keeps_graph():
            self.released |= given
