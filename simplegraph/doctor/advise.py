"""`advise`: watches the calls of a program, tries graphs for them on copies, and ranks what is worth a change."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import linecache
import logging
import os
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.compiler import is_dynamo_compiling
from torch.distributions import Distribution
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from simplegraph.base import patches
from simplegraph.base.errors import ConfigError
from simplegraph.base.extras import harmless_step_hooks
from simplegraph.base.failures import described_line, running_line
from simplegraph.base.modes import autocast_dtype
from simplegraph.base.nested import ATOMS, flatten
from simplegraph.base.reasons import Reason
from simplegraph.batch.planner import plan_sizes
from simplegraph.doctor.attach import CaptureReading, graph_source
from simplegraph.doctor.call_sites import INSTALLED, Site, find_site
from simplegraph.doctor.trials import SOON, UNVALIDATED, StepCall, Trial, try_call, try_step
from simplegraph.manager.stats import counted, on_eager

logger = logging.getLogger("simplegraph")

_SEEN = 12  # calls of a module after which entries of the functions that make them are looked at
_TRIED, _PATIENT = 20, 60  # the call that is tried; the same while a function that makes such calls has not come again
_ENOUGH = 2000  # calls after which nothing is waited for
_STEPS = 6  # the training step that is tried
_SIZES = 8  # batch sizes that are named
_FEW = 4  # operators that a graph would not be quicker than
_WORTH, _GAIN = 0.02, 1.1  # share of the time, and times as fast as what counts

_READS = re.compile(r"\.(item|cpu|numpy|tolist)\(")  # lines that no graph can hold

# A trial in one rank would wait for the others; of code that runs under a mode, as in a trial, dynamo lets go.
_RANKS = "not watched, because torch.distributed has several ranks; calls: "
_COMPILED = "not watched, because the program uses torch.compile, whose code a trial would disturb; calls: "

OtherTrial = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Trial | None]


@dataclasses.dataclass(eq=False)
class Watched:
    """Calls of one module or method, or steps of one optimizer, that a graph could make.

    Attributes:
        kind: "module", "method" or "step".
        target: the module or the optimizer.
        name: as the calling code says it, or that of its class.
        site: where it is called.
        began, ended: the times of its first and its latest call, without those of trials.
        calls: how many came.
        shapes: of the tensors that were passed, and how often.
        trial: what came of trying; None if it was not tried.
        covered: True if something else was tried that makes these calls.
        inner: for a method, the module's calls that it was counted by, and how many of them it makes.
        change: that a graph takes; what is missing, if nothing was tried.
    """

    kind: str
    target: weakref.ref[Any]
    name: str
    site: Site
    began: float
    ended: float = 0.0
    calls: int = 0
    shapes: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    trial: Trial | None = None
    covered: bool = False
    inner: tuple[Watched, int] | None = None
    change: str = "too few to try graphs for"

    def settings(self) -> dict[str, Any]:
        """Return the settings of `wrap` for these shapes: batch sizes if only these vary, else exact shapes."""
        rests = {tuple(shape[1:] for shape in shapes) for shapes in self.shapes}
        if len(rests) > 1 or not all(_batch(shapes) for shapes in self.shapes):
            return {"exact_shapes": True}
        sizes: collections.Counter[int] = collections.Counter()
        for shapes, count in self.shapes.items():
            sizes[_batch(shapes)] += count
        return {"capture_sizes": sorted(sizes) if len(sizes) <= _SIZES else list(plan_sizes(sizes, _SIZES).sizes)}

    @property
    def in_code(self) -> str:
        """Name it in a change: in words, if the code has no name for it that can be assigned to."""
        return self.name if self.name == self.site.called and re.fullmatch(r"[\w.]+", self.name) else f"<{self.name}>"

    @property
    def count(self) -> int:
        """How many calls came; of a method as many as make its module's calls."""
        return self.calls if self.inner is None else round(self.inner[0].calls / self.inner[1])

    @property
    def rate(self) -> float:
        """Calls in a second, from the first to the last."""
        timed = self if self.inner is None else self.inner[0]
        return self.count / max(timed.ended - timed.began, 1e-9)

    @property
    def gains_nothing(self) -> bool:
        """True if the GPU works nearly all the time of a call, or has next to nothing to do."""
        trial = self.trial or Trial()
        if trial.eager_ms is None:
            return 0 < trial.operators < _FEW
        return trial.eager_ms < _GAIN * (trial.graph_ms or trial.gpu_ms or 0.0)

    @property
    def saved(self) -> float:
        """Seconds that a graph saves, or would if nothing were in the way; without a GPU the operators of all calls."""
        trial = self.trial or Trial()
        if trial.eager_ms is None:
            return self.count * trial.operators
        return self.count * (trial.eager_ms - (trial.graph_ms or trial.gpu_ms or 0.0)) / 1e3

    def __str__(self) -> str:
        trial, noun = self.trial, "step" if self.kind == "step" else "call"
        if trial is None:
            return f"`{self.name}` ({self.site}): {counted(self.count, noun)}, {self.change}"
        said = f"`{self.name}` ({self.site}): "
        if trial.eager_ms is None:
            said += f"{counted(self.count, noun)} of {counted(trial.operators, 'operator')}"
        else:
            said += f"{self.rate:.3g} {noun}s/s, {trial.eager_ms:.3g} ms of which the GPU works {trial.gpu_ms:.3g}"
        if self.gains_nothing:
            return f"{said}: nothing to gain, {'the GPU is busy' if trial.eager_ms else 'there is little to launch'}"
        if trial.problem:
            return f"{said}; no graph: {trial.problem}"
        found = "serves it" if trial.gain is None else f"takes {trial.graph_ms:.3g} ms, {trial.gain:.1f} times as fast"
        return f"{said}; one graph {found}\n   {self.change}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = {"kind": self.kind, "name": self.name, "where": str(self.site), "calls": self.count}
        shapes = [[list(map(list, shapes)), count] for shapes, count in self.shapes.most_common(_SIZES)]
        tried = None if self.trial is None else dataclasses.asdict(self.trial) | {"gain": self.trial.gain}
        more = {
            "rate": self.rate,
            "busy": self.gains_nothing,
            "saved": self.saved,
            "change": self.change,
            "line": str(self),
        }
        return {**found, **more, "shapes": shapes, "trial": tried}


