"""Serves the calls of a module under grad mode: eagerly, as a proof, or by replaying its forward graph."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from simplegraph.base.config import CudaGraphConfig, CudaGraphMode
from simplegraph.base.errors import StaleGraphError
from simplegraph.base.modes import autocast_dtype
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.batch.dispatch import Dispatch
from simplegraph.call.call import Binding, Call, CallLayout, invoke
from simplegraph.call.known import KnownCalls
from simplegraph.call.signature import CallReader, device_of
from simplegraph.guard.guards import any_requires_grad
from simplegraph.guard.torch_state import (
    GLOBAL_BACKWARD_HOOKS,
    GLOBAL_BACKWARD_PRE_HOOKS,
    hindrance,
)
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.serve.replay import MISS, same_around
from simplegraph.training.builder import PairBuilder
from simplegraph.training.handed import HandingOut
from simplegraph.training.leaves import refuse_hooks, requires_grad, saved_tensors_hooks
from simplegraph.training.lessons import Lessons
from simplegraph.training.node import apply
from simplegraph.training.pair import GraphPair, Lane, Ticket
from simplegraph.training.proof import ProvenTicket

logger = logging.getLogger("simplegraph")

_LANES = 2  # forwards that may wait for their backward at once
_STALE_LIMIT = 3  # generations in a row that went stale before serving a replay


@dataclasses.dataclass(eq=False)
class Known:
    """All that is known of the calls of one signature.

    Attributes:
        layout: how they pass their arguments.
        inputs: the numbers of the leaves that are tensors, each with whether it wants gradients.
        flags: the same of the module's tensors.
        caches: autocast keeps casts of weights.
        lessons: what their backwards showed.
        pairs: by lane, and what backwards need.
        refusal: why no graph serves them.
    """

    layout: CallLayout
    inputs: Sequence[tuple[int, bool]]
    flags: list[bool]
    caches: bool
    lessons: Lessons
    pairs: dict[Hashable, GraphPair] = dataclasses.field(default_factory=dict)
    refusal: CannotBind | None = None

    @property
    def key(self) -> Hashable:
        """Identify them among all calls of the module."""
        return self.layout.binding.signature

    def place(self, lane: Lane) -> tuple[int, Hashable]:
        """Identify the pair that serves them in a lane."""
        return lane.number, self.lessons.needs


class Generation:
    """The graphs of a module in one mode, training or not, until what they read is replaced.

    Args:
        builder: builds them.
    """

    def __init__(self, builder: PairBuilder) -> None:
        self.builder = builder
        self.known: dict[Hashable, Known] = {}
        self.last: Known | None = None  # tried first

    @property
    def stale(self) -> bool:
        """True if something that the graphs read was moved or replaced."""
        state = self.builder.state
        return state is not None and state.moved()

    def free_lane(self) -> Lane | None:
        """Find a lane that a forward may take; None if all are in use."""
        for lane in self.builder.lanes:
            if lane.vacate():
                return lane
        return None

    def drop(self) -> None:
        """Drop the graphs, but for those that a backward still needs: these go with it."""
        self.known.clear()
        self.last = None
        self.builder.lanes[:] = [lane.drop() for lane in self.builder.lanes]


class TrainingCalls:
    """Serves one module's calls that build an autograd graph.

    Args:
        config: how arguments are read.
        calls: reads what is around them.
        new_manager: makes a manager on a device, in a pool of its own.
    """

    def __init__(
        self, config: CudaGraphConfig, calls: KnownCalls, new_manager: Callable[[torch.device], CudaGraphManager]
    ) -> None:
        self._config, self._calls, self._new_manager = config, calls, new_manager
        self._reader: CallReader | None = None
        self._generations: dict[bool, Generation] = {}
        self._lock = threading.RLock()
        self._strikes = 0
        self._served_before = 0
        self._disabled: CannotBind | None = None

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call under grad mode; MISS if nothing in it wants gradients.

        Raises:
            CannotBind: it runs eagerly.
        """
        generation = self._generations.get(module.training)
        if generation is not None:
            last = generation.last
            if last is not None:
                result = self._replay(generation, last, module, args, kwargs)
                if result is not MISS:
                    return result
            for known in list(generation.known.values()):
                result = MISS if known is last else self._replay(generation, known, module, args, kwargs)
                if result is not MISS:
                    return result
        with self._lock:
            return self._serve(module, args, kwargs)

    @property
    def manager(self) -> CudaGraphManager | None:
        """A manager of graphs; None before the first call."""
        return next((known.builder.lanes[0].manager for known in self._generations.values()), None)

    def reset(self) -> None:
        """Drop all graphs."""
        with self._lock:
            for generation in self._generations.values():
                generation.drop()
            self._generations.clear()
            self._strikes, self._disabled = 0, None

    # The fast path.

    def _replay(
        self, generation: Generation, known: Known, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Replay if such a call has proven graphs in a free lane; otherwise return MISS, with nothing done."""
        layout, builder, lessons = known.layout, generation.builder, known.lessons
        leaves: Any = args if layout.positional == len(args) and not kwargs else layout.leaves(args, kwargs)
        for lane in builder.lanes:
            serial = lane.serial
            if lane.vacate():
                break
        else:
            return MISS
        pair = known.pairs.get((lane.number, lessons.needs))
        if (
            leaves is None
            or pair is None
            or pair.unproven
            or lessons.twice
            or known.refusal
            or GLOBAL_BACKWARD_HOOKS
            or GLOBAL_BACKWARD_PRE_HOOKS
            or saved_tensors_hooks(False) is not None
            or (layout.autocast and torch.is_autocast_cache_enabled() is not known.caches)
            or (pair.others and list(map(requires_grad, pair.others)) != pair.flags)
        ):
            return MISS
        plan = pair.plan
        copies = plan.bind(leaves)
        if copies is None or any(leaves[index].requires_grad is not wants for index, wants in known.inputs):
            return MISS
        if not same_around(module, layout, self._calls.state_key):
            return MISS
        with plan.pool.lock:
            if plan.state.moved() or lane.serial != serial or not plan.program.live or plan.is_capturing():
                return MISS
            generation.last = known
            outputs = apply(Ticket(pair, lessons, copies), *pair.attached(leaves))
            if outputs[0] is None:
                return MISS
            return outputs[0] if pair.single else pair.returned.nest(outputs, leaves)

    # The slow path.

    def _serve(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._reader is None:
            self._reader = CallReader(module.forward, self._config, exact=True)
        leaves, names, spec = self._reader.leaves(args, kwargs)
        if not any_requires_grad(leaves) and not self._module_wants(module):
            return MISS
        generation = self._generation(module, leaves)
        builder = generation.builder
        builder.lanes[0].handing_out.look()
        refuse_hooks(module)
        device, stats = builder.device, builder.table.stats
        if device.is_capturing():
            raise CannotBind(Reason.CAPTURING_ELSEWHERE, "")
        if (hindered := hindrance()) is not None:
            raise CannotBind(*hindered)
        sized = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()]
        batch = leaves[sized[0]].shape[0] if sized else 1
        if batch == 0:
            raise CannotBind(Reason.EMPTY_BATCH, f"{names[sized[0]]} has shape {tuple(leaves[sized[0]].shape)}")
        known = self._read(generation, module, leaves, names, spec)
        dispatch = Dispatch(CudaGraphMode.FULL, BatchDescriptor(batch), Reason.EXACT, 0)
        call = Call(module, args, kwargs, leaves, names, batch, known.layout, dispatch)
        result = self._replay(generation, known, module, args, kwargs)
        if result is not MISS:
            return result
        binding, table, lessons = known.layout.binding, builder.table, known.lessons
        if known.refusal is not None:
            raise known.refusal.again()
        call.check(pad_random=True)
        builder.seen.check(call)
        if lessons.twice:
            raise CannotBind(Reason.UNTRAINABLE, "its backward is to be differentiated itself (create_graph=True)")
        if binding.warm[call.padded] < max(1, table.config.num_warmups) or table.constants.needs_warmup(known.key):
            stats.ran_eagerly(Reason.WARMUP if binding.called else Reason.FIRST_CALL, size=call.batch)
            return builder.run_as_called(call, known.key, lessons)
        if table.config.capture == "upfront":
            raise CannotBind(Reason.NOT_CAPTURED_UPFRONT, "training graphs are captured by the calls that they serve")
        if lessons.seen is None:
            stats.ran_eagerly(Reason.NO_BACKWARD, size=call.batch)
            result = invoke(module, args, kwargs)
            builder.watch(call, result, lessons)
            return result
        return self._serve_by_graphs(generation, known, call)

    def _serve_by_graphs(self, generation: Generation, known: Known, call: Call) -> Any:
        lane = generation.free_lane()
        if lane is None:
            raise CannotBind(Reason.BACKWARD_PENDING, "")
        builder, lessons, place = generation.builder, known.lessons, known.place(lane)
        excused, lane.handing_out.excuses = lane.handing_out.excuses, False
        if excused and place not in known.pairs and any(each.lends for each in builder.lanes[: lane.number]):
            raise CannotBind(Reason.OUTPUT_KEPT, "")
        with lane.manager.pool.lock:
            if not lane.vacate():  # another thread has just taken it
                raise CannotBind(Reason.BACKWARD_PENDING, "")
            lane.manager.table.order_streams()
            pair = known.pairs.get(place)
            if pair is None:
                try:
                    pair = known.pairs[place] = builder.capture(call, (known.key, *place[1:]), lane, lessons)
                except CannotBind as error:
                    known.refusal = error.again()
                    raise
                # Those of this very call do not pay for the capture.
                self._served_before = lane.manager.stats.replays + 2
            if pair.refused is not None:
                known.refusal = pair.refused
                raise pair.refused.again()
            generation.last = known
            copies = pair.plan.copies(call.leaves)
            proving = pair.unproven
            ticket = ProvenTicket(pair, lessons, builder, call) if proving else Ticket(pair, lessons, copies)
            return pair.returned.nest(apply(ticket, *pair.attached(call.leaves)), call.leaves)

    def _module_wants(self, module: nn.Module) -> bool:
        """True if eager would build an autograd graph for what the module holds."""
        generation = self._generations.get(module.training)
        if generation is None:
            return any_requires_grad(module.parameters())
        builder = generation.builder
        return any(builder.leaves.flags()) or any_requires_grad(builder.seen.read.elsewhere.values())

    def _read(self, generation: Generation, module: Any, leaves: list[Any], names: Sequence[str], spec: Any) -> Known:
        """Find what is known of such calls. Raises CannotBind."""
        builder = generation.builder
        autocast = autocast_dtype(builder.device.torch_device.type)
        around = self._calls.context(module, autocast)
        inputs, flags, caches = _wanting(leaves), builder.leaves.flags(), torch.is_autocast_cache_enabled()
        context = (*around, caches, tuple(inputs), tuple(flags))
        _, args, signature = builder.reader.read(leaves, names, spec, context)
        found = generation.known.get((spec, signature))
        if found is None:
            if len(generation.known) >= builder.table.config.max_signatures:
                if builder.table.config.on_too_many_signatures == "eager":
                    raise CannotBind(Reason.TOO_MANY_SIGNATURES, f"{len(generation.known)} are known")
                builder.table.stats.flushes += 1
                generation.drop()
            layout = CallLayout(spec, args, *around, builder.device.torch_device.type, Binding(signature))
            lessons = Lessons(builder.device.torch_device.type)
            found = generation.known[spec, signature] = Known(layout, inputs, flags, caches, lessons)
        return found

    def _generation(self, module: Any, leaves: Sequence[Any]) -> Generation:
        """Find the graphs for the module's mode; those that went stale are dropped. Raises CannotBind."""
        device = device_of(leaves)
        if device.type not in ("cuda", "cpu"):
            raise CannotBind(Reason.WRONG_DEVICE, f"inputs are on {device}")
        found = self._generations.get(module.training)
        if found is not None and found.builder.device.torch_device != device:
            found.drop()
            found = None
        if found is not None and found.stale:
            self._drop_stale(found)
            del self._generations[module.training]
            found = None
        if self._disabled is not None:
            raise self._disabled.again()
        if found is None:
            make = functools.partial(self._new_manager, device)
            handing_out = HandingOut()
            lanes = [Lane(make, number, handing_out) for number in range(_LANES)]
            builder = PairBuilder(module, cast(CallReader, self._reader), lanes)
            found = self._generations[module.training] = Generation(builder)
            builder.table.stats.name = module._get_name()
        return found

    def _drop_stale(self, found: Generation) -> None:
        state, stats, config = found.builder.state, found.builder.table.stats, found.builder.table.config
        moved = ", ".join(state.what_moved()[:5] if state is not None else ()) or "something captured"
        if config.on_stale == "raise":
            raise StaleGraphError(
                f"moved or replaced since capture: {moved}. A replay would use the old values. "
                "Call reset_graphs() to capture again, or set on_stale='recapture'."
            )
        logger.info("%s: dropping training graphs, since these moved or were replaced: %s", stats.name, moved)
        self._strikes = 0 if stats.replays > self._served_before else self._strikes + 1
        stats.recaptures += 1
        found.drop()
        if self._strikes >= _STALE_LIMIT:
            self._disabled = CannotBind(Reason.STALE_TOO_OFTEN, moved)


def _wanting(leaves: Sequence[Any]) -> list[tuple[int, bool]]:
    """Tell for each leaf that is a tensor if it wants gradients."""
    return [(index, leaf.requires_grad) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
