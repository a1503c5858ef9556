"""Try graphs for a call or a training step on copies of the objects that it uses, and time them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import ConfigError, SimpleGraphError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import SOON
from simplegraph.device.saved_state import HostRandom, put_random_states, random_states
from simplegraph.doctor.turns import Way, in_turns
from simplegraph.manager.stats import GraphStats, headline, merged_failures
from simplegraph.program.snapshot import Snapshot

_RUNS = 12  # calls after which a graph serves, if it can
_SECONDS, _TIMED = 0.5, (3, 50)  # the time for timing one kind of call, and its fewest and most calls
_SHARED = 1 << 30  # bytes of parameters above which a copy shares them
_TRAINED = _SHARED // 4  # bytes of trained parameters, beside gradients and an optimizer's state, copied twice at most
_CYCLES = 2_000_000  # of a GPU's clock in a millisecond, about
_UNVALIDATED = "torch.distributions.Distribution.set_default_validate_args(False)"

Context = Callable[[], contextlib.AbstractContextManager[None]]


class TrialConfig(CudaGraphConfig):
    """Settings that environment variables do not replace: a check tries graphs even if SIMPLEGRAPH_MODE=off is set."""

    def from_env(self, environ: Mapping[str, str] | None = None) -> CudaGraphConfig:
        """Return these settings as they are."""
        return self


@dataclasses.dataclass
class Trial:
    """The outcome of trying graphs for one call.

    Attributes:
        eager_ms: median time of an eager call, until its result is ready; None without a GPU, like all times. If a
            graph serves the call, both are timed in turns; see `in_turns`.
        gpu_ms: the part of it during which the GPU works; for a call that reads results back, an upper bound.
        graph_ms: median time of a call that a graph serves, until its result is ready; None if no graph does.
        operators: the number of operators of an eager call; launches: the nodes of the graph, 0 without one.
        problem: the obstacle to a graph; empty if one serves.
        way: the change of the code, with "{0}" for the called object, "{1}" for settings of `wrap`, and "{2}" for the
            module whose method is called.
        whole: False for a training step of which only forward and backward are graphs.
    """

    eager_ms: float | None = None
    gpu_ms: float | None = None
    graph_ms: float | None = None
    operators: int = 0
    launches: int = 0
    problem: str = ""
    way: str = ""
    whole: bool = True

    @property
    def gain(self) -> float | None:
        """The speedup by the graph; None without times."""
        return self.eager_ms / self.graph_ms if self.eager_ms and self.graph_ms else None


class StepCall(NamedTuple):
    """A call of a module, or of a method if it has a name, in a training step.

    Attributes:
        autocast: the autocast dtype; None without autocast.
        site: the line that makes the call.
    """

    module: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    site: Any


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Restore random generators after the block, and drop everything that it prints, warns of or logs."""
    on_gpu = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    generators = [torch.default_generator, *on_gpu]
    states, host, ours = random_states(generators), HostRandom(), logging.getLogger("simplegraph")
    disabled, ours.disabled = ours.disabled, True
    dropped = io.StringIO()
    try:
        with contextlib.redirect_stdout(dropped), contextlib.redirect_stderr(dropped), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ours.disabled = disabled
        put_random_states(generators, states)
        host.put_back()


def copied(things: Any, *, training: bool = False) -> Any:
    """Copy modules, optimizers and arguments, all together; large parameters are shared unless they are trained."""
    memo: dict[int, Any] = {}
    for leaf in flatten(things)[0]:
        if isinstance(leaf, nn.Module) and not training:
            parameters = list(leaf.parameters())
            if sum(parameter.nbytes for parameter in parameters) > _SHARED:
                memo |= {id(parameter): parameter for parameter in parameters}
        elif isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
            memo[id(leaf)] = leaf.detach().clone()
    with torch.inference_mode(False):
        return copy.deepcopy(things, memo)


def observe(trial: Trial, eager: Way, copies: Any) -> None:
    """Run eagerly on copies, count the operators, and time it if they are on a GPU.

    Args:
        trial: receives the figures.
        eager: the call; its context is that of timing.
        copies: the copies of modules and arguments that it uses.

    Raises:
        ConfigError: the call changes more than the copies, which is undone.
    """
    before = Snapshot(copies, code=True)
    try:
        with _Operators() as operators:
            eager.call()
    finally:
        kept, changed = set(before.changes()), set(before.changes(code=True))
        changed |= set(before.release(lambda _: True, caches=False))
        before.put_back(changed)
    if changed - kept:
        raise ConfigError(f"each call changes {', '.join(sorted(changed - kept))}, which a replay would not")
    trial.operators = operators.count
    if on_gpu(copies):
        with eager.context():
            trial.eager_ms = waited_ms(eager.call)
        trial.gpu_ms = min(gpu_ms(eager.call, trial.eager_ms), trial.eager_ms)