class _ThreadState(threading.local):
    """True while a module's outermost call runs, or a trial."""

    inside: bool = False


_THREAD = _ThreadState()


class Advisor:
    """Watches the outermost module calls and the training steps of this process, and tries graphs for each once.

    A trial runs in the thread and the context of a call that comes anyway, before it, on copies of what that uses. The
    program's modules, optimizers, gradients and random numbers stay what they would be. Forked processes are not
    watched.

        with Advisor(simplegraph) as advisor:
            evaluate()
        print(advisor)

    Args:
        sg: this package, whose functions are tried.
        entries: by name of a module's method, what is tried for it before `wrap`: it is passed the module and the
            call's arguments, and returns None if that is not for it. "forward" is for a module's own call.
        parts: what is tried, in the same way, for a module whose call can have no graph as a whole.
    """

    def __init__(
        self, sg: Any, entries: Mapping[str, OtherTrial] | None = None, parts: OtherTrial | None = None
    ) -> None:
        self._sg = sg
        self._entries, self._parts = entries or {}, parts
        self._modules: dict[tuple[int, bool], Watched] = {}  # by module, and if gradients are computed
        self._methods: dict[types.CodeType, Watched | None] = {}  # None if it is not tried, or can have no graph
        self._steps: dict[int, Watched] = {}  # by optimizer
        self._entered: collections.Counter[types.CodeType] = collections.Counter()
        self._inner: dict[types.CodeType, int] = {}  # calls of the module inside when a method was entered first
        # The step that is tried next, and how often its function was entered before.
        self._recording: tuple[Watched, int] | None = None
        self._recorded: list[StepCall] = []
        self._validates = False  # distributions look at their arguments in a step
        self._captured: dict[int, str] = {}  # by graph: the line that did
        self._watching = False  # replays
        self._notes: collections.Counter[str] = collections.Counter()  # what else came, and how often
        self._trying = threading.Lock()
        self._compiled = _compiled_graphs()
        self._process, self._spent = os.getpid(), 0.0

    def __enter__(self) -> Advisor:
        self._undo = contextlib.ExitStack()
        patches.replace(nn.Module, "__call__", self._calling)
        self._undo.callback(patches.restore, nn.Module, "__call__")
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
        self._watch_entries(False)
        self._undo.close()

    # Calls of modules.

    def _calling(self, original: Any) -> Any:
        @functools.wraps(original)
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            # A compiler that traces this sees torch's own call.
            if is_dynamo_compiling() or not self._watches():
                return original(module, *args, **kwargs)
            _THREAD.inside = True
            try:
                with _telling():
                    self._look(module, args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                _THREAD.inside = False

        return __call__

    def _watches(self) -> bool:
        """False in a watched call, a trial, a forked process or a capture, and where trials would do harm."""
        if _THREAD.inside or os.getpid() != self._process:
            return False
        ranks = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if ranks or _compiled_graphs() > self._compiled:
            self._notes[_RANKS if ranks else _COMPILED] += 1
            return False
        return not (_on_gpu() and torch.cuda.is_current_stream_capturing())

    def _now(self) -> float:
        return time.perf_counter() - self._spent

    def _look(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count a call, unless this library makes it, and try graphs for it when it is time to."""
        trains = torch.is_grad_enabled()
        watched = self._modules.get((id(module), trains))
        if watched is None or watched.target() is not module:
            if (site := find_site(sys._getframe(2))) is None:
                return
            name = (site.called if site.direct else "") or type(module).__name__
            watched = Watched("module", weakref.ref(module), name, site, self._now())
            self._modules[id(module), trains] = watched
        elif watched.trial is None and not watched.covered and watched.calls <= _ENOUGH:
            if (site := find_site(sys._getframe(2))) is None:
                return
            self._methods |= {code: None for code in site.codes if code not in self._methods}
            if not (trains and self._steps):
                self._consider(watched, module, args, kwargs, site)
        if trains and self._steps:
            watched.covered = True
            if self._recording is not None:
                self._recorded.append(StepCall(module, args, kwargs, _autocast(), find_site(sys._getframe(2))))
        watched.calls += 1
        watched.ended = self._now()
        watched.shapes[_shapes((args, kwargs))] += 1

    def _consider(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any, site: Site) -> None:
        """Try graphs for a module's call, once no method of a module is to be tried first that makes the call."""
        if watched.calls == _SEEN:
            self._watch_entries(True)
        entry = next((code for code in site.codes if self._is_entry(code) and self._methods[code] is None), None)
        if entry is not None:
            watched.change = f"made by {entry.co_name}, which did not come three times"
            if watched.calls == _ENOUGH:
                self._watch_entries(False)
        elif watched.calls >= (_PATIENT if any(self._entered[code] == 1 for code in site.codes) else _TRIED):
            no_grad = torch.is_grad_enabled()
            with self._tries(), torch.no_grad() if no_grad else contextlib.nullcontext():
                first, then = self._entries.get("forward"), self._parts
                trial = first(module, args, kwargs) if first is not None else None
                if trial is None or trial.problem:
                    trial = try_call(self._sg, module, "", args, kwargs, watched.settings())
                if trial.problem and then is not None:
                    parts = then(module, args, kwargs)
                    trial = parts if parts is not None and not parts.problem else trial
                watched.trial = trial
            watched.change = trial.way.format(watched.in_code) + ", and call it under torch.no_grad()" * no_grad

    # Methods of modules that call modules.

    def _is_entry(self, code: types.CodeType) -> bool:
        return code.co_name in self._entries and code.co_filename.startswith(INSTALLED)

    def _watch_entries(self, watched: bool) -> None:
        """Look at entries of functions in this thread, unless somebody's profiler does, or no longer."""
        if watched and sys.getprofile() is None:
            sys.setprofile(self._profile)
        elif not watched and sys.getprofile() == self._profile:
            sys.setprofile(None)

    def _profile(self, frame: types.FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if self._recording is not None and "torch/distributions" in code.co_filename:
            self._validates = Distribution._validate_args
        if event == "call" and code in self._methods and self._watches():
            self._entered[code] += 1
            inner = [one for one in self._modules.values() if code in one.site.codes and one.trial is None]
            inner = [one for one in inner if not one.covered]
            if inner and self._entered[code] == 1:
                self._inner[code] = inner[0].calls
            elif inner and self._entered[code] == 2 and inner[0].calls > self._inner.get(code, inner[0].calls):
                with _telling():
                    self._enter(frame, inner)

    def _enter(self, frame: types.FrameType, inner: Sequence[Watched]) -> None:
        """Try the method of a module that is entered, if all it is passed can be copied without doing harm."""
        code, held, site = frame.f_code, frame.f_locals, find_site(frame.f_back)
        count, more = code.co_argcount + code.co_kwonlyargcount, bool(code.co_flags & inspect.CO_VARARGS)
        names, entry = code.co_varnames[:count], self._entries.get(code.co_name) if self._is_entry(code) else None
        owner = held.get(names[0]) if names else None
        if site is None or more or not isinstance(owner, nn.Module):
            return
        arguments = {name: held[name] for name in names[1:]}
        if code.co_flags & inspect.CO_VARKEYWORDS:
            arguments |= held[code.co_varnames[count]]
        if entry is None and not all(issubclass(type(leaf), (Tensor, *ATOMS)) for leaf in flatten(arguments)[0]):
            return
        called, _, method = site.called.rpartition(".")
        name = site.called if method == code.co_name else f"{type(owner).__name__}.{code.co_name}"
        watched = Watched("method", weakref.ref(owner), name, site, self._now())
        watched.shapes[_shapes(arguments)] += 1
        with self._tries():
            if entry is not None:
                watched.trial = entry(owner, (), arguments)
            else:
                watched.trial = try_call(self._sg, owner, code.co_name, (), arguments, watched.settings())
        self._methods[code] = watched
        watched.covered = watched.trial is None or (entry is None and bool(watched.trial.problem))
        if watched.trial is not None and not watched.covered:
            watched.change = watched.trial.way.format(watched.in_code if entry is None else called or name)
            watched.inner = inner[0], inner[0].calls - self._inner[code]
            for one in inner:
                one.covered = True

    # Training steps.

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step, and try the second one that comes after enough, whose calls are recorded."""
        if self._watches():
            with _telling():
                self._count_step(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        step = self._steps.get(id(optimizer))
        if step is None or step.target() is not optimizer:
            if (site := find_site(sys._getframe(2))) is None:
                return
            name = site.called if site.called.endswith(".step") else f"{type(optimizer).__name__}.step"
            step = self._steps[id(optimizer)] = Watched("step", weakref.ref(optimizer), name, site, self._now())
        step.calls += 1
        step.ended = self._now()
        recorded, self._recorded = self._recorded, []
        code = step.site.code
        if self._recording is not None and self._recording[0] is step:
            entered, self._recording = self._entered[code] > self._recording[1], None
            if recorded:
                with self._tries(), torch.enable_grad():
                    step.trial = try_step(self._sg, recorded, optimizer)
                change = _step_change(step, recorded[0].site, entered=entered)
                step.change = "; ".join(filter(None, [change, step.trial.way, f"call {UNVALIDATED}" * self._validates]))
        elif self._recording is None and step.trial is None and step.calls >= _STEPS:
            self._methods.setdefault(code, None)
            self._recording = step, self._entered[code]
            self._watch_entries(True)

    @contextlib.contextmanager
    def _tries(self) -> Iterator[None]:
        """Let one thread try at a time, unwatched, and take its time out of the program's."""
        before, _THREAD.inside = _THREAD.inside, True
        started = time.perf_counter()
        try:
            with self._trying:
                yield
        finally:
            self._spent += time.perf_counter() - started
            _THREAD.inside = before
            waiting = (one for one in self._modules.values() if one.trial is None and not one.covered)
            if all(one.calls < _SEEN for one in waiting):
                self._watch_entries(False)

    # Graphs that the program has already; see `attach.Watcher`.

    def capture_begins(self, graph: Any) -> None:
        """Do nothing: a capture counts at its end."""

    def capture_ended(self, graph: Any, reading: CaptureReading) -> None:
        if not _THREAD.inside:
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
        """Note a call of a wrapper or an engine that no graph served, though its first calls are over."""
        if not _THREAD.inside and reason not in SOON:
            self._notes[f"`{name}` has graphs already, but runs eagerly: {reason.text}; calls: "] += 1

    # The report.

    def ranking(self) -> list[Watched]:
        """List what was watched, what is worth most first."""
        found = [*self._modules.values(), *self._steps.values(), *filter(None, self._methods.values())]
        left = [one for one in found if not one.covered]
        return sorted(left, key=lambda one: (one.trial is None, one.gains_nothing, -one.saved))

    def lines(self) -> list[str]:
        """Say what to change, what is worth most first; what graphs serve already comes before what gains little."""
        ranked = self.ranking()
        span = max((one.ended for one in ranked), default=0.0) - min((one.began for one in ranked), default=0.0)
        tried = [(one, one.trial.eager_ms) for one in ranked if one.trial is not None and not one.gains_nothing]
        first = [one for one, timed in tried if timed is None or one.saved >= _WORTH * span]
        notes = [f"{note}{count:,}" for note, count in self._notes.most_common()]
        found = [*map(str, first), *notes, *(str(one) for one in ranked if one not in first)]
        nothing = "no torch.nn.Module was called in this process: to functions of tensors, sg.wrap gives graphs, too"
        return found or [nothing]

    def __str__(self) -> str:
        return "\n".join(f"{number}. {line}" for number, line in enumerate(self.lines(), 1))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
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
    """Log an error of the advisor's own, which does not stop the program."""
    try:
        yield
    except Exception:
        logger.exception("simplegraph advise: a call could not be looked at; the program goes on")


def _shapes(things: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in flatten(things)[0] if isinstance(leaf, Tensor))


def _batch(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the rows that all of these have; 0 if they differ, or one has none."""
    rows = {shape[0] if shape else 0 for shape in shapes}
    return rows.pop() if len(rows) == 1 else 0


def _compiled_graphs() -> int:
    """Count what torch.compile has compiled, without importing it."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])


def _on_gpu() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _autocast() -> torch.dtype | None:
    return autocast_dtype("cuda" if _on_gpu() else "cpu")


def _step_change(step: Watched, first: Site | None, *, entered: bool) -> str:
    """Say how a training step becomes one graph: as the function that it is, or as one that its lines are put into."""
    site = step.site
    settings = f"optimizers={step.name.removesuffix('.step')}"
    settings = "optimizers=<the optimizer>, scaler=<the scaler>" if site.scaled else settings
    if entered:
        function = f"def {site.code.co_name} ({Path(site.file).name}:{site.code.co_firstlineno})"
        return f"@sg.train_step({settings}) above {function}"
    begins = first.codes.get(site.code, site.number) if first is not None else site.number
    numbered = enumerate(linecache.getlines(site.file)[begins - 1 : site.number], begins)
    reads = [f"{number} `{line.strip()}`" for number, line in numbered if _READS.search(line)]
    said = f"put {Path(site.file).name}:{begins} to {site.number} into a function; sg.train_step(function, {settings})"
    return said + f"; lines that read results back stay outside: {', '.join(reads)}" * bool(reads)
