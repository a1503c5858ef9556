"""`advise`: watches the calls of a program, tries graphs for them on copies, and ranks the changes by their gain."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import linecache
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from simplegraph.base import patches
from simplegraph.base.errors import ConfigError
from simplegraph.base.extras import harmless_step_hooks
from simplegraph.base.failures import described_line, running_line
from simplegraph.base.modes import autocast_dtype
from simplegraph.base.nested import ATOMS, flatten
from simplegraph.base.reasons import SOON, Reason
from simplegraph.batch.planner import plan_sizes
from simplegraph.doctor.attach import CaptureReading, graph_source
from simplegraph.doctor.call_sites import Method, Site, find_site
from simplegraph.doctor.trials import StepCall, Trial, try_call, try_step
from simplegraph.guard.torch_state import hindrance
from simplegraph.manager.stats import counted, on_eager

logger = logging.getLogger("simplegraph")

_TRIED, _PATIENT = 20, 60  # the number of the module's call that is tried; the same while its caller was not tried
_METHOD = 3  # the number of the method's call that is tried
_STEPS = 6  # the number of the training step that is tried
_SIZES = 8  # the most batch sizes that are listed
_FEW = 4  # the most operators for which a graph is not faster
_WORTH, _GAIN = 0.02, 1.1  # the least share of the time, and the least speedup, that count

_READS = re.compile(r"\.(item|cpu|numpy|tolist)\(")  # lines that no graph can hold

# A trial in one rank would wait for the others; dynamo drops its code if that runs under a mode, as trials do.
_RANKS = "not watched, because torch.distributed has several ranks; calls: "
_COMPILED = "not watched, because the program uses torch.compile, whose code a trial would disturb; calls: "

OtherTrial = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Trial | None]


@dataclasses.dataclass(eq=False)
class Watched:
    """The calls of one module or method, or the steps of one optimizer, that a graph could serve.

    Attributes:
        noun: "call" or "step".
        target: the module or the optimizer.
        name: its name in the calling code, or the name of its class.
        site: the line that calls it.
        began, ended: the times of its first and its latest call, without the time of trials.
        calls: the number of calls.
        shapes: the shapes of the tensors that were passed, with their counts.
        trial: the result of the trial; None if it was not tried.
        covered: True if the caller of these calls is tried instead.
        more: further changes, beside those of the trial.
    """

    noun: str
    target: weakref.ref[Any]
    name: str
    site: Site
    began: float
    ended: float = 0.0
    calls: int = 0
    shapes: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    trial: Trial | None = None
    covered: bool = False
    more: str = ""

    def settings(self) -> dict[str, Any]:
        """Return the settings of `wrap` for these shapes: batch sizes if only they vary, else exact shapes."""
        rests = {tuple(shape[1:] for shape in shapes) for shapes in self.shapes}
        if len(rests) > 1 or not all(_batch(shapes) for shapes in self.shapes):
            return {"exact_shapes": True}
        sizes: collections.Counter[int] = collections.Counter()
        for shapes, count in self.shapes.items():
            sizes[_batch(shapes)] += count
        return {"capture_sizes": sorted(sizes) if len(sizes) <= _SIZES else list(plan_sizes(sizes, _SIZES).sizes)}

    @property
    def change(self) -> str:
        """The change of the code that gives these calls graphs, for all their shapes."""
        if self.trial is None:
            return self.more or "too few to try graphs for"
        # The code has no name for it that can be assigned to, if a library or a table of functions makes the call.
        named = self.name == self.site.called and re.fullmatch(r"[\w.]+", self.name)
        called, owner = (self.name, self.name.rpartition(".")[0]) if named else (f"<{self.name}>", "<the model>")
        settings = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        if self.trial.way.startswith("{0} =") and called == "self":
            called = f"<the {type(self.target()).__name__}>"  # a name for `self` is of no use to its caller
        way = self.trial.way.format(called, settings, owner)
        once = " once, as in __init__" if way.startswith("self.") else ""
        return "; ".join(filter(None, [way + once, self.more]))

    @property
    def rate(self) -> float:
        """The number of calls per second, from the first to the last."""
        return self.calls / max(self.ended - self.began, 1e-9)

    @property
    def gains_nothing(self) -> bool:
        """True if the GPU is busy for nearly the whole time of a call, or has almost nothing to do."""
        trial = self.trial or Trial()
        if trial.eager_ms is None:
            return 0 < trial.operators < _FEW
        return trial.eager_ms < _GAIN * (trial.graph_ms or trial.gpu_ms or 0.0)

    @property
    def saved(self) -> float:
        """The seconds that graphs would save if they were possible; without a GPU, the number of all operators."""
        trial = self.trial or Trial()
        if trial.eager_ms is None:
            return self.calls * trial.operators
        return self.calls * (trial.eager_ms - (trial.graph_ms or trial.gpu_ms or 0.0)) / 1e3

    def __str__(self) -> str:
        trial, said = self.trial, f"`{self.name}` ({self.site}): "
        if trial is None:
            return f"{said}{counted(self.calls, self.noun)}, {self.change}"
        if trial.eager_ms is None:
            said += f"{counted(self.calls, self.noun)} of {counted(trial.operators, 'operator')}"
        else:
            said += f"{self.rate:.3g} {self.noun}s/s, {trial.eager_ms:.3g} ms of which the GPU works {trial.gpu_ms:.3g}"
        if self.gains_nothing:
            return f"{said}: nothing to gain, {'the GPU is busy' if trial.eager_ms else 'there is little to launch'}"
        if trial.problem:
            return f"{said}; no graph: {trial.problem}"
        effect = "serves it" if trial.gain is None else f"takes {trial.graph_ms:.3g} ms, {trial.gain:.1f} times as fast"
        return f"{said}; one graph {effect}\n   {self.change}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        shapes = [[list(map(list, shapes)), count] for shapes, count in self.shapes.most_common(_SIZES)]
        tried = None if self.trial is None else dataclasses.asdict(self.trial) | {"gain": self.trial.gain}
        return {
            "name": self.name,
            "where": str(self.site),
            "calls": self.calls,
            "rate": self.rate,
            "saved": self.saved,
            "line": str(self),
            "shapes": shapes,
            "trial": tried,
        }


class _ThreadState(threading.local):
    """The thread's current outermost call of a module or a method, or its current trial."""

    inside: object = None