def on_gpu(things: Any) -> bool:
    """True if a parameter or another tensor of these is on a GPU, where trials are timed."""
    return any(tensor.is_cuda for tensor in _tensors(things))


def gpu_ms(call: Callable[[], object], eager_ms: float) -> float:
    """Return the time that the GPU works for a call that takes so long, in ms."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cycles = int((2 * eager_ms + 1) * _CYCLES)
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # meanwhile all launches are queued
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def _tensors(things: Any) -> Iterator[Tensor]:
    for leaf in flatten(things)[0]:
        if isinstance(leaf, nn.Module):
            yield from leaf.parameters()
        elif isinstance(leaf, Tensor):
            yield leaf


def waited_ms(call: Callable[[], object]) -> float:
    """Return the median time of a call whose work on the GPU is waited for, in ms."""
    taken: list[float] = []
    while len(taken) < _TIMED[0] or (sum(taken) < _SECONDS and len(taken) < _TIMED[1]):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def in_the_way(stats: GraphStats) -> str:
    """Describe the obstacle to a graph: the failed capture, or the reason of most eager calls."""
    failed = [headline(message) for _, message in merged_failures(stats.failures)]
    reasons = [reason for reason, _ in stats.eager.most_common() if reason not in SOON]
    return next(iter(failed), None) or next((stats.explained(reason) for reason in reasons), "no call was replayed")


def measure(
    trial: Trial, graphed: Callable[[], object], stats: Callable[[], Sequence[GraphStats]], eager: Way | None
) -> Trial:
    """Call until a graph serves, and time that; note what is in the way if none does.

    Args:
        trial: receives the figures.
        graphed: the call that a graph should serve.
        stats: of what has graphs.
        eager: the same call without graphs, timed in turns with it; None to keep its time, where both use one copy.
    """
    replays = []
    for _ in range(_RUNS):
        graphed()
        replays.append(sum(graph_stats.replays for graph_stats in stats()))
    if len(replays) < 2 or replays[-1] == replays[-2]:
        trial.problem = "; ".join(dict.fromkeys(map(in_the_way, stats()))) or "no part of it can have a graph"
        return trial
    trial.launches = sum(graph.nodes or 0 for graph_stats in stats() for graph in graph_stats.graphs.values())
    if trial.eager_ms is not None:
        if eager is None:
            trial.graph_ms = waited_ms(graphed)
        else:
            trial.eager_ms, trial.graph_ms = in_turns(eager, Way(graphed), torch.cuda.synchronize)
        trial.gpu_ms = min(trial.gpu_ms or 0.0, trial.graph_ms)
    return trial


@contextlib.contextmanager
def trying(trial: Trial) -> Iterator[None]:
    """Note an error as the problem; collect the copies as garbage afterwards."""
    try:
        with undone():
            yield
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        trial.problem = said if isinstance(error, SimpleGraphError) else f"{type(error).__name__}: {said}"
    gc.collect()


def try_call(
    sg: Any,
    owner: nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Trial:
    """Try a graph for a module's call, or for a method of it, on a copy; the context of the caller's thread is kept.

    Args:
        sg: this package, whose functions give graphs: importing them here would make long chains of imports.
        owner: the module.
        method: name of the method; empty for the module's own call.
        args: of the call.
        kwargs: of the call.
        settings: of `wrap`.
    """
    return _validated_or_not(functools.partial(_try_call, sg, owner, method, args, kwargs, settings))


@contextlib.contextmanager
def validating(checks: bool) -> Iterator[None]:
    """Let distributions check their arguments in the block by default, or not."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(checks)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _validated_or_not(attempt: Callable[[Context], Trial]) -> Trial:
    """Try a graph; if distributions check their arguments, which no graph can hold, also try without these checks.

    Args:
        attempt: the trial; it is passed the context of the program's own calls, which check.
    """
    trial = attempt(contextlib.nullcontext)
    if "validate_args" not in trial.problem:
        return trial
    with validating(False):
        again = attempt(functools.partial(validating, True))
    again.way = "; ".join(filter(None, [again.way, f"call {_UNVALIDATED}"]))
    return trial if again.problem else again


