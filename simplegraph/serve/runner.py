"""Serves one call of a wrapped module: replays it, or takes the next step of its lifecycle."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize

from simplegraph.base import extras
from simplegraph.base.config import CudaGraphConfig, CudaGraphMode, check_settings
from simplegraph.base.context import CALLS, CallContext, bypassed, described_batch
from simplegraph.base.errors import CaptureError, CaptureSizeError, ConfigError, InputError, ReplayError
from simplegraph.base.extras import Sleeps
from simplegraph.base.modes import ANY_AUTOCAST, autocast_dtype
from simplegraph.base.nested import map_leaves
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.dispatch import Dispatch
from simplegraph.call.call import Call, Graphed, invoke
from simplegraph.call.entries import WithEntries, put_entries, written_mappings
from simplegraph.call.layouts import CallTable
from simplegraph.call.plan import CHECK_FIRST
from simplegraph.call.remembered_refusals import Refusal
from simplegraph.call.signature import Signature, device_of, differences
from simplegraph.device.protocol import GraphPool
from simplegraph.device.select import graph_device
from simplegraph.distributed.ranks import SingleRank
from simplegraph.guard.carried import CarriedTensors
from simplegraph.guard.functions import FunctionModule, computes_gradients, decorated_mode
from simplegraph.guard.guards import any_requires_grad
from simplegraph.guard.survey import device_of_state, dtype_of_products
from simplegraph.guard.torch_state import (
    GLOBAL_HOOKS,
    GLOBAL_PRE_HOOKS,
    anomaly_enabled,
    function_modes,
    hindrance,
    num_function_modes,
    num_operator_modes,
    saved_hooks,
    saved_hooks_allowed,
)
from simplegraph.manager.lifecycle import LASTING, ModuleRecord, Stage
from simplegraph.manager.manager import CudaGraphManager, CudaGraphSettings, Unpack
from simplegraph.manager.stats import CaptureSummary, GraphReport, GraphStats, register
from simplegraph.program.breaks.break_calls import ReplayStopped, StateChanged
from simplegraph.program.breaks.marks import recording_breaks
from simplegraph.serve.builder import GraphBuilder
from simplegraph.serve.call_proof import prove

if TYPE_CHECKING:
    from simplegraph.distributed.group import RankGroup

logger = logging.getLogger("simplegraph")
# The attribute in which `optimize` keeps its changes of a module; their `lines` list them.
OPTIMIZED = "_simplegraph_optimized"
_grad_enabled = torch.is_grad_enabled  # looked up once

_COMPILED = (
    "torch.compile traces this forward, and compiled code runs without graphs. Compile first, then wrap: "
    "simplegraph.wrap(torch.compile(module))"
)
# Runs that `capture_all` may need: earlier ones can change torch's settings, and reveal the device and the CPU tensors
# that move to it.
_RUNS_TO_SETTLE = 4
_TRANSIENT = frozenset({Reason.PYTHON_STATE, Reason.WARMUP, Reason.WRONG_DEVICE})  # reasons that a further run may end
_BY_SIZE = frozenset({Reason.BATCH_TOO_LARGE, Reason.SIZE_NOT_CAPTURED})


def _flat_batch(leaves: Sequence[Any], names: Sequence[str]) -> str:
    """Say what the batch is if all tensors of a call have one dimension: a caller may have passed one row."""
    tensors = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if issubclass(type(leaf), Tensor)]
    if not tensors or any(leaf.dim() != 1 for _, leaf in tensors):
        return ""
    name, leaf = tensors[0]
    return f"{name} has 1 dimension, which is taken as the batch; pass one row with shape (1, {len(leaf)})"


class CudaGraphWrapper(Sleeps, Graphed):
    """Mixin that gives an `nn.Module` CUDA graphs: ``class M(CudaGraphWrapper, nn.Module)``.

    A call runs eagerly, is captured, or replays a graph, whichever is right for its batch; the caller
    sees eager's results. Settings come from the class attribute `cuda_graph_config`, from
    ``class M(CudaGraphWrapper, nn.Module, capture_sizes=[1, 2, 4])``, or from `configure_graphs`.
    """

    cuda_graph_config: ClassVar[CudaGraphConfig] = CudaGraphConfig()
    # torch.jit.script compiles all properties of a class except these.
    __jit_unused_properties__: ClassVar[list[str]] = ["_graph_runner", "graph_manager", "graph_stats"]

    def __init_subclass__(cls, **settings: Unpack[CudaGraphSettings]) -> None:
        others: dict[str, Any] = {**settings}  # for another base class
        graph_settings = {name: others.pop(name) for name in settings if name in _SETTINGS}
        try:
            super().__init_subclass__(**others)
        except TypeError:
            check_settings(others, f"class {cls.__name__}: ")
            raise
        if nn.Module in cls.__mro__ and cls.__mro__.index(nn.Module) < cls.__mro__.index(CudaGraphWrapper):
            raise ConfigError(
                f"class {cls.__name__} lists CudaGraphWrapper after nn.Module, whose call would win and never use a "
                f"graph. Put it before: class {cls.__name__}(CudaGraphWrapper, ...)."
            )
        if graph_settings:
            cls.cuda_graph_config = cls.cuda_graph_config.replace(**graph_settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            self._count_compiled()
            return invoke(self, args, kwargs)  # let the compiler trace the module itself
        module: Any = self
        if _grad_enabled() and (grad_mode := decorated_mode(module.forward)) is not None:
            with grad_mode():  # before anything looks: the forward enters it only once it runs
                return module.__call__(*args, **kwargs)
        runner = self._graph_runner
        if runner.front is not None:
            return runner.front.call(runner, self, args, kwargs)
        return runner.call(self, args, kwargs)

    def _count_compiled(self) -> bool:
        """Count a call that a compiler traces, and warn; called during the trace, once for each."""
        module: Any = self
        self.graph_stats.name = module._get_name()
        self.graph_stats.ran_eagerly(Reason.TRANSFORMED, _COMPILED)
        return True

    # Set what `torch.compiler.assume_constant_result` sets, without importing the compiler.
    _count_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def _graph_runner(self) -> GraphRunner:
        runner: GraphRunner | None = self.__dict__.get("_simplegraph")
        if runner is None:
            runner = self.__dict__["_simplegraph"] = new_runner(type(self).cuda_graph_config, self)
        return runner

    def configure_graphs(self, **settings: Unpack[CudaGraphSettings]) -> None:
        """Change settings of this instance; its graphs are dropped, and calls capture them again.

        Raises:
            ConfigError: a setting is unknown or invalid; nothing is changed.
        """
        config = self._graph_runner.settings.replace(**settings)
        if config.training is not self._graph_runner.settings.training:
            raise ConfigError("training cannot be changed later; wrap the module with training=True.")
        self._graph_runner.configure(config)

    def use_graph_pool(self, pool: GraphPool) -> None:
        """Share graph memory with other wrappers; this one's graphs are dropped and captured again.

        Graphs that share a pool never run at the same time, and a replay of any overwrites static outputs of all.
        """
        self._graph_runner.configure(self._graph_runner.settings, pool)

    def use_ranks(self, ranks: RankGroup) -> None:
        """Capture together with other ranks from now on; this one's graphs are dropped and captured again."""
        self._graph_runner.configure(self._graph_runner.settings, ranks=ranks)

    def capture_graphs(self, *args: Any, **kwargs: Any) -> CaptureSummary:
        """Capture all sizes now, largest first, from example inputs of any batch size.

        The forward runs once for real on the largest size, filled by repeating the examples' rows; a module that keeps
        state sees this run. Other runs have no effect: one on half as many rows to confirm batch dimensions, one of
        each size that failed, and of each size if `num_warmups` is above 1. They restore memory up to 1 GiB, Python
        state and random numbers.

        Returns:
            The number of captured graphs, the time taken, and the failures.

        Raises:
            InputError: these inputs cannot be bound to a graph; the message says which, and why.
            CaptureError: a size failed and ``on_capture_failure`` is "raise".
            Exception: raised by the module itself, if it cannot run such inputs at any size.
        """
        return self._capture(args, kwargs)

    def capture_next(self, *args: Any, **kwargs: Any) -> CaptureSummary:
        """Capture the largest size that has no graph yet; call it in gaps between requests.

        With ``capture="upfront"`` a service answers from its first request on, eagerly if there is no graph, and no
        request waits for more than one capture. Once every size was tried, calls do nothing. The first call, and the
        first after graphs were dropped, runs the forward once for real, as `capture_graphs` does; the runs of others
        have no effect. With `length_dims` one size is captured at each length.

        Returns:
            The number of captured graphs, the time taken, and the failures.

        Raises:
            InputError: as `capture_graphs`.
            CaptureError: as `capture_graphs`.
        """
        return self._capture(args, kwargs, following=True)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], **how: bool) -> CaptureSummary:
        runner = self._graph_runner
        capture = functools.partial(runner.lengths.capture_all, runner) if runner.lengths else runner.capture_all
        summary: CaptureSummary = capture(self, args, kwargs, **how)
        return summary

    def static_inputs(self, batch_size: int | None = None) -> dict[str, Tensor]:
        """Return the static input buffers by argument name; inputs that are written there and passed are not copied.

        Args:
            batch_size: rows of the views; the largest size if None.

        Raises:
            ReplayError: nothing was captured yet, so there are no buffers.
            CaptureSizeError: no captured size holds so many rows.
        """
        return self._graph_runner.static_inputs(batch_size)

    def reset_graphs(self) -> None:
        """Drop all graphs and their memory; later calls capture again."""
        self._graph_runner.reset()

    def graph_report(self, *, pointers: bool = False) -> GraphReport:
        """Report captures, replays and eager calls with their reasons; print it, or ask it for ``to_json()``.

        Args:
            pointers: ask the CUDA driver now what the kernels of graphs touch, and show it by module: for the largest
                and the smallest graph of each capture, and for others that were replayed.
        """
        modules: Any = self
        optimized = [vars(module).get(OPTIMIZED) for module in modules.modules()]
        lines = tuple(line for optimization in optimized if optimization is not None for line in optimization.lines())
        touched = extras.installed.touched_lines(modules, self.graph_manager) if pointers else ()
        return dataclasses.replace(self._graph_runner.report(), optimizations=lines, touched=touched)

    @property
    def graph_stats(self) -> GraphStats:
        """The counters behind `graph_report`."""
        return self._graph_runner.stats

    @property
    def graph_manager(self) -> CudaGraphManager | None:
        """The manager that holds the graphs; None before the first call, which determines the device."""
        return self._graph_runner.manager


