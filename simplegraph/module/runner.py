"""What happens to one call of a wrapped module: eager, warmup, capture or replay."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from simplegraph.batch.descriptor import Dispatch
from simplegraph.batch.reasons import Reason
from simplegraph.config import CudaGraphConfig, CudaGraphMode
from simplegraph.context import CALLS, CallContext, bypassed
from simplegraph.distributed import RankGroup
from simplegraph.errors import CaptureError, CaptureSizeError, InputError, ReplayError, StaleGraphError
from simplegraph.graph.device import GraphPool
from simplegraph.graph.select import graph_device
from simplegraph.graph.tensors import storage_key
from simplegraph.manager.jobs import CaptureSummary
from simplegraph.manager.manager import CudaGraphManager, profiler_enabled, replay_range
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats
from simplegraph.module.binding import Binding
from simplegraph.module.builder import GraphBuilder, invoke
from simplegraph.module.compare import EagerComparison
from simplegraph.module.plan import NOTHING, Call, CallLayout, Copies, Plan
from simplegraph.module.signature import CallReader, CannotBind
from simplegraph.module.state import CapturedState, Changes, kept_in_graph
from simplegraph.module.switches import known_switches
from simplegraph.nested import flatten

logger = logging.getLogger("simplegraph")

_MISS = object()
# Private to torch; where it is absent, a transformed tensor has no address and fails with torch's own message.
_transform_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)
# Private to torch; where it is absent, every call asks for the device's own state.
_ANY_AUTOCAST: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
# Generations in a row that went stale before serving a single replay; after that, capturing is a waste.
_STALE_LIMIT = 3
_UNDESCRIBED = (None, None, 0)


class GraphRunner:
    """The graphs of one wrapped module. Copies and pickles carry the settings, not the graphs.

    Args:
        config: settings; ``SIMPLEGRAPH_*`` environment variables win over them.
        pool: memory to share with other wrappers; None for a pool of its own.
        ranks: those that capture together with this one.
    """

    def __init__(self, config: CudaGraphConfig, pool: GraphPool | None = None, ranks: RankGroup | None = None) -> None:
        self.settings = config
        self.config = config.from_env()
        self.stats = GraphStats()
        self.builder: GraphBuilder | None = None
        self._pool = pool
        self._ranks = ranks
        self._lock = threading.RLock()
        self._reader: CallReader | None = None
        self._layouts: dict[Hashable, CallLayout] = {}
        self._bindings: dict[Hashable, Binding] = {}
        self._last: CallLayout | None = None
        self._state_key = self.config.state_key
        self._looked_at = -1  # the count of changes at which switches were looked for
        self._strikes = 0
        self._served_before = 0
        self._disabled = _switched_off(self.config)

    def __reduce__(self) -> tuple[type, tuple[CudaGraphConfig]]:
        return GraphRunner, (self.settings,)

    @property
    def manager(self) -> CudaGraphManager | None:
        """The manager that keeps the programs; None until a call told the device."""
        return self.builder.manager if self.builder is not None else None

    def configure(
        self, settings: CudaGraphConfig, pool: GraphPool | None = None, ranks: RankGroup | None = None
    ) -> None:
        """Drop the graphs and start over with other settings, in another pool, or with other ranks."""
        config = settings.from_env()  # refuses before anything is dropped
        with self._lock:
            self.reset("configuring graphs")
            self.settings, self.config = settings, config
            self._pool, self._ranks = pool or self._pool, ranks or self._ranks
            self.builder = self._reader = None
            self.stats.failures.clear()
            self._state_key, self._looked_at = config.state_key, -1
            self._disabled = _switched_off(config)

    # The replay path.

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call."""
        context = CALLS.context
        if context is not None and context.bypass is not None:
            return self._eager(module, args, kwargs, context.bypass)
        layout = self._last
        if layout is not None:
            result = self._try_replay(module, layout, args, kwargs, context)
            if result is not _MISS:
                return result
        return self._call_slowly(module, args, kwargs, context)

    def _try_replay(
        self,
        module: Any,
        layout: CallLayout,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: CallContext | None,
    ) -> Any:
        """Replay if this call is one that a plan exists for; otherwise _MISS, with nothing done."""
        leaves: Any = args if layout.positional == len(args) and not kwargs else layout.leaves(args, kwargs)
        try:
            size = leaves[layout.anchor].shape[layout.anchor_dim]
        except (TypeError, AttributeError, IndexError):
            return _MISS
        plan = layout.plans.get(size if context is None else (size, context.batch))
        if plan is None or module.training or forward_ad._current_level >= 0:
            return _MISS
        try:
            copies = plan.bind(leaves)
        except RuntimeError:  # a layout without an address, such as sparse
            return _MISS
        if copies is None or (plan.written_back and plan.aliased(leaves)):
            return _MISS
        autocast = _autocast(plan.device.torch_device.type) if _ANY_AUTOCAST() else None
        if autocast is not layout.autocast:
            return _MISS
        if torch.is_grad_enabled() and _wants_grad(leaves, plan.state):
            return _MISS
        if self._state_key is not None and self._state_key(module) != layout.state:
            return _MISS
        pool = plan.pool
        with pool.lock:
            if plan.state.moved() or not plan.program.live or plan.device.is_capturing():
                return _MISS
            stream = plan.device.current_stream()
            if stream != pool.stream:
                plan.device.wait_for(pool.stream)
                pool.stream = stream
            if plan.checked:
                return self._replay_checked(module, plan, leaves, args, kwargs, copies)
            return self._replay(plan, leaves, copies)

    def _replay(self, plan: Plan, leaves: Sequence[Any], copies: Copies) -> Any:
        if copies is not NOTHING or plan.padding:
            plan.load(copies)
        for hooks in plan.hooks:
            hooks.before_replay(*plan.key[1:])
        if profiler_enabled():
            with replay_range(plan.counters.label):
                plan.replay()
        else:
            plan.replay()
        counters = plan.counters
        counters.replays += 1
        if plan.padding:
            counters.padded_tokens += plan.padding
        if plan.written_back:
            plan.write_back(leaves)
        return plan.result()

    def _replay_checked(
        self,
        module: Any,
        plan: Plan,
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        copies: Copies,
    ) -> Any:
        """A replay with `debug` or `verify`: addresses checked before, the result compared with eager after."""
        moved = plan.moved_inputs() + plan.state.what_moved()
        if moved:
            raise StaleGraphError(
                f"no longer where the graph of {plan.counters.label} reads it: {', '.join(moved)}. "
                "Something resized or replaced it; call reset_graphs() to capture anew."
            )
        if not plan.checks:
            result = self._replay(plan, leaves, copies)
            _refuse_kept(module, plan)
            return result
        plan.checks -= 1
        plan.checked = plan.debug or plan.checks > 0
        check = EagerComparison(plan.counters.label, plan.device.torch_device)
        with bypassed(Reason.NESTED), torch.no_grad():
            check.expect(flatten(invoke(module, *_cloned(args, kwargs)))[0])
        result = self._replay(plan, leaves, copies)
        check.compare(flatten(result)[0])
        _refuse_kept(module, plan)
        return result

    # Every other call.

    def _eager(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: Reason, detail: str = ""
    ) -> Any:
        self.stats.name = type(module).__name__
        self.stats.ran_eagerly(reason, detail)
        return invoke(module, args, kwargs)

    def _call_slowly(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: CallContext | None
    ) -> Any:
        for layout in list(self._layouts.values()):
            if layout is not self._last:
                result = self._try_replay(module, layout, args, kwargs, context)
                if result is not _MISS:
                    self._last = layout
                    return result
        try:
            self._refuse(module)
            with self._lock:
                builder, call = self._read(module, args, kwargs, context)
                with builder.manager.pool.lock:
                    return self._serve(builder, call)
        except CannotBind as error:
            reason, detail = error.reason, error.detail
        return self._eager(module, args, kwargs, reason, detail)

    def _refuse(self, module: Any) -> None:
        if self._disabled is not None:
            raise CannotBind(self._disabled, "")
        if module.training:
            raise CannotBind(Reason.TRAINING, "")

    def _read(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: CallContext | None,
        *,
        largest: bool = False,
    ) -> tuple[GraphBuilder, Call]:
        """Everything about a call; `largest` takes it as an example of the largest size. Raises CannotBind."""
        reader = self._reader = self._reader or CallReader(module.forward, self.config)
        leaves, names, spec = reader.leaves(args, kwargs)
        builder = self._builder_for(module, leaves, reader)
        device, dispatcher = builder.manager.device, builder.manager.dispatcher
        if device.is_capturing():
            raise CannotBind(Reason.CAPTURING_ELSEWHERE, "")
        if _transforming():
            raise CannotBind(Reason.TRANSFORMED, "")
        autocast, state = _autocast(device.torch_device.type), self._state_of(module)
        size, read_args, signature = reader.read(leaves, names, spec, (autocast, state))
        if torch.is_grad_enabled() and _wants_grad(leaves, module):
            raise CannotBind(Reason.GRAD, "")
        if largest:
            dispatch = Dispatch(*builder.descriptors()[0], Reason.EXACT, 0)
        else:
            dispatch = dispatcher.dispatch(size, *(context.batch if context is not None else _UNDESCRIBED))
        if dispatch.mode is CudaGraphMode.NONE:
            raise CannotBind(dispatch.reason, f"batch size {size}")
        if signature not in self._bindings and len(self._bindings) >= self.config.max_signatures:
            self._make_room(builder)
        binding = self._bindings.setdefault(signature, Binding(signature))
        layout = self._layouts.setdefault((spec, signature), CallLayout(spec, read_args, autocast, state, binding))
        self._last = layout
        return builder, Call(module, args, kwargs, leaves, names, spec, size, layout, binding, dispatch)

    def _state_of(self, module: Any) -> Hashable:
        """The Python state that is part of the key: of known switches, unless `state_key` says which.

        Raises:
            InputError: what `state_key` returned cannot be a key.
        """
        if self.config.state_key is None and self._looked_at != Changes.count:
            self._state_key, self._looked_at = known_switches(module), Changes.count
        state = None if self._state_key is None else self._state_key(module)
        try:
            hash(state)
        except TypeError:
            raise InputError(
                f"state_key returned {state!r}, which cannot be hashed, so states could not be told apart. "
                "Return numbers, strings, or tuples of them."
            ) from None
        return state

    def _make_room(self, builder: GraphBuilder) -> None:
        """A further signature than `max_signatures`: refused, or all others are dropped for it."""
        if self.config.on_too_many_signatures == "eager":
            raise CannotBind(Reason.TOO_MANY_SIGNATURES, f"{len(self._bindings)} are known")
        builder.manager.ranks.any("dropping graphs, since there are more signatures than max_signatures", True)
        logger.info("%s: dropping all graphs, since %d signatures are known", self.stats.name, len(self._bindings))
        self.stats.flushes += 1
        self._forget()

    def _builder_for(self, module: Any, leaves: Sequence[Any], reader: CallReader) -> GraphBuilder:
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
        if device is None:
            raise CannotBind(Reason.AMBIGUOUS_BATCH_DIM, "no argument is a tensor")
        if device.type not in ("cuda", "cpu"):
            raise CannotBind(Reason.WRONG_DEVICE, f"inputs are on {device}")
        known = self.builder
        if known is not None and known.manager.device.torch_device != device:
            if known.state is not None and not known.state.moved():
                graphs = known.manager.device.torch_device
                raise CannotBind(Reason.WRONG_DEVICE, f"inputs are on {device}, graphs on {graphs}")
            self.reset()  # the module itself was moved
            known = self.builder = None
        if known is None:
            if graph_device(device).is_capturing():  # a manager begins with a capture of its own
                raise CannotBind(Reason.CAPTURING_ELSEWHERE, "")
            known = self.builder = GraphBuilder(self._new_manager(module, device), reader)
        return known

    def _new_manager(self, module: Any, device: torch.device) -> CudaGraphManager:
        name = type(module).__name__
        manager = CudaGraphManager(
            self.config, device=device, name=name, pool=self._pool, requests=False, ranks=self._ranks
        )
        manager.stats = self.stats
        self.stats.name = name
        if manager.device.emulated:
            logger.warning(
                "%s is on the CPU: its graphs are emulated, which checks CUDA's rules and gives no speed.", name
            )
        return manager

    def _serve(self, builder: GraphBuilder, call: Call) -> Any:
        """Run a call that a graph could serve, taking the next step towards that graph where there is none."""
        self._drop_if_stale(builder)
        manager, binding = builder.manager, call.binding
        manager.order_streams()
        if binding.unsupported is not None:
            raise binding.unsupported
        if call.padding and binding.unsliceable is not None:
            raise binding.unsliceable
        if binding.writes and call.aliased:
            raise CannotBind(Reason.ALIASED_INPUTS, ", ".join(name for _, name in call.tensors))
        if call.key not in manager.programs:
            if call.key in manager.failures:
                raise CannotBind(Reason.CAPTURE_FAILED, manager.failures[call.key].args[0].splitlines()[0])
            if self.config.capture == "upfront":
                raise CannotBind(Reason.NOT_CAPTURED_UPFRONT, f"batch size {call.batch}")
            if not binding.called:
                return builder.run_as_called(call, Reason.FIRST_CALL)
            if call.padding and not binding.outputs.can_cut(call.padded):
                return builder.run_as_called(call, Reason.OUTPUT_SHAPE_UNKNOWN)
            if builder.needs_warmup(call):
                return builder.run_padded(call)
            builder.capture(call)
            self._served_before = self.stats.replays + 1  # the replay of this very call does not pay for the capture
        if call.padding and not binding.outputs.known:
            return builder.run_as_called(call, Reason.OUTPUT_SHAPE_UNKNOWN)
        return self._replay_planned(builder, call)

    def _drop_if_stale(self, builder: GraphBuilder) -> None:
        if builder.state is None or not builder.state.moved():
            return
        moved = ", ".join(builder.state.what_moved()[:5]) or "something captured"
        if self.config.on_stale == "raise":
            raise StaleGraphError(
                f"moved or replaced since capture: {moved}. A replay would use the old values. "
                "Call reset_graphs() to capture anew, or set on_stale='recapture'."
            )
        # Where it moved on this rank alone, the others replay on: then this waits in vain, and says so.
        builder.manager.ranks.any("dropping graphs, since what they read was moved or replaced", True)
        logger.info("%s: dropping all graphs, since these moved or were replaced: %s", self.stats.name, moved)
        self._strikes = 0 if self.stats.replays > self._served_before else self._strikes + 1
        self.stats.recaptures += 1
        self._drop_graphs()
        if self._strikes >= _STALE_LIMIT:
            self._disabled = Reason.STALE_TOO_OFTEN
            raise CannotBind(Reason.STALE_TOO_OFTEN, moved)

    def _replay_planned(self, builder: GraphBuilder, call: Call) -> Any:
        plan = self._plan(builder, call)
        context = CALLS.context
        call.layout.plans[call.batch if context is None else (call.batch, context.batch)] = plan
        copies = plan.bind(call.leaves)
        if copies is None:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, "an argument does not equal itself")
        builder.manager.order_streams()
        if plan.checked:
            return self._replay_checked(call.module, plan, call.leaves, call.args, call.kwargs, copies)
        return self._replay(plan, call.leaves, copies)

    def _plan(self, builder: GraphBuilder, call: Call) -> Plan:
        manager = builder.manager
        program = manager.programs[call.key]
        inputs = builder.inputs_of[call.key]
        if builder.state is None:
            raise ReplayError("a program exists without the state it reads; call reset_graphs().")
        tensors = {index: leaf for index, leaf in enumerate(program.outputs) if isinstance(leaf, Tensor)}
        inputs_of_outputs = {index for index, leaf in tensors.items() if storage_key(leaf) in inputs.storages}
        graph_memory = inputs_of_outputs | {
            i for i, leaf in tensors.items() if manager.device.in_pool(manager.pool, leaf)
        }
        if self.config.outputs == "static" and inputs_of_outputs:
            inputs.handed_out = True
        return Plan(
            call.layout,
            inputs,
            program,
            self.stats.graphs[call.key],
            rows=call.batch,
            padded=call.padded,
            outputs=call.binding.outputs.cut(program.outputs, call.batch, call.padded),
            clone=frozenset() if self.config.outputs == "static" else frozenset(graph_memory),
            written_back=frozenset(call.binding.written),
            key=call.key,
            manager=manager,
            state=builder.state,
        )

    # For the wrapper's other methods.

    def capture_all(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureSummary:
        """Capture every size; see `CudaGraphWrapper.capture_graphs`."""
        _refuse_inside_forward("capture_graphs")
        if self._disabled is Reason.MODE_NONE:
            return CaptureSummary(0, {}, 0.0, 0)  # a program switched off from the environment goes on
        with self._lock, torch.no_grad():
            try:
                self._refuse(module)
                builder, call = self._read(module, args, kwargs, None, largest=True)
                self._drop_if_stale(builder)
            except CannotBind as error:
                detail = f" ({error.detail})" if error.detail else ""
                raise InputError(f"capture_graphs cannot use this call: {error.reason.text}{detail}.") from None
            with builder.manager.pool.lock:
                summary = builder.capture_sizes(call)
            self._served_before = self.stats.replays
            return summary

    def static_inputs(self, size: int | None) -> dict[str, Tensor]:
        """Views of the static inputs of the last signature used; see `CudaGraphWrapper.static_inputs`."""
        layout, builder = self._last, self.builder
        if layout is None or builder is None or not builder.inputs_of:
            raise ReplayError("no graph was captured yet, so there are no static inputs; call capture_graphs first.")
        if size is None:
            size = builder.descriptors()[0][1].num_tokens
        context = CALLS.context
        found = builder.manager.dispatch(size, *(context.batch if context is not None else _UNDESCRIBED))
        inputs = builder.inputs_of.get((layout.binding.signature, found.mode, found.descriptor))
        if inputs is None:
            raise CaptureSizeError(f"no graph was captured that holds batch size {size}: {found.reason.text}.")
        inputs.handed_out = True
        return {name: static.part(found.descriptor.num_tokens, 0, size) for name, static in inputs.inputs.items()}

    def report(self) -> GraphReport:
        """See `CudaGraphWrapper.graph_report`."""
        return GraphReport(self.stats, "no device yet") if self.manager is None else self.manager.report()

    def reset(self, what: str = "reset_graphs") -> None:
        """Drop all graphs, static inputs and what was learnt; `what` asks for it, in messages."""
        _refuse_inside_forward(what)
        with self._lock:
            self._forget()
            self._strikes = 0
            if self._disabled is Reason.STALE_TOO_OFTEN:
                self._disabled = None

    def _forget(self) -> None:
        """Drop the programs, static inputs and what calls look like."""
        self._drop_graphs()
        self._bindings.clear()
        self._layouts.clear()
        self._last = None

    def _drop_graphs(self) -> None:
        """Drop the programs; static inputs and what calls look like are kept."""
        for layout in self._layouts.values():
            layout.plans.clear()
        for binding in self._bindings.values():
            binding.warm.clear()
        if self.builder is not None:
            self.builder.drop()


def _refuse_kept(module: Any, plan: Plan) -> None:
    """A break that keeps a tensor it was passed has graph memory, which the next replay overwrites (debug)."""
    if not plan.program.breaks:
        return
    kept = [entry.name for entry in kept_in_graph(module, plan.device, plan.pool)]
    if kept:
        raise StaleGraphError(
            f"after a replay of {plan.counters.label}, {', '.join(kept)} holds memory of the graph, which the next "
            "replay overwrites: an eager break stored a tensor it was passed. Store a clone."
        )


def _refuse_inside_forward(what: str) -> None:
    """A forward that replaces the graphs it is running in would pull the ground from under itself."""
    if CALLS.context is not None and CALLS.context.bypass is Reason.NESTED:
        raise CaptureError(f"{what} was called inside the forward of a wrapped module; call it before or after.")


def _switched_off(config: CudaGraphConfig) -> Reason | None:
    return Reason.MODE_NONE if config.mode is CudaGraphMode.NONE else None


def _cloned(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves, spec = flatten((args, dict(kwargs)))
    args, kwargs = spec.unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return args, dict(kwargs)


def _transforming() -> bool:
    """Whether the call is traced, or under a transform of torch.func, or a mode that looks at every operator."""
    traced = torch.jit.is_tracing() or forward_ad._current_level >= 0  # type: ignore[attr-defined,no-untyped-call]
    return traced or _transform_level() is not None or torch._C._len_torch_dispatch_stack() > 0


def _autocast(device_type: str) -> torch.dtype | None:
    """The autocast dtype in force, or None."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _wants_grad(leaves: Sequence[Any], state: CapturedState | nn.Module) -> bool:
    """Whether eager would build an autograd graph for this call."""
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return True
    return any(parameter.requires_grad for parameter in state.parameters())
