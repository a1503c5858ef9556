"""Measures one row of the table, in a process of its own."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bench.model_table import answers, builders
from bench.model_table.builders.model import RAGGED, Call, TableModel, real_lengths
from bench.model_table.entries import ENCODER, ENTRIES, GENERATION, PIPELINE, WRAP, TableEntry
from bench.model_table.serving import NEW_TOKENS, Counts, ServedModel, caller, inner_call, serve, serve_parts
from bench.model_table.times import call_times, token_times, within_kernels
from bench.tools.fresh import NO_TURN, Turn
from bench.tools.measure import Figures, few_threads
from bench.tools.replays import SOON, Replays, Served
from bench.transformers_generate import same_tokens
from simplegraph import Reason
from simplegraph.base.context import eager
from simplegraph.base.errors import ConfigError

FULL, PIECEWISE, PARTS, EAGER = "full", "piecewise", "parts", "eager"
MISSING, FAILED = "not measured", "failed"  # in place of a column
BY_NAME = {entry.name: entry for entry in ENTRIES}
PASSES = (3, 8)  # over the ragged batches: at least, and at most until none of them runs eagerly for the first time
LEAST_SHARE = 0.25  # of a model's layers, for parts to be worth the name
TOKENS_PER_LAUNCH = 4  # of a generation whose host is slower than its graphs
TOLD, REPORTED = 400, 4000  # characters that are kept of a reason's details, and of a report


def measure_row(name: str, kind: str, tiny: bool, gpu: int = 0, turn: Turn = NO_TURN) -> Figures:
    """Measure one entry.

    Args:
        name: the entry's.
        kind: type of the device.
        tiny: the tiny shape.
        gpu: which of the visible GPUs, if the process has not used one yet.
        turn: entered while times are measured, when nothing else may run.
    """
    entry = BY_NAME[name]
    if missing := _missing(entry):
        return {"column": MISSING, "reason": f"{missing} is not installed"}
    if tiny and not entry.has_tiny_shape:
        return {"column": MISSING, "reason": "has no tiny shape"}
    if kind == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu % len(visible)] if visible[0] else str(gpu)
    device = torch.device(kind)
    # Convolutions of other batch sizes are as close as their kernels' precision.
    torch.backends.cudnn.allow_tf32 = False
    started = time.perf_counter()
    with _quiet(), few_threads(torch.device("cpu")), _grad_off(entry):  # others run beside it
        try:
            row = Row(entry, builders.find(entry), device, tiny)
        except ModuleNotFoundError as error:  # of a package that the entry's own needs
            return {"column": MISSING, "reason": str(error)}
        try:
            figures = row.measure(turn)
        except RuntimeError as error:
            if "custom C++ ops" not in str(error):
                raise
            return {"column": MISSING, "reason": f"{entry.package} is built for another torch"}
    return figures | {"seconds": round(time.perf_counter() - started, 2)}


def _missing(entry: TableEntry) -> str:
    """Name the package that is not installed, or ""."""
    needed = {entry.package.replace("-", "_")} | ({"transformers"} if entry.category == "peft" else set())
    return next((name for name in sorted(needed) if importlib.util.find_spec(name) is None), "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries warn of out of the progress: the row has what graphs have to say."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _grad_off(entry: TableEntry) -> Iterator[None]:
    """Turn gradients off as users do; diffusers' pipelines do it themselves."""
    with contextlib.nullcontext() if entry.integration == PIPELINE else torch.no_grad():
        yield


