"""``python -m bench.serve.attention_steps``: attention of a decode step in one full graph and eagerly, per backend.

It has 32 layers of the 8B shape.

All layers share the same pages, since 32 copies would not fit at the longest contexts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.engine.config import BACKENDS
from bench.tools import command
from bench.tools.measure import Figures, host_microseconds, in_turn, say
from bench.tools.options import add_names, numbers
from bench.tools.replays import Replays, Served
from bench.tools.tables import grid
from simplegraph import BatchDescriptor, ConfigError, CudaGraphManager, CudaGraphMode, Dispatch
from simplegraph.attention import BatchMetadata, PagedKVCache, attend, attending


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The backends, batches and counts of a measurement.

    Args:
        backends: names in `BACKENDS`.
        batches: requests of a step; contexts: tokens in each one's cache.
        rounds: of graph and eager in turn; steps: calls that a round is the median of.
    """

    backends: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 3
    steps: int = 30


def default_plan(device: torch.device) -> AttentionPlan:
    """Return the 8B shape on a GPU; a tiny one on a CPU, whose timings do not measure performance."""
    if device.type == "cuda":
        return AttentionPlan(("fa3", "flashinfer", "triton"), (1, 8, 64, 256, 512), (200, 2000, 16000))
    tiny = AttentionPlan(
        ("sdpa",), (1, 4), (20,), layers=2, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    return dataclasses.replace(tiny, rounds=1, steps=3)


class SharedPages(PagedKVCache):
    """A cache of one layer that all layers share."""

    def keys(self, layer: int) -> Tensor:
        return super().keys(0)

    def values(self, layer: int) -> Tensor:
        return super().values(0)

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        super().write(0, k, v, slot_mapping)


class AttentionSteps:
    """A manager with the attention of a decode step captured for every batch of the plan."""

    def __init__(self, plan: AttentionPlan, name: str, context: int, device: torch.device) -> None:
        self.plan, self._context = plan, context
        most = max(plan.batches)
        self._blocks = -(-context // plan.page_size)
        cache = SharedPages(
            1,
            1 + most * self._blocks,
            plan.page_size,
            plan.num_kv_heads,
            plan.head_dim,
            dtype=plan.dtype,
            device=device,
        )
        cache.layers = range(plan.layers)
        self.metadata = BatchMetadata(
            max_num_tokens=most, max_num_reqs=most, max_model_len=context, page_size=plan.page_size, device=device
        )
        self.backend = BACKENDS[name](cache, self.metadata, num_heads=plan.num_heads)
        rows = {"dtype": plan.dtype, "device": device}
        self._q = torch.randn(most, plan.num_heads, plan.head_dim, **rows)
        self._k, self._v = (torch.randn(most, plan.num_kv_heads, plan.head_dim, **rows) for _ in "kv")
        cache.keys(0).normal_()
        cache.values(0).normal_()
        self.manager = CudaGraphManager(
            device=device,
            mode="FULL_DECODE_ONLY",
            support=self.backend.support,
            capture_sizes=plan.batches,
            max_num_seqs=most,
            on_capture_failure="raise",
            progress=False,
        )
        self.manager.add_hooks(self.backend)
        self.manager.capture(self.forward)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        rows = descriptor.num_tokens
        hidden = self._q[:rows]
        with attending(self.backend, mode, descriptor):
            for layer in range(self.plan.layers):
                out = attend(hidden, self._k[:rows], self._v[:rows], layer)
        return out

    def describe(self, count: int) -> None:
        """Set a step of `count` requests with full contexts."""
        table = 1 + torch.arange(count * self._blocks, dtype=torch.int32).view(count, self._blocks)
        self.metadata.set([1] * count, [self._context] * count, table)

    def calls(self, count: int) -> dict[str, Callable[[], object]]:
        """Return one step as a graph and eagerly; each prepares its own schedule.

        Raises:
            RuntimeError: their results differ.
        """
        self.describe(count)
        batch = self.manager.dispatch(count, count, 1)
        plain = self.manager.dispatch(count, count, 1, allow_full=False)
        found: dict[str, Callable[[], object]] = {
            "graph": Served(lambda: self.again(batch), Replays(self.manager, name=self.backend.name)),
            "eager": lambda: self.again(plain),
        }
        graph, eager = (call().clone() for call in found.values())  # type: ignore[attr-defined]
        if batch.mode is not CudaGraphMode.FULL or not torch.allclose(graph, eager, rtol=2e-2, atol=2e-3):
            raise RuntimeError(f"{self.backend.name}, batch {count}, context {self._context}: replay and eager differ.")
        return found

    def again(self, batch: Dispatch) -> Tensor:
        """Run the current step again."""
        self.metadata.repeat()
        found: Tensor = self.manager.run(batch, self.forward)
        return found

    def prepare(self, batch: Dispatch) -> None:
        """Prepare the current step again, as before a replay."""
        self.metadata.repeat()
        self.backend.before_replay(batch.mode, batch.descriptor)


@torch.inference_mode()
def measure(plan: AttentionPlan, device: torch.device) -> Figures:
    """Measure a step in ms by backend, context and batch; backends that are not installed are named."""
    rows, missing = [], {}
    for name, context in itertools.product(plan.backends, plan.contexts):
        if name in missing:
            continue
        say(f"attention: {name}, context {context}")
        try:
            steps = AttentionSteps(plan, name, context, device)
        except ConfigError as error:
            missing[name] = str(error)
            continue
        for count in plan.batches:
            rows.append({"backend": name, "context": context, "batch": count} | _row(steps, count, device))
            say(f"  batch {count}: graph {rows[-1]['graph_ms']:.3f} ms, eager {rows[-1]['eager_ms']:.3f} ms")
        steps.manager.reset()
    return {"layers": plan.layers, "rows": rows, "missing": missing}


def _row(steps: AttentionSteps, count: int, device: torch.device) -> Figures:
    calls = steps.calls(count)
    times = in_turn(calls, device, rounds=steps.plan.rounds, steps=steps.plan.steps)
    figures: Figures = {f"{name}_ms": ms for name, ms in times.items()}
    batch = steps.manager.dispatch(count, count, 1)
    figures["set_us"] = host_microseconds(lambda: steps.describe(count), device, calls=steps.plan.steps)
    figures["prepare_us"] = host_microseconds(lambda: steps.prepare(batch), device, calls=steps.plan.steps)
    return figures | {"graph_over_eager": figures["graph_ms"] / figures["eager_ms"]}


def render(figures: Figures) -> str:
    """Format the figures as a table."""
    columns = ("backend", "context", "batch", "graph_ms", "eager_ms", "graph_over_eager", "set_us", "prepare_us")
    units = {"context": "context tokens", "batch": "batch requests", "graph_over_eager": "graph / eager"}
    header = tuple(units.get(column, column.replace("_", " ")) for column in columns)
    lines = [header, *(tuple(_text(row[column]) for column in columns) for row in figures["rows"])]
    return "\n".join([grid(lines), *(f"{name}: {why}" for name, why in figures["missing"].items())])


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.attention_steps", description=__doc__)
    add_names(parser, "--backends", BACKENDS, "those with kernels of their own by default")
    parser.add_argument("--batches", type=numbers, help="requests of a step, such as 1,8")
    parser.add_argument("--contexts", type=numbers, help="tokens in each request's cache, such as 200,2000")
    command.run(parser, arguments, default_plan, measure, render)


if __name__ == "__main__":
    main()