_SETTINGS = frozenset(CudaGraphConfig.__dataclass_fields__)


class GraphRunner:
    """The graphs of one wrapped module. Copies and pickles carry the settings, not the graphs.

    Args:
        config: settings; ``SIMPLEGRAPH_*`` environment variables win over them.
        pool: memory to share with other wrappers; None for a pool of its own.
        ranks: the ranks that capture together with this one.
        stats: counters to continue; None for new ones.

    Attributes:
        trains: True if it serves calls in training mode, too; builder_kind: the class that builds its graphs.
        carries: True if its graphs may carry over the tensors that runs leave in attributes of modules.
        replays_per_call: graphs that a call replays, one after the other.
        prove: serves a call eagerly, and compares replays with it.
        lengths: pads the lengths of calls; None if none is padded.
        front: passes other arguments to the runner's `call`: `lengths`, or the tensors that runs carry over; None if
            calls are passed on as they are.
    """

    trains = False
    builder_kind = GraphBuilder
    carries = True
    replays_per_call = 1
    prove: Callable[[Any, Call, Any], Any] = staticmethod(prove)  # called with the builder, the call and its plan

    def __init__(
        self,
        config: CudaGraphConfig,
        pool: GraphPool | None = None,
        ranks: SingleRank | None = None,
        stats: GraphStats | None = None,
    ) -> None:
        unit = "calls" if config.exact_shapes else "rows"
        self.stats = stats or GraphStats(unit=unit, reset_method="reset_graphs")
        self._lock = threading.RLock()
        self._use(config, _settings_of_wrapper(config), pool, ranks)
        if stats is None:
            register(self)

    def _use(
        self, settings: CudaGraphConfig, config: CudaGraphConfig, pool: GraphPool | None, ranks: SingleRank | None
    ) -> None:
        self.settings, self.config, self._pool, self._ranks = settings, config, pool, ranks
        self.builder: GraphBuilder | None = None
        self.lengths: Any = extras.installed.lengths(config)
        self.front: Any = self.lengths
        self.carried = CarriedTensors(enabled=self.front is None and self.carries)
        self._calls = CallTable(config)
        self._record = ModuleRecord(Reason.SWITCHED_OFF if config.mode is CudaGraphMode.NONE else None)

    def __reduce__(self) -> tuple[type[GraphRunner], tuple[CudaGraphConfig]]:
        return type(self), (self.settings,)

    def __repr__(self) -> str:
        """Name the module and sum up its calls, as `wrappers` shows it."""
        return f"<{type(self).__name__} of {self.stats.name}: {self.stats.summary}>"

    @property
    def manager(self) -> CudaGraphManager | None:
        """The manager that keeps the programs; None until a call determines the device."""
        return self.builder.manager if self.builder is not None else None

    @property
    def builders(self) -> list[GraphBuilder]:
        """All builders of the module's graphs."""
        return [self.builder] if self.builder is not None else []

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call: replay it if a plan's guards hold; else take its next step to a graph, or run eagerly."""
        context = CALLS.context
        if context is not None and context.bypass is not None:
            return self.run_eagerly(module, args, kwargs, context.bypass)
        calls, layouts = self._calls, self._calls.layouts
        check = values = plan = layout = None
        late: Any = None  # a check that is made only after an early launch
        if calls.refusals.unchecked is not None and not self.carried.places:
            refused = calls.refusals.refuse_unchecked(module, args, kwargs, context)
            if refused is not None:
                return self._run_unread(module, args, kwargs, refused)
        try:
            if layouts:
                plain = calls.plain
                plain.calls += 1
                check = None if plain.must_read else plain.present.check
                late = check if layouts[0].launches_early else None
                if check is not None and check.key is not None and (late is not None or check.holds(vars(module))):
                    values = check.key
                else:
                    values, check, late = plain(module), None, None
            # "continue": this layout cannot serve the call. After the last one, the call goes the slow way.
            # "break": the call is checked before the launch after all.
            for layout in layouts:
                # 1. The signature: nesting and batch size find the plan, which compares the rest as it binds.
                leaves: Any = args if layout.positional == len(args) and not kwargs else layout.leaves(args, kwargs)
                try:
                    anchor = layout.anchor
                    size = leaves[anchor].shape[layout.anchor_dim] if anchor >= 0 else int(leaves is not None)
                except Exception:  # not a tensor any more, or one without a shape, such as a nested tensor
                    continue
                plan = layout.plans.get(size if context is None else (size, context.batch))  # `plan_key`, inlined
                # 2. What is around the call: autocast, settings, modes, hooks on all modules and Python state.
                if plan is None or module.training is not layout.training:
                    continue
                if late is not None and plan.calls_to_check_first:
                    if not late.holds(vars(module)):
                        values, check = plain(module), None
                    late = None
                autocast = autocast_dtype(layout.device_type) if ANY_AUTOCAST() else None
                if autocast is not layout.autocast:
                    continue
                if forward_ad._current_level >= 0 or num_operator_modes():
                    continue
                if GLOBAL_HOOKS or GLOBAL_PRE_HOOKS or parametrize._cache_enabled:
                    continue
                if layout.binding.differentiates and (
                    anomaly_enabled() or saved_hooks(False) is not None or not saved_hooks_allowed()
                ):
                    continue
                if late is None and not layout.settings.hold():
                    continue
                if (num_function_modes() or layout.modes) and function_modes() != layout.modes:
                    continue
                if layout.values is not values:
                    continue
                if calls.state_key is not None and calls.state_key(module) != layout.state:
                    continue
                copies = plan.bind(leaves)  # a `Refusal` in place of a plan raises its reason: the call runs eagerly
                if copies is None:
                    continue
                # 3. What the graph reads of the module, and if it is proven for this number of rows.
                wants = not plan.differentiable and _grad_enabled()
                if wants and (plan.state.wants_grad() or any_requires_grad(leaves)):
                    continue
                with plan.pool.lock:
                    reading, attributes = plan.state.reading, vars(module)
                    if reading is None or not plan.graph.replays_until_proof or plan.is_capturing():
                        continue
                    if late is not None:
                        result = plan.launch_early(leaves, copies, attributes, reading, late, layout.settings)
                        if result is CHECK_FIRST:
                            break
                    elif not reading.holds(attributes, check):
                        continue  # the slow way finds what changed, and if it counts
                    else:
                        try:
                            result = plan.replay(leaves, copies)
                        except BaseException:
                            if plan.program.breaks:
                                calls.plain.attribute_to_breaks(module, plan.graph.unread_places)
                            raise
                        if plan.calls_to_check_first > 0:
                            plan.note_checked()
                        layout.launches_early = not plan.calls_to_check_first
                    if layout is not layouts[0]:
                        calls.put_first(layout)
                    if type(result) is not WithEntries:
                        return result
                    return put_entries(result, written_mappings(args, kwargs))
            else:  # no layout could serve the call
                values = None if late is not None else values  # what was not checked must be read again
                mappings = written_mappings(args, kwargs)  # list them now: the run may put other mappings into them
                result = self._call_slowly(module, args, kwargs, context)
                return put_entries(result, mappings) if mappings else result
            plain.calls -= 1
            return self.call(module, args, kwargs)
        except CannotBind as error:
            why = error.reason, error.detail, error.size  # the error itself would keep this frame alive
            if layout is not None and type(plan) is Refusal:
                calls.refusals.note(plan, layout)
        except ReplayStopped as error:
            return self._finish(module, args, kwargs, error)
        return self._run_refused(module, args, kwargs, *why, is_read=values is not None)

    def _run_unread(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], refused: CannotBind) -> Any:
        """Run a call that is refused without a look at the module, and count it."""
        self.stats.ran_eagerly(refused.reason, refused.detail, refused.size)
        with self._calls.plain.unread_run():
            return invoke(module, args, kwargs)

    def _run_refused(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: Reason,
        detail: str,
        size: int | None,
        *,
        is_read: bool,
    ) -> Any:
        """Run a refused call eagerly; `is_read` if the plain values that it finds were just read."""
        if reason is Reason.PYTHON_STATE and size is None:  # refused before its batch was read
            size = self._calls.batch_size(args, kwargs)
        if reason is Reason.ALLOCATOR:
            self._record.refuse(reason)
        return self.run_eagerly(module, args, kwargs, reason, detail, size, is_read=is_read)

    def python_state(self, module: Any) -> Hashable:
        """Return what a call finds in Python, which is equal as long as the same graphs may serve it.

        Raises:
            CannotBind: it changes all the time.
        """
        calls, state_key = self._calls, self.config.state_key
        if isinstance(module, FunctionModule):
            module.refresh()
        state = None if state_key is None else state_key(module)
        try:
            values = calls.plain(module)
            if values is None:  # another thread captures
                with self._lock:
                    values = calls.plain(module)
        except CannotBind:
            calls.plain.calls += 1
            raise
        try:
            hash(state)
        except TypeError:  # the call raises an error that names it
            return values
        return state, values

    def running(self, module: Any) -> Any:
        """Surround a run of the module that this runner did not start, and that makes all changes meanwhile.

        Call `python_state` first.
        """
        return self._calls.plain.run(module, is_read=True)

    def relearn(self) -> None:
        """Forget all calls: newly found places in which runs leave tensors are inputs of calls from now on."""
        with self._lock:
            self.carried.stale = False
            self.front = self.carried if self.carried.passed else None
            self._forget()

    def clone_from_pool(self, value: Any) -> Any:
        """Return a tensor or a tuple that a call left, in memory that no replay overwrites."""
        manager = self.manager
        if manager is None or self.config.outputs != "static":
            return value
        device, pool = manager.device, manager.pool
        clone = functools.cache(Tensor.clone)  # a tensor that is there twice stays one
        return map_leaves(value, lambda leaf: issubclass(type(leaf), Tensor) and device.in_pool(pool, leaf), clone)

    def renew(self, versions: Mapping[int, int]) -> None:
        """Accept new versions of dicts by their old ones: their contents count as unchanged."""
        if versions:
            self._calls.plain.renew(versions)
            if self.builder is not None and self.builder.state is not None:
                self.builder.state.renew(versions)

    def run_eagerly(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *why: Any, is_read: bool = False
    ) -> Any:
        """Run eagerly, and count it.

        Args:
            module: the module.
            args: of the call.
            kwargs: of the call.
            why: the arguments of `GraphStats.ran_eagerly`.
            is_read: True if the plain values that the call finds were just read.
        """
        self.stats.name = module._get_name()
        self.stats.ran_eagerly(*why)
        with self._calls.plain.run(module, is_read=is_read):
            if not self.carried.places:
                return invoke(module, args, kwargs)
            return self.carried.run(functools.partial(invoke, module, args), kwargs, is_call=True)

    def _finish(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: ReplayStopped) -> Any:
        """Finish a call eagerly after an eager break stopped its replay.

        Raises:
            BreakError: an eager run would repeat effects of the replay.
        """
        from simplegraph.serve.finish import unfinished  # loaded only if needed

        if not isinstance(error, StateChanged):
            return self._finish_eagerly(module, args, kwargs, error, Reason.CAPTURE_FAILED, error.cause)
        try:
            if error.found.hindrance:
                raise unfinished(error, error.found.hindrance) from None
            why = Reason.PYTHON_STATE, error.found.why
            return self._finish_eagerly(module, args, kwargs, error, *why)
        finally:
            error.found.redo()
            self._calls.plain.suspend(module, error.found)

    def _finish_eagerly(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: ReplayStopped, *why: Any
    ) -> Any:
        """Finish a call by an eager run, in which the breaks that ran in the replay return what they returned there."""
        from simplegraph.serve.finish import breaks_to_finish  # loaded only if needed

        with self._lock:
            try:
                builder, call = self._read(module, args, kwargs)
            except CannotBind:
                raise error from None
            with builder.manager.pool.lock:
                breaks = breaks_to_finish(builder, call, error)
        with bypassed(Reason.NESTED), recording_breaks(breaks):
            result = self.run_eagerly(module, args, kwargs, *why, call.batch)
        breaks.check_done()
        return result

    def _call_slowly(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: CallContext | None
    ) -> Any:
        """Read a call that has no plan, and serve it, eagerly or by a graph. Raises CannotBind."""
        calls = self._calls
        if context is None and calls.refusals.forms:
            calls.refusals.check(module, args, kwargs)
        with self._lock:
            try:
                builder, call = self._read(module, args, kwargs)
            except CannotBind as error:
                if context is None:
                    calls.refusals.remember(module, args, kwargs, error)
                raise
            with builder.manager.pool.lock:
                try:
                    with calls.plain.capture_or_proof(module, breaks=call.breaks):
                        return self._serve(builder, call)
                except CannotBind as error:
                    error.size = call.batch
                    if error.reason in LASTING:
                        call.layout.plans[call.plan_key] = Refusal(call, error, builder.reader)
                    raise
                finally:
                    if self.carried.stale:
                        self.relearn()

    def _read(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, largest: bool = False
    ) -> tuple[GraphBuilder, Call]:
        """Read everything about a call, as an example of the largest size if `largest`. Raises CannotBind."""
        self._record.check()
        if module.training and not self.trains:
            raise CannotBind(Reason.TRAINING, "")
        calls = self._calls
        leaves, names, spec = calls.reader(module).leaves(args, kwargs)
        builder = self._builder_for(module, leaves)
        manager = builder.manager
        if manager.device.is_capturing():
            raise CannotBind(Reason.BUSY, "")
        hindered = hindrance()
        if hindered is not None:
            raise CannotBind(*hindered)
        gradients = self._gradients(builder, module, leaves, names)
        # A batch that is described, or shared with other ranks, has a size of its own.
        adds_sizes = self.config.adds_sizes and not largest and not any(described_batch()) and manager.ranks.size == 1
        size, layout = calls.read(
            module, leaves, names, spec, manager.device.torch_device, gradients, adds_sizes=adds_sizes
        )
        rows, dispatch = self._dispatch(manager, size, leaves, names)
        if largest:
            dispatch = Dispatch(*manager.descriptors()[0], Reason.EXACT, 0)
        if dispatch.mode is CudaGraphMode.NONE:
            detail = manager.dispatcher.advice(dispatch)
            if dispatch.reason in _BY_SIZE and (flat := _flat_batch(leaves, names)):
                detail = f"{detail}; {flat}"
            raise CannotBind(dispatch.reason, detail, size)
        if layout.binding not in calls.bindings.values() and len(calls.bindings) >= self.config.max_signatures:
            self._make_room(builder, module, size, layout.binding.signature)
        calls.use(layout)
        return builder, Call(
            module, args, kwargs, leaves, names, rows, layout, dispatch, size, calls.plain, self.carried
        )

    def _dispatch(
        self, manager: CudaGraphManager, size: int, leaves: Sequence[Any], names: Sequence[str]
    ) -> tuple[int, Dispatch]:
        """Return how many rows a call has, and how to run them; `size` is its batch size. Raises CannotBind."""
        return size, manager.dispatcher.dispatch(size, *described_batch())

    def _gradients(self, builder: GraphBuilder, module: Any, leaves: Sequence[Any], names: Sequence[str]) -> Hashable:
        """Describe the gradients that a call's graphs make: none here. Raises CannotBind if eager would make some."""
        if torch.is_grad_enabled() and builder.seen.read.wants_grad(module, leaves):
            wanting = next((name for leaf, name in zip(leaves, names, strict=True) if any_requires_grad([leaf])), "")
            if wanting and computes_gradients(module):
                wanting += ", which a training step is passed, or reads before it sets it: detach it"
            raise CannotBind(Reason.GRAD, wanting)
        return None

    def _make_room(self, builder: GraphBuilder, module: Any, size: int, signature: Signature) -> None:
        """Drop all graphs if there is one signature more than `max_signatures`, or refuse the signature."""
        count = len(self._calls.bindings)
        if self.config.on_too_many_signatures == "eager" and not self._calls.is_outdated(module):
            unlike = "; ".join(differences(self._calls.layouts[0].binding.signature, signature))
            raise CannotBind(Reason.TOO_MANY_SIGNATURES, f"{count} are known; {unlike}", size)
        builder.manager.ranks.any("dropping graphs, since there are more signatures than max_signatures", True)
        logger.info("%s: dropping all graphs, since %d signatures are known", self.stats.name, count)
        self.stats.flushes += 1
        self._forget()

    def _builder_for(self, module: Any, leaves: Sequence[Any]) -> GraphBuilder:
        device = self.device_for(module, leaves)
        if device.type not in ("cuda", "cpu"):
            raise CannotBind(Reason.WRONG_DEVICE, f"inputs are on {device}")
        builder = self.builder
        ran_on = None if builder is None else builder.ran_on
        if builder is not None and builder.manager.device.torch_device != device:
            if builder.state is not None and not builder.state.moved():
                graphs = builder.manager.device.torch_device
                raise CannotBind(Reason.WRONG_DEVICE, f"inputs are on {device}, graphs on {graphs}")
            self.reset()  # the module itself was moved
            builder = self.builder = None
        if builder is None:
            try:
                capturing = graph_device(device).is_capturing()
            except ConfigError as error:
                raise CannotBind(Reason.ALLOCATOR, str(error)) from None
            if capturing:  # a new manager makes a capture of its own
                raise CannotBind(Reason.BUSY, "")
            self.stats.name = module._get_name()
            manager = CudaGraphManager(
                self.config, device=device, pool=self._pool, requests=False, ranks=self._ranks, stats=self.stats
            )
            manager.device.dtype = autocast_dtype(device.type) or dtype_of_products(module)
            builder = self.builder = self.builder_kind(manager, self._calls.reader(module), module_record=self._record)
            builder.ran_on = ran_on
        return builder

    def device_for(self, module: Any, leaves: Sequence[Any]) -> torch.device:
        """Return the device of a call: its arguments', or, if all are on the CPU, its weights' or its latest kernels'.

        Without weights, it is the device of the graphs, if there are any.

        Raises:
            CannotBind: no argument is a tensor, and batch dimensions count.
        """
        default = (device_of_state(module) or torch.device("cpu")) if self.config.exact_shapes else None
        device = device_of(leaves, default)
        if device.type != "cpu" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return device
        module_device, builder = device_of_state(module), self.builder
        if builder is None or (module_device is not None and module_device.type != "cpu"):
            return module_device or device
        if module_device is None and builder.ran_on is None:
            return builder.manager.device.torch_device
        return builder.ran_on or device

    def _serve(self, builder: GraphBuilder, call: Call) -> Any:
        """Run a call that a graph could serve, and take the next step of its lifecycle."""
        self._drop_if_stale(builder)
        builder.manager.table.order_streams()
        call, record = builder.admit(call)
        if record.stage is Stage.UNSEEN:
            return builder.run_first(call)
        if call.padding and (lacking := builder.lacking(call)) is not None:
            return builder.run_to_learn(call, lacking)
        if record.stage is Stage.LEARNT:
            return builder.warm_up(call)
        if record.stage is Stage.WARM:
            return self._capture_and_serve(builder, call)
        return self._replay_or_prove(builder, call)

    def _capture_and_serve(self, builder: GraphBuilder, call: Call) -> Any:
        """Capture a call's size while the call waits, and serve it."""
        begun = time.perf_counter()
        try:
            builder.capture(call)
            # This call's own replays do not pay for the capture.
            self._record.note_captured(self.stats.replays + self.replays_per_call)
            return self._replay_or_prove(builder, call)
        finally:
            self.stats.longest_stall = max(self.stats.longest_stall, time.perf_counter() - begun)

    def _replay_or_prove(self, builder: GraphBuilder, call: Call) -> Any:
        plan = builder.plan(call)
        copies = plan.copies(call.leaves)
        return self.prove(builder, call, plan) if plan.unproven else plan.replay(call.leaves, copies)

    def _drop_if_stale(self, builder: GraphBuilder) -> None:
        if builder.state is None or not builder.state.moved():
            return
        moved = ", ".join(builder.state.what_moved()[:5]) or "something captured"
        # If it moved on this rank only, the others keep replaying: then this one waits until a timeout, and says so.
        builder.manager.ranks.any("dropping graphs, since what they read was moved or replaced", True)
        logger.info("%s: dropping all graphs, since these moved or were replaced: %s", self.stats.name, moved)
        self._record.note_stale(self.stats.replays)
        self.carried.check()
        self.stats.recaptures += 1
        self._drop_graphs()
        if self._record.disabled is not None:
            raise CannotBind(self._record.disabled, moved)

    # For the wrapper's other methods.

    def configure(
        self, settings: CudaGraphConfig, pool: GraphPool | None = None, ranks: SingleRank | None = None
    ) -> None:
        """Drop the graphs and start over with other settings, in another pool, or with other ranks."""
        config = _settings_of_wrapper(settings)  # refuses before anything is dropped
        with self._lock:
            self.reset("configuring graphs")
            self.stats.failures.clear()
            self._use(settings, config, pool or self._pool, ranks or self._ranks)

    def capture_all(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, following: bool = False
    ) -> CaptureSummary:
        """Capture every size, or the `following` one; see `CudaGraphWrapper.capture_graphs` and `capture_next`."""
        method = "capture_next" if following else "capture_graphs"
        _refuse_inside_forward(method)
        if self._record.disabled is Reason.SWITCHED_OFF:
            return CaptureSummary(switched_off=True)  # no error, so that programs run without graphs, too
        remaining_runs = _RUNS_TO_SETTLE
        with self._lock, torch.no_grad():
            while True:
                remaining_runs -= 1
                summary = None
                try:
                    passed = self.carried.arguments(kwargs) if self.carried.places else kwargs
                    builder, call = self._read(module, args, passed, largest=True)
                    if following:  # no request waits for it
                        self._record.forgive()
                    self._drop_if_stale(builder)
                    with builder.manager.pool.lock, self._calls.plain.capture_or_proof(module, breaks=call.breaks):
                        summary = builder.capture_sizes(call, following=following)
                except CannotBind as error:
                    # A process's first run may change settings of torch, such as the order of attention kernels, and
                    # show which device inputs are moved to. A run may keep a mode that the example passes.
                    if not remaining_runs or not (self.carried.stale or error.reason in _TRANSIENT):
                        raise InputError(f"{method} cannot use this call: {error.explained}") from None
                if self.carried.stale and remaining_runs:
                    self.relearn()
                elif summary is not None:
                    if summary.captured:
                        self._record.note_captured(self.stats.replays)
                    return summary

    def static_inputs(self, size: int | None) -> dict[str, Tensor]:
        """Return views of a size's static inputs, of the signature used last; see `CudaGraphWrapper.static_inputs`."""
        if self.builder is None or not self.builder.inputs_of:
            raise ReplayError("no graph was captured yet, so there are no static inputs; call capture_graphs first.")
        signature = self._calls.layouts[0].binding.signature
        manager = self.builder.manager
        size = manager.descriptors()[0][1].num_tokens if size is None else size
        dispatch = manager.dispatch(size, *described_batch())
        inputs = self.builder.inputs_of.get((signature, dispatch.mode, dispatch.descriptor))
        if inputs is None:
            why = f"{dispatch.reason.text}.\n  See: {dispatch.reason.command}"
            raise CaptureSizeError(f"no graph was captured that holds batch size {size}: {why}")
        inputs.handed_out = True
        return {name: static.part(dispatch.descriptor.num_tokens, 0, size) for name, static in inputs.inputs.items()}

    def announce_write(self) -> None:
        """Do nothing; `sleep` replaces this to refuse writes or wake."""

    def report(self) -> GraphReport:
        """See `CudaGraphWrapper.graph_report`."""
        if self.builder is None:
            return GraphReport(self.stats, "no device yet")
        return dataclasses.replace(self.builder.manager.report(), ahead=self._eager_calls_ahead(self.builder))

    def _eager_calls_ahead(self, builder: GraphBuilder) -> dict[int, list[str]]:
        """Name the eager calls before the next replay, by batch size, if there are any; the most of any signature."""
        ahead: dict[int, list[str]] = {}
        for binding in list(self._calls.bindings.values()) if not self.config.exact_shapes else ():
            for rows in {rows for _, rows in list(binding.ran)}:
                ahead[rows] = max(builder.eager_calls_ahead(binding, rows), ahead.get(rows, []), key=len)
        return {rows: calls for rows, calls in sorted(ahead.items()) if calls}

    def reset(self, operation: str = "reset_graphs") -> None:
        """Drop all graphs, static inputs and everything learnt; `operation` is its name in messages."""
        _refuse_inside_forward(operation)
        with self._lock:
            self._forget()
            self._record.reset()

    def _forget(self) -> None:
        """Drop the programs, static inputs, layouts and signatures."""
        self._drop_graphs()
        self._calls.clear()

    def _drop_graphs(self) -> None:
        """Drop the programs; keep static inputs, layouts and signatures."""
        self._calls.drop_plans()
        if self.builder is not None:
            self.builder.drop()


def _refuse_inside_forward(operation: str) -> None:
    """Refuse to replace the graphs of a forward that is running."""
    if CALLS.context is not None and CALLS.context.bypass is Reason.NESTED:
        raise CaptureError(f"{operation} was called inside the forward of a wrapped module; call it before or after.")


def _settings_of_wrapper(settings: CudaGraphConfig) -> CudaGraphConfig:
    """Return the settings with those of the environment. Raises ConfigError for those that no wrapper can have."""
    if settings.num_warmups < 1:
        raise ConfigError(
            "num_warmups is 0, and a wrapper learns from an eager run what the forward reads and writes; expected at "
            "least 1. 0 is for a CudaGraphManager whose owner warmed up."
        )
    config = settings.from_env()
    return config.replace(num_warmups=max(1, config.num_warmups))  # the environment may ask for 0, for an engine


def new_runner(
    config: CudaGraphConfig, module: Any, pool: GraphPool | None = None, ranks: RankGroup | None = None
) -> GraphRunner:
    """Make the runner that the settings and the module ask for."""
    extras.installed.register_libraries()
    kind = extras.installed.runner_kind(config.from_env(), module) or GraphRunner
    return kind(config, pool, ranks)