_THREAD = _ThreadState()


class Advisor:
    """Watches the outermost module calls and the training steps of this process, and tries graphs once for each.

    If a method of a module makes such a call, the method is watched instead from then on, unless it trains or no graph
    can serve it. A trial runs directly before a call of the program, in its thread and context, on copies of the
    objects that the call uses. Modules, optimizers, gradients and random numbers of the program do not change. Forked
    processes are not watched.

        with Advisor(simplegraph) as advisor:
            evaluate()
        print(advisor)

    Args:
        sg: this package, whose functions are tried.
        entries: name of a module's method, empty for the module's own call -> a function to try before `wrap`. It is
            called with the module and the call's arguments, and returns None if it does not apply.
        parts: a function to try in the same way for a module whose call can have no graph as a whole.
    """

    def __init__(
        self, sg: Any, entries: Mapping[str, OtherTrial] | None = None, parts: OtherTrial | None = None
    ) -> None:
        self._sg = sg
        self._entries, self._parts = entries or {}, parts
        self._calls: dict[tuple[int, str, bool], Watched] = {}  # by module, method, and if gradients are computed
        self._methods: dict[Method, bool] = {}  # methods that make calls; False if a method is not watched
        self._steps: dict[int, Watched] = {}  # by optimizer
        self._recording: Watched | None = None  # the step that is tried next
        self._recorded: list[StepCall] = []
        self._captured: dict[int, str] = {}  # by graph: the line that did
        self._watching = False  # replays
        self._notes: collections.Counter[str] = collections.Counter()  # what else came, and how often
        self._trying = threading.Lock()
        self._compiled = _compiled_graphs()
        self._process, self._spent = os.getpid(), 0.0

    def __enter__(self) -> Advisor:
        self._undo = contextlib.ExitStack()
        self._replace_calls()
        self._undo.callback(self._restore_calls)
        harmless_step_hooks.add(self._stepped)  # it does nothing in a step's recording
        self._undo.callback(harmless_step_hooks.discard, self._stepped)
        self._undo.callback(on_eager(self._ran_eagerly))
        self._undo.callback(register_optimizer_step_post_hook(self._stepped).remove)
        with contextlib.suppress(ConfigError):  # of a driver that cannot show graphs
            self._source = graph_source(self)
            self._source.attach()
            self._undo.callback(self._source.detach)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    # Calls of modules and of their methods.

    def _calling(self, method: Method | None, original: Any) -> Any:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            # A compiler that traces this sees the original.
            if is_dynamo_compiling() or not self._watches() or not self._copies(method, (args, kwargs)):
                return original(module, *args, **kwargs)
            _THREAD.inside = method or module
            try:
                with _telling():
                    self._look(module, method, args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                _THREAD.inside = None

        return call

    def _watches(self) -> bool:
        """False in a watched call, a trial, a forked process or a capture, and where trials would do harm."""
        if _THREAD.inside is not None or os.getpid() != self._process:
            return False
        ranks = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if ranks or _compiled_graphs() > self._compiled:
            self._notes[_RANKS if ranks else _COMPILED] += 1
            return False
        if (why := hindrance()) is not None:
            if why[0] is Reason.HOOKS:
                self._notes[f"not watched, because of {why[1]}; calls: "] += 1
            return False  # also while a call is traced or transformed, which tells nothing of the program's speed
        return not (_on_gpu() and torch.cuda.is_current_stream_capturing())

    def _copies(self, method: Method | None, passed: Any) -> bool:
        """True if a method's arguments can be copied; otherwise the method is no longer watched."""
        if method is None or method.name in self._entries:
            return True
        if all(issubclass(type(leaf), (Tensor, *ATOMS)) for leaf in flatten(passed)[0]):
            return True
        self._leave(method)
        return False

    def _leave(self, method: Method) -> None:
        """Stop watching a method; watch the calls that it makes instead."""
        if self._methods[method]:
            self._methods[method] = False
            patches.restore(*method)

    def _restore_calls(self) -> None:
        patches.restore(nn.Module, "__call__")
        for method, watched in self._methods.items():
            if watched:
                patches.restore(*method)

    def _replace_calls(self) -> None:
        patches.replace(nn.Module, "__call__", functools.partial(self._calling, None))
        for method, watched in self._methods.items():
            if watched:
                patches.replace(*method, functools.partial(self._calling, method))

    def _now(self) -> float:
        return time.perf_counter() - self._spent

    def _look(self, module: nn.Module, method: Method | None, args: Any, kwargs: Any) -> None:
        """Count a call, unless this library makes it; try graphs if its number is that of the trial."""
        trains, name = torch.is_grad_enabled(), "" if method is None else method.name
        key = id(module), name, trains
        watched = self._calls.get(key)
        if watched is None or watched.target() is not module:
            if (site := find_site(sys._getframe(2))) is None:
                return
            watched = Watched("call", weakref.ref(module), _name(site, module, name), site, self._now())
            watched.calls += bool(name) and not any(
                name == other for _, other, _ in self._calls
            )  # the call by which the method was found
            self._calls[key] = watched
        if trains and self._steps:
            watched.covered = True
            if self._recording is not None:
                site = find_site(sys._getframe(2))
                self._recorded.append(StepCall(module, name, args, kwargs, _autocast(), site))
        watched.calls += 1
        watched.ended = self._now()
        watched.shapes[_shapes((args, kwargs))] += 1
        if watched.trial is None and not watched.covered:
            self._consider(watched, module, method, args, kwargs)

    def _consider(self, watched: Watched, module: nn.Module, method: Method | None, args: Any, kwargs: Any) -> None:
        """Try graphs for a call, unless a method that makes the call must be tried first."""
        if (site := find_site(sys._getframe(3))) is None:
            return
        outer = next((candidate for candidate in reversed(site.methods) if self._methods.get(candidate, True)), None)
        if outer is not None:
            if outer not in self._methods:
                self._methods[outer] = True
                patches.replace(*outer, functools.partial(self._calling, outer))
            if outer.name in self._entries or watched.calls < _PATIENT:
                watched.more = f"made by {outer.name}, which came too seldom to try graphs for"
                return
        if watched.calls < (_TRIED if method is None else _METHOD):
            return
        name, trains = "" if method is None else method.name, torch.is_grad_enabled()
        entry = self._entries.get(name)
        watched.more = "call it under torch.no_grad()" * (trains and not (name and entry))
        with self._tries(), torch.no_grad() if trains else contextlib.nullcontext():
            trial = entry(module, args, kwargs) if entry is not None else None
            if trial is None or (trial.problem and method is None):
                trial = try_call(self._sg, module, name, args, kwargs, watched.settings())
            if trial.problem and method is None and self._parts is not None:
                parts = self._parts(module, args, kwargs)
                trial = parts if parts is not None and not parts.problem else trial
            watched.trial = trial
        if method is not None:
            made = [call for call in self._calls.values() if method in call.site.methods]
            if trial.problem and entry is None:
                self._leave(method)
                made = [watched]
            for call in made:
                call.covered = True

    # Training steps.

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step. After enough steps, record the calls of one step, and try it."""
        if isinstance(_THREAD.inside, Method):
            self._leave(_THREAD.inside)  # the method trains
        elif self._watches():
            with _telling():
                self._count_step(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        step = self._steps.get(id(optimizer))
        if step is None or step.target() is not optimizer:
            if (site := find_site(sys._getframe(2))) is None:
                return
            step = Watched("step", weakref.ref(optimizer), _name(site, optimizer, "step"), site, self._now())
            self._steps[id(optimizer)] = step
        step.calls += 1
        step.ended = self._now()
        recorded, self._recorded = self._recorded, []
        if self._recording is step:
            self._recording = None
            if recorded:
                with self._tries(), torch.enable_grad():
                    step.trial = try_step(self._sg, recorded, optimizer, whole=step.site.direct)
                step.more = _step_change(step, recorded[0].site) if step.trial.whole else ""
        elif self._recording is None and step.trial is None and step.calls >= _STEPS:
            self._recording = step

    @contextlib.contextmanager
    def _tries(self) -> Iterator[None]:
        """Run a trial: one thread at a time, with torch's own calls; its time does not count as the program's."""
        before, _THREAD.inside = _THREAD.inside, self
        started = time.perf_counter()
        try:
            with self._trying:
                self._restore_calls()
                yield
        finally:
            self._replace_calls()
            self._spent += time.perf_counter() - started
            _THREAD.inside = before

    # Events of graphs that the program has already; see `attach.Watcher`.

    def capture_begins(self, graph: Any) -> None:
        """Do nothing: a capture counts at its end."""

    def capture_ended(self, graph: Any, reading: CaptureReading) -> None:
        if _THREAD.inside is None:
            line = running_line()
            where = described_line(*line) if line is not None else "an unknown line"
            self._captured[id(graph)] = f"graphs captured at {where} serve already, replays: "
            if not self._watching:
                self._watching = True
                self._source.watch_replays(True)

    def graph_dropped(self, key: int) -> None:
        self._captured.pop(key, None)

    def replay_begins(self, graph: Any) -> None:
        line = self._captured.get(id(graph))
        if line is not None:
            self._notes[line] += 1

    def replay_ended(self, graph: Any) -> None:
        """Do nothing: a replay counted when it began."""

    def _ran_eagerly(self, name: str, reason: Reason, detail: str) -> None:
        """Note an eager call of a wrapper or an engine after its first calls."""
        if _THREAD.inside is None and reason not in SOON:
            self._notes[f"`{name}` has graphs already, but runs eagerly: {reason.text}; calls: "] += 1

    # The report.

    def ranking(self) -> list[Watched]:
        """List everything watched, the largest gain first."""
        uncovered = [one for one in (*self._calls.values(), *self._steps.values()) if not one.covered]
        return sorted(uncovered, key=lambda one: (one.trial is None, one.gains_nothing, -one.saved))

    def lines(self) -> list[str]:
        """Return the lines of the report: the changes, the largest gain first; present graphs; and small gains."""
        ranked = self.ranking()
        span = max((one.ended for one in ranked), default=0.0) - min((one.began for one in ranked), default=0.0)
        tried = [(one, one.trial.eager_ms) for one in ranked if one.trial is not None and not one.gains_nothing]
        first = [one for one, timed in tried if timed is None or one.saved >= _WORTH * span]
        notes = [f"{note}{count:,}" for note, count in self._notes.most_common()]
        others = [str(one) for one in ranked if one not in first and one.trial is not None]
        few: dict[tuple[str, str], Watched] = {}  # many modules may be called at one line, each a few times
        for one in (one for one in ranked if one.trial is None):
            alike = few.setdefault((one.name, str(one.site)), dataclasses.replace(one, calls=0))
            alike.calls += one.calls
        lines = [*map(str, first), *notes, *others, *map(str, few.values())]
        nothing = "no torch.nn.Module was called in this process: to functions of tensors, sg.wrap gives graphs, too"
        return lines or [nothing]

    def __str__(self) -> str:
        return "\n".join(f"{number}. {line}" for number, line in enumerate(self.lines(), 1))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if _on_gpu() else "emulated",
            "trial_seconds": self._spent,
            "lines": self.lines(),
            "watched": [one.to_dict() for one in self.ranking()],
            "notes": dict(self._notes),
        }


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Log an error of the advisor itself, which must not stop the program."""
    try:
        yield
    except Exception:
        logger.exception("simplegraph advise: a call could not be looked at; the program goes on")


def _shapes(things: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in flatten(things)[0] if isinstance(leaf, Tensor))


def _batch(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the number of rows of all these shapes; 0 if they differ, or if a shape has no rows."""
    rows = {shape[0] if shape else 0 for shape in shapes}
    return rows.pop() if len(rows) == 1 else 0


def _compiled_graphs() -> int:
    """Count the graphs that torch.compile has compiled, without importing the compiler."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])


def _on_gpu() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _autocast() -> torch.dtype | None:
    return autocast_dtype("cuda" if _on_gpu() else "cpu")


def _name(site: Site, target: object, method: str) -> str:
    """Return the name of a target in the code that calls it directly, or else the name of its class."""
    if method:
        named = site.called.rpartition(".")[2] == method
        return site.called if named else f"{type(target).__name__}.{method}"
    return (site.called if site.direct else "") or type(target).__name__


def _step_change(step: Watched, first: Site | None) -> str:
    """Describe the change that puts a training step into one graph: decorate its function, or make a function."""
    site = step.site
    settings = f"optimizers={step.name.removesuffix('.step')}"
    settings = "optimizers=<the optimizer>, scaler=<the scaler>" if site.scaled else settings
    tree = ast.parse("".join(linecache.getlines(site.file)))
    blocks = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.For, ast.While))]
    around = [block for block in blocks if block.lineno <= site.number <= (block.end_lineno or 0)]
    if around and isinstance(around[-1], ast.FunctionDef):  # the innermost block: `walk` goes from outside to inside
        function = f"def {site.code.co_name} ({Path(site.file).name}:{site.code.co_firstlineno})"
        return f"@sg.train_step({settings}) above {function}"
    begins = first.codes.get(site.code, site.number) if first is not None else site.number
    numbered = enumerate(linecache.getlines(site.file)[begins - 1 : site.number], begins)
    reads = [f"{number} `{line.strip()}`" for number, line in numbered if _READS.search(line)]
    lines = f"{begins} to {site.number}" if begins < site.number else site.number
    said = f"put {Path(site.file).name}:{lines} into a function; sg.train_step(function, {settings})"
    return said + f"; lines that read results back stay outside: {', '.join(reads)}" * bool(reads)