def _try_call(
    sg: Any,
    owner: nn.Module,
    method: str,
    args: Any,
    kwargs: Mapping[str, Any],
    settings: Mapping[str, Any],
    context: Context,
) -> Trial:
    # A function that reaches a module in training mode has graphs; the module's own call has none.
    part = ".forward" if owner.training and not method else ""
    trial = Trial(way=f"{{0}}{part} = sg.wrap({{0}}{part}, {{1}})")
    with trying(trial):
        trial_owner, args, kwargs = copied((owner, args, dict(kwargs)))
        call = getattr(trial_owner, method or part[1:]) if method or part else trial_owner
        eager = Way(functools.partial(call, *args, **kwargs), context)
        observe(trial, eager, (trial_owner, args, kwargs))
        graphed: Any = sg.wrap(call, TrialConfig(progress=False), **settings)
        try:
            measure(trial, functools.partial(graphed, *args, **kwargs), lambda: [graphed.graph_stats], eager)
        finally:
            graphed.reset_graphs()
    return trial


def try_step(sg: Any, calls: Sequence[StepCall], optimizer: Optimizer, *, whole: bool) -> Trial:
    """Try graphs for a training step, on copies: forwards, the backward of the sum of their results, the optimizer.

    Args:
        sg: this package.
        calls: those of modules in a step.
        optimizer: whose step it is.
        whole: try one graph; graphs of forward and backward are tried if it is False, or if there can be none.
    """
    return _validated_or_not(functools.partial(_try_step, sg, calls, optimizer, whole=whole))


def _try_step(sg: Any, calls: Sequence[StepCall], optimizer: Optimizer, context: Context, *, whole: bool) -> Trial:
    trial = Trial()
    with trying(trial):
        recorded = [call[:-1] for call in calls]
        plain_calls, plain_optimizer = copied((recorded, optimizer), training=True)
        plain = Way(_step(plain_calls, plain_optimizer), context)
        observe(trial, plain, (plain_calls, plain_optimizer))
        observed = trial
        # A graph changes the optimizer's settings, so that eager steps in turns need copies of their own.
        turns = sum(tensor.nbytes for group in optimizer.param_groups for tensor in group["params"]) <= _TRAINED
        own_calls, trial_optimizer = plain_calls, plain_optimizer
        if turns:
            own_calls, trial_optimizer = copied((recorded, optimizer), training=True)
        eager = plain if turns else None
        step = _step(own_calls, trial_optimizer)
        if whole:
            _measure_step(sg, trial, step, trial_optimizer, eager)
        if "pass fused=True" in trial.problem:
            groups = [{"params": group["params"]} for group in trial_optimizer.param_groups]
            trial_optimizer = type(trial_optimizer)(
                groups, **trial_optimizer.defaults | {"foreach": None, "fused": True}
            )
            step = _step(own_calls, trial_optimizer)
            trial = dataclasses.replace(trial, problem="", way=f"pass fused=True to {type(trial_optimizer).__name__}")
            _measure_step(sg, trial, step, trial_optimizer, eager)
        if (trial.problem or not whole) and not any(call.method for call in calls):
            parts = dataclasses.replace(observed, problem="", whole=False)
            _measure_parts(sg, parts, step, own_calls, eager)
            trial = trial if parts.problem and whole else parts
    return trial


def _step(calls: list[Any], optimizer: Optimizer) -> Callable[[], None]:
    """Return a training step: the calls, the backward of the sum of their results, and the optimizer's step.

    Its learning rates are 0: that sum has no least value, and many steps would end in parameters that are not finite.
    """
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0
    device = "cuda" if on_gpu(calls) else "cpu"

    def step() -> None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for module, method, args, kwargs, dtype in calls:
            with torch.autocast(device, dtype, enabled=dtype is not None):
                results = flatten(getattr(module, method or "__call__")(*args, **kwargs))[0]
            losses += [leaf.float().sum() for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _measure_step(sg: Any, trial: Trial, step: Callable[[], None], optimizer: Optimizer, eager: Way | None) -> None:
    graphed = sg.train_step(step, optimizers=optimizer, progress=False)
    try:
        measure(trial, graphed, lambda: [graphed.graph_stats], eager)
    finally:
        graphed.reset_graphs()


def _measure_parts(sg: Any, trial: Trial, step: Callable[[], None], calls: list[Any], eager: Way | None) -> None:
    """Measure a step whose modules have graphs of their forward and backward; they take the modules' place in it."""
    wrapped = {id(module): sg.wrap(module, training=True, progress=False) for module, *_ in calls}
    names = ", ".join(f"<{name}>" for name in dict.fromkeys(type(module).__name__ for module, *_ in calls))
    trial.way = f"wrap what the step calls, {names}: model = sg.wrap(model, training=True)"
    calls[:] = [(wrapped[id(module)], *rest) for module, *rest in calls]
    try:
        measure(trial, step, lambda: [model.graph_stats for model in wrapped.values()], eager)
    finally:
        for model in wrapped.values():
            model.reset_graphs()
