"""Mixed prefill-decode batches under piecewise graphs: compared with eager, then timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.arms.base import Setup
from bench.arms.correctness import STRIDE, Mismatch, allowed_error, eager_noise, relative_error
from bench.arms.static import padded_size
from bench.models.llama import Llama
from bench.piecewise.mixed_llama import MixedLlama, for_requests
from bench.piecewise.mixes import Mix, MixedBatch, mixed_batch, mixes
from bench.tools.measure import say
from bench.tools.replays import Replays, Served
from bench.tools.tables import in_line
from simplegraph import wrap

# Times some calls: milliseconds by name.
Clock = Callable[[dict[str, Callable[[], object]]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class MixedGraphs:
    """A mixed model, eager and wrapped with piecewise graphs of these sizes, in tokens."""

    eager: MixedLlama
    piecewise: Any
    sizes: list[int]
    replays: Replays


class MixedComparison(NamedTuple):
    """One mixed batch compared with eager; `error` is relative."""

    size: int
    error: float
    allowed: float
    equal: bool


def measure(setup: Setup, sizes: Sequence[int], clock: Clock) -> list[dict[str, Any]]:
    """Measure every mix of every size; all are compared with eager before the first is timed.

    Raises:
        Mismatch: a result differs from eager's by more than rounding.
        RuntimeError: a batch was not served by a graph with breaks.
    """
    todo = [mix for size in sizes for mix in mixes(size, setup.workload)]
    batches = [_batch(setup, mix, STRIDE * index) for index, mix in enumerate(todo, start=1)]
    graphed = capture(setup, sizes)
    noise = eager_noise(setup)
    graphed.replays.begin()
    compared = [compare(graphed, mix, batch, noise) for mix, batch in zip(todo, batches, strict=True)]
    graphed.replays.end(len(todo))  # batches that ran eagerly would be compared with themselves
    found = []
    for mix, batch, one in zip(todo, batches, compared, strict=True):
        ms = _timed(graphed, batch, clock)
        found.append(_described(mix) | one._asdict() | {"ms": ms})
        say(f"  {mix.name}, {one.size} tokens: {in_line(ms, '.2f', 'ms')}")
    return found


def _batch(setup: Setup, mix: Mix, start: int) -> MixedBatch:
    return mixed_batch(setup.workload, mix.chunks, setup.model.config.vocab_size, start=start)


def capture(setup: Setup, sizes: Sequence[int]) -> MixedGraphs:
    """Capture the model, with a graph for each size.

    Raises:
        RuntimeError: a graph does not break once in every layer.
    """
    eager, largest = MixedLlama(setup.model), mixes(max(sizes), setup.workload)[0]
    piecewise: Any = wrap(
        eager,
        mode="PIECEWISE",
        capture_sizes=sizes,
        capture="upfront",
        outputs="static",
        on_capture_failure="raise",
        verify=0,  # each batch is compared with eager here
        progress=False,
    )
    ids, positions, metadata = _batch(setup, largest, start=0)
    with for_requests(metadata):
        piecewise.capture_graphs(ids, positions)
    segments = {graph.segments for graph in piecewise.graph_stats.graphs.values()}
    if segments != {setup.segments}:
        raise RuntimeError(f"graphs of mixed batches have {segments} segments; expected {setup.segments} in each.")
    return MixedGraphs(eager, piecewise, sorted(sizes), Replays(piecewise, name="mixed batches"))


def compare(graphed: MixedGraphs, mix: Mix, batch: MixedBatch, noise: float) -> MixedComparison:
    """Compare one batch, run eagerly and from its graph.

    Raises:
        Mismatch: they differ by more than rounding.
    """
    ids, positions, metadata = batch
    with for_requests(metadata):
        expected = graphed.eager(ids, positions).clone()
        forget(graphed.eager.llama, metadata.slots)
        found = graphed.piecewise(ids, positions)
    size = padded_size(graphed.sizes, mix.num_tokens)
    allowed = allowed_error(expected.dtype, noise, exact=size == mix.num_tokens)
    error = relative_error(found, expected)
    if found.shape != expected.shape or not error <= allowed:  # also refuses NaN
        what = f"{mix.name} of {mix.num_tokens} tokens"
        raise Mismatch(f"{what} is off from eager by {error:.2e} relative; {allowed:.2e} is allowed.")
    return MixedComparison(size, error, allowed, torch.equal(found, expected))


def forget(model: Llama, slots: Tensor) -> None:
    """Zero the keys and values at these slots, so that a step that fails to write them is detected."""
    for name, cache in model.named_buffers():
        if name.endswith(("k_cache", "v_cache")):
            cache.view(-1, *cache.shape[2:]).index_fill_(0, slots, 0)


def _described(mix: Mix) -> dict[str, Any]:
    longest = max(chunk.query for chunk in mix.chunks)
    return {"mix": mix.name, "tokens": mix.num_tokens, "requests": len(mix.chunks), "max_query_len": longest}


def _timed(graphed: MixedGraphs, batch: MixedBatch, clock: Clock) -> dict[str, float]:
    ids, positions, metadata = batch
    with for_requests(metadata):
        return clock(
            {
                "eager": lambda: graphed.eager(ids, positions),
                "piecewise": Served(lambda: graphed.piecewise(ids, positions), graphed.replays),
            }
        )