class Row:
    """One entry's model, its calls and eager's answers to them."""

    def __init__(self, entry: TableEntry, table_model: TableModel, device: torch.device, tiny: bool) -> None:
        self.entry, self.made, self.device, self.tiny = entry, table_model, device, tiny
        self.model = self._build(torch.float32)
        self.calls = [[self._call(lengths, seed) for lengths in RAGGED] for seed in (1, 2)]

    def _build(self, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        with self.device:
            model = self.made.build(self.tiny)
        if hasattr(model, "set_progress_bar_config"):
            model.set_progress_bar_config(disable=True)
        parts = [model] if isinstance(model, torch.nn.Module) else model.components.values()
        for part in parts:  # as `from_pretrained` gives them
            if isinstance(part, torch.nn.Module):
                part.eval()
        model = model.to(self.device, dtype) or model
        if self.entry.integration == GENERATION and self.tiny:
            for parameter in model.parameters():  # large enough that tokens vary
                if parameter.dim() > 1:
                    parameter.mul_(4)
        return model

    def _call(self, lengths: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Call:
        call = self.made.call(self.tiny, list(lengths) if self.tiny else real_lengths(lengths), seed)

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(self.device, dtype if leaf.is_floating_point() else leaf.dtype)

        found: Call = pytree.tree_map(placed, call)
        return found

    def measure(self, turn: Turn) -> Figures:
        plain = caller(self.entry, self.model)
        expected = [[answers.clone(self._run(plain, call)) for call in calls] for calls in self.calls]
        again = [answers.clone(self._run(plain, call)) for call in self.calls[0]]
        figures: Figures = {"repeats": self._repeats(again, expected[0])}
        if self.made.part:
            figures["part"] = self.made.part
        serving = self.served_whole
        try:
            with serving() as served:
                figures |= self._compare(served, expected)
        except ConfigError as error:
            refusal = {"reason": "refused", "detail": str(error)[:TOLD], "answers": "equal"}
            figures |= {"column": EAGER, "replayed": 0.0} | refusal
        if figures["column"] == EAGER and "wrong" not in figures and isinstance(self.model, torch.nn.Module):
            with self.served_in_parts() as served:
                found = self._compare(served, expected) if served.parts else {}
            share = self._share(served.parts) if found.get("replays") else 0.0
            if share >= LEAST_SHARE:
                why = {name: figures[name] for name in ("reason", "detail")}  # not the whole
                figures |= found | why | {"column": PARTS, "parts": served.parts, "in_parts": round(share, 3)}
                serving = self.served_in_parts
        if self.device.type != "cuda" or "wrong" in figures or figures.get("reason") == "refused":
            return figures
        del plain, served  # they hold the model, which is made anew
        return figures | self.timed(serving, turn, figures["column"])

    def served_whole(self, **more: Any) -> contextlib.AbstractContextManager[ServedModel]:
        """Serve the model as its entry says, with more settings."""
        settings = {**self.made.settings, **more}
        return serve(self.entry, self.model, tiny=self.tiny, part=self.made.part, settings=settings)

    def served_in_parts(self) -> contextlib.AbstractContextManager[ServedModel]:
        """Serve what parts of the model can have graphs."""
        dtype = next((each.dtype for each in self.model.parameters() if each.is_floating_point()), torch.float32)
        calls = [self._call(lengths, 1, dtype) for lengths in RAGGED[:2]]
        return serve_parts(self.entry, self.model, calls)

    def _share(self, parts: tuple[str, ...]) -> float:
        """Return the share of layers' calls that are inside of these parts."""
        called: collections.Counter[str] = collections.Counter()
        layers = [(name, each) for name, each in self.model.named_modules() if not any(True for _ in each.children())]
        hooks = [each.register_forward_pre_hook(lambda *_, at=name: called.update([at])) for name, each in layers]
        self._run(caller(self.entry, self.model), self.calls[0][0])
        for hook in hooks:
            hook.remove()
        inside = sum(called[name] for name in called if any(f"{name}.".startswith(f"{part}.") for part in parts))
        return inside / max(1, called.total())

    def _run(self, function: Callable[..., Any], call: Call) -> Any:
        torch.manual_seed(5)
        args, kwargs = call
        return function(*args, **kwargs)

    def _repeats(self, again: list[list[Any]], expected: list[list[Any]]) -> bool:
        """True if eager answers a call twice alike, from the same random numbers."""
        try:
            for found, wanted in zip(again, expected, strict=True):
                answers.difference(found, wanted)
        except answers.WrongAnswer:
            return False
        return True

    def _compare(self, served: ServedModel, expected: list[list[list[Any]]]) -> Figures:
        """Call it over the ragged batches until its graphs serve them, and compare every answer."""
        apart, wrong = 0.0, ""
        for number in range(PASSES[1]):
            before = served.counts()
            for call, wanted in zip(self.calls[number % 2], expected[number % 2], strict=True):
                found = self._run(served.call, call)
                try:
                    apart = max(apart, answers.difference(found, wanted, self._visible(call)))
                except answers.WrongAnswer as error:
                    if not self._parts_where_alike(served, call, wanted):
                        wrong = wrong or f"pass {number}, {len(self._rows(call))} rows: {error}"
            last = served.counts().since(before)
            if number >= PASSES[0] - 1 and not set(last.eager) & SOON:
                break
        figures = _column(served, last, self._steps()) | {"answers": "differ" if wrong else "equal", "apart": apart}
        if figures["column"] == EAGER:
            figures["report"] = str(served.report())[:REPORTED]
        return figures | ({"wrong": wrong} if wrong else {})

    def _rows(self, call: Call) -> Any:
        return next((leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor) and leaf.dim()), ())

    def _visible(self, call: Call) -> Tensor | None:
        """Return which tokens count, of an encoder's: those that the caller's mask does not hide."""
        mask = call[1].get("attention_mask") if self.entry.integration == ENCODER else None
        return None if mask is None else mask.bool().cpu()

    def _steps(self) -> int:
        """Return how many replays a pass has at least, if graphs serve all of it."""
        return len(RAGGED) * (NEW_TOKENS - 1 if self.entry.integration == GENERATION else 1)

    def _parts_where_alike(self, served: ServedModel, call: Call, wanted: list[Any]) -> bool:
        """True if tokens differ only from where eager found two of them equally likely, but for rounding."""
        if self.entry.integration != GENERATION or self.device.type != "cuda":
            return False
        more: Any = {"return_dict_in_generate": True, "output_logits": True}
        found = self._run(lambda *args, **kwargs: served.call(*args, **kwargs, **more), call)
        with eager():
            plain = self._run(lambda *args, **kwargs: served.call(*args, **kwargs, **more), call)
        rows = zip(
            found.sequences[:, -NEW_TOKENS:],
            plain.sequences[:, -NEW_TOKENS:],
            torch.stack(found.logits, 1).float(),
            torch.stack(plain.logits, 1).float(),
            strict=True,
        )
        try:
            for row in rows:
                same_tokens.tokens_in_common(self.entry.name, *row)
        except RuntimeError:
            return False
        return True

    # On a GPU.

    def timed(
        self,
        serving: Callable[[], contextlib.AbstractContextManager[ServedModel]],
        turn: Turn,
        column: str,
    ) -> Figures:
        """Measure eager, served and the kernels alone, in the precision that its users have.

        What the column says of the graphs holds for every call that is timed, or there is no time.
        """
        reason = ""
        for dtype in (torch.bfloat16, torch.float32):
            try:
                self.model = None  # before the next one takes its memory
                torch.cuda.empty_cache()
                self.model = self._build(dtype)
                calls = [self._call(lengths, 3, dtype) for lengths in RAGGED]
                self._run(caller(self.entry, self.model), calls[0])
            except Exception as error:  # not every model takes bfloat16
                reason = f"{type(error).__name__}: {error}"
                continue
            generates = self.entry.integration == GENERATION
            timed = token_times if generates else call_times
            args, kwargs = calls[1 if generates else 2]  # one row, or as many as the largest graph has
            try:
                with serving() as served:
                    for call in calls:  # of several batch sizes, which tell what follows them
                        self._run(served.call, call)
                    replays = self._replays(served, column)
                    call = Served(served.call, replays)
                    found = timed(call, self._unserved(served), args, kwargs, self.device, turn)
                    found["timed"] = replays.figures()
                    if served.encoder is not None:  # below Python that takes longer than it
                        inner, forward = inner_call(served, args, kwargs), served.encoder.forward
                        with torch.inference_mode():  # as its library does
                            times = call_times(forward, _without_graphs(forward), *inner, self.device, turn)
                        found["encoder"] = times
                    tokens = self._run(served.call, calls[1]) if generates and not served.parts else None
            except Exception as error:  # the row has its answers all the same
                return {
                    "untimed": f"{type(error).__name__}: {error}"[:TOLD],
                    "traceback": traceback.format_exc()[-2000:],
                }
            if tokens is not None and replays.replays and not within_kernels(found):
                found = self._in_launches(calls, tokens, turn, found)
            return {"dtype": str(dtype).removeprefix("torch.")} | found
        return {"untimed": reason[:TOLD]}

    def _in_launches(self, calls: list[Call], tokens: Tensor, turn: Turn, one_token: Figures) -> Figures:
        """Time graphs that make several tokens each, where the host takes longer for one than its graph does.

        Args:
            calls: of several batch sizes; the second one is timed.
            tokens: of that call.
            turn: entered while times are measured.
            one_token: figures with a graph for each token, kept beside these; returned where launches do not serve.
        """
        try:
            with self.served_whole(tokens_per_launch=TOKENS_PER_LAUNCH) as served:
                for call in (*calls, calls[1]):
                    found = self._run(served.call, call)
                args, kwargs = calls[1]
                if not torch.equal(found, tokens) or any(stats.slower for stats in served.stats):
                    return one_token | {"launches": f"not served: {served.report()}"[:REPORTED]}
                call = Served(served.call, self._replays(served, FULL))
                plain = self._unserved(served)
                launched = token_times(call, plain, args, kwargs, self.device, turn, TOKENS_PER_LAUNCH)
        except Exception as error:
            return one_token | {"launches": f"{type(error).__name__}: {error}"[:TOLD]}
        kept = {name: one_token[name] for name in launched}
        return one_token | launched | {"tokens_per_launch": TOKENS_PER_LAUNCH, "one_token": kept}

    def _replays(self, served: ServedModel, column: str) -> Replays:
        expected = frozenset(Reason) if column == PARTS else frozenset()
        return Replays(*([] if column == EAGER else [served.by]), name=self.entry.name, expected=expected)

    def _unserved(self, served: ServedModel) -> Callable[..., Any]:
        """Return what calls the model without graphs while it is served."""
        if self.entry.integration == WRAP and not served.parts:
            return caller(self.entry, self.model)  # the module itself is unchanged
        return _without_graphs(served.call)


def _without_graphs(call: Callable[..., Any]) -> Callable[..., Any]:
    def eagerly(*args: Any, **kwargs: Any) -> Any:
        with eager():
            return call(*args, **kwargs)

    return eagerly


def _column(served: ServedModel, last: Counts, steps: int) -> Figures:
    """Say how the last pass over the batches ran, and if not all of it by graphs, why not."""
    replays, eagerly = last.replays.total(), last.eager.total()
    share = replays / (replays + eagerly) if replays + eagerly else 0.0
    figures: Figures = {"replayed": round(share, 3), "replays": replays, "eager": {**last.eager}}
    if not eagerly and replays >= steps:
        return figures | {"column": PIECEWISE if last.replays["PIECEWISE"] else FULL}
    reason = max(last.eager, key=lambda each: (each not in SOON, last.eager[each]), default=None)
    if reason is None:
        return figures | {"column": EAGER, "reason": "uncounted", "detail": f"{replays} of {steps} steps were replayed"}
    detail = served.explained(reason)
    return figures | {"column": EAGER, "reason": str(reason), "detail": detail[:TOLD]}
