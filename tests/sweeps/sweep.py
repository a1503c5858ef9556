"""Every sample of an entry through a wrapped module and through eager, call by call."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from eager_twin import Raised, difference, outcome, same_objects, seeded, shared, value_difference
from quiet import quiet
from torch import nn

import simplegraph as sg
from simplegraph.base.config import CudaGraphConfig
from simplegraph.call.signature import CallReader
from tests.sweeps.entries import Entry, Sample, first_rows, fresh, spread

CALLS = 5  # the first call, the capture with its first replay, and replays with fresh values
MODES = ("no_grad", "inference_mode", "autocast", "inference_autocast")
_STEPS = (sg.Reason.FIRST_CALL, sg.Reason.WARMUP)  # on the way to a graph, not instead of it


@contextlib.contextmanager
def entered(mode: str, device: torch.device) -> Iterator[None]:
    """The mode of this name; autocast is to bfloat16."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode() if mode.startswith("inference") else torch.no_grad())
        if mode.endswith("autocast"):
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        yield


@dataclasses.dataclass
class Verdict:
    """Counts the outcomes of the samples of one entry.

    Attributes:
        replayed: samples whose later calls were replays; rounded: those of them that are eager's within rounding only.
        eager: samples without a replay, by the reasons of their calls.
        raised: samples that eager itself refuses, and the wrapped module likewise.
        unstable: samples for which eager differs from itself.
        defects: samples that differ from eager, by what differs.
        causes: why captures of samples were refused, by sample.
    """

    name: str
    replayed: int = 0
    rounded: int = 0
    raised: int = 0
    unstable: int = 0
    eager: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    defects: dict[str, str] = dataclasses.field(default_factory=dict)
    causes: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.replayed + self.raised + self.unstable + sum(self.eager.values()) + len(self.defects)

    @property
    def kind(self) -> str:
        """One word for the entry: the first of these that it has samples of."""
        ranks = {"defect": self.defects, "replayed": self.replayed, "eager": self.eager, "raised": self.raised}
        return next((kind for kind, found in (ranks | {"unstable": self.unstable}).items() if found), "no sample")


class Unstable(Exception):
    """Eager differs from itself, so nothing can be compared with it."""


def sweep(entry: Entry, mode: str, device: torch.device, most: int = 0) -> Verdict:
    """Try an entry's samples, at most `most` of them (0 for all)."""
    verdict = Verdict(entry.name)
    with quiet():
        for sample in spread(entry.samples(device, CALLS - 1), most):
            try:
                with entered(mode, device):
                    _Trial(sample, mode, device).run(verdict)
            except Unstable:
                verdict.unstable += 1
            except Exception as error:
                verdict.defects[sample.label] = f"{type(error).__name__}: {str(error)[:200]}"
    return verdict


class _Trial:
    """One sample's calls, of a module with graphs and of its eager twin."""

    def __init__(self, sample: Sample, mode: str, device: torch.device) -> None:
        self.sample, self.device = sample, device
        self.tolerance = torch.bfloat16 if mode.endswith("autocast") else None
        self.calls = [*sample.calls, sample.calls[0]]  # other values in between, then those of the first call
        self.eager = sample.make()
        self.model: Any = _wrapped(sample.make(), *self.calls[0])
        self.raised = 0
        self.rounded = False

    def run(self, verdict: Verdict) -> None:
        for turn, (args, kwargs) in enumerate(self.calls):
            found = self._call(args, kwargs, turn)
            if found is not None:
                verdict.defects[self.sample.label] = f"call {turn + 1}: {found}"
                return
        stats = self.model.graph_stats
        reasons = sorted(reason.value for reason in stats.eager if reason not in _STEPS)
        if stats.failures:
            verdict.causes[self.sample.label] = next(iter(stats.failures.values()))
        if stats.replays:
            verdict.replayed += 1
            verdict.rounded += self.rounded
        elif self.raised == len(self.calls):
            verdict.raised += 1
        elif reasons:
            verdict.eager[", ".join(reasons)] += 1
        else:
            verdict.defects[self.sample.label] = f"no replay and no reason: {dict(stats.eager)}"

    def _call(self, args: Any, kwargs: Any, turn: int) -> str | None:
        """Call both with the same, and find what differs."""
        given, twin = fresh((args, kwargs)), fresh((args, kwargs))
        with seeded(self.device, turn) as expected_draws:
            expected = outcome(lambda: self.eager(*twin[0], **twin[1]))
        replays = self.model.graph_stats.replays
        with seeded(self.device, turn) as draws:
            actual = outcome(lambda: self.model(*given[0], **given[1]))
        if isinstance(expected, Raised) or isinstance(actual, Raised):
            self.raised += 1
            return difference(actual, expected)
        replayed = self.model.graph_stats.replays > replays
        found = self._values(actual, expected, replayed, (args, kwargs), turn) or _differing(
            ("input", difference(given, twin, values=self.sample.values)),
            ("state", difference(dict(self.model.state_dict()), dict(self.eager.state_dict()))),
            ("memory is shared", _unequal(shared(actual, given), shared(expected, twin))),
            ("its inputs themselves are returned", _unequal(same_objects(actual, given), same_objects(expected, twin))),
            ("the random number drawn next", value_difference(draws[0], expected_draws[0])),
        )
        return found

    def _values(self, actual: Any, expected: Any, replayed: bool, call: Any, turn: int) -> str | None:
        """Say how results differ beyond rounding, which for a replay under autocast is that of its coarser dtype."""
        values = self.sample.values
        found = difference(actual, expected, values=values, rounding=False)
        if found is None:
            return None
        again = fresh(call)
        with seeded(self.device, turn):
            if difference(self.eager(*again[0], **again[1]), expected, values=values, rounding=False) is not None:
                raise Unstable
        self.rounded = True
        found = difference(actual, expected, values=values, coarsest=self.tolerance if replayed else None)
        return found and f"{'replay' if replayed else 'eager run'}: {found}"


def _differing(*found: tuple[str, str | None]) -> str | None:
    return next((f"{what} {text}" for what, text in found if text is not None), None)


def _unequal(actual: Any, expected: Any) -> str | None:
    return None if actual == expected else f"as {actual}, eager's as {expected}"


def _wrapped(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapped for calls of exactly this size; the batch dimension is declared, so that no guess is in the way."""
    flat, names, _ = CallReader(module.forward, CudaGraphConfig()).leaves(args, kwargs)
    pairs = [(name, leaf) for name, leaf in zip(names, flat, strict=True) if isinstance(leaf, torch.Tensor)]
    rowed = [name for name, leaf in pairs if not leaf.is_nested and leaf.dim() and leaf.shape[0]]
    batch_dims = {name: 0 if name in rowed[:1] else None for name in names}
    size = first_rows(args, kwargs)
    return sg.wrap(module, capture_sizes=[size], padding=False, progress=False, batch_dims=batch_dims)
