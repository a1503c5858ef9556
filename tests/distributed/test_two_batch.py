"""Two-batch overlap on ranks: the answers of undivided steps; ranks that disagree get one error and nobody hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import simplegraph as sg
from bench.models.shard import finish
from simplegraph import BatchDescriptor, CudaGraphMode
from simplegraph.attention import (
    BatchMetadata,
    PagedKVCache,
    SDPABackend,
    TwoBatchOverlap,
    attend,
    attending,
    two_batch,
)
from tests.distributed.launch import run_ranks, values
from tests.distributed.models import BOUND, WAIT, timed_error

HEADS, SIZE, LAYERS, ROWS = 4, 8, 2, 8
WIDTH = HEADS * SIZE
FULL = CudaGraphMode.FULL

ALL = (2, 4, 8)  # sizes that are split


class Ranked:
    """Layers of attention, heads split over ranks, each summed by a collective that the other half computes under."""

    def __init__(
        self,
        rank: int,
        size: int,
        sizes: tuple[int, ...] | None,
        *,
        device: str = "cpu",
        rows: int = ROWS,
        **settings: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(LAYERS, 4, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.weights = weights.unflatten(3, (size, -1))[:, :, :, rank].to(device)
        self.hidden = torch.zeros(rows, WIDTH, device=device)
        heads = HEADS // size
        self.cache = PagedKVCache(LAYERS, 32, 4, heads, SIZE, dtype=torch.float32, device=device)
        limits: Any = {"max_num_tokens": rows, "max_num_reqs": rows, "max_model_len": 24, "page_size": 4}
        made = [SDPABackend(self.cache, BatchMetadata(**limits, device=device), num_heads=heads) for _ in range(3)]
        self.whole = made[0]
        self.launched: list[tuple[int, int]] = []  # first row and layer
        ranks = sg.RankGroup(timeout=WAIT if device == "cpu" else 60) if size > 1 else None
        self.manager = sg.CudaGraphManager(device=device, max_num_seqs=rows, progress=False, ranks=ranks, **settings)
        self.overlap = TwoBatchOverlap(self.manager, made[0], made[1:], sizes=sizes) if sizes else None
        if self.overlap is None:
            self.manager.add_hooks(self.whole)

    def launch(self, part: Tensor) -> Any:
        """Begin to sum a part over ranks, in place; return what to wait for, if anything."""
        return dist.all_reduce(part, async_op=True) if dist.is_initialized() else None

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        if self.overlap and self.overlap.split(mode, descriptor):
            return torch.cat(self.overlap.run(mode, descriptor, self.stages))
        with attending(self.whole, mode, descriptor):
            return finish(self.stages(slice(0, descriptor.num_tokens)))

    def stages(self, rows: slice) -> two_batch.Stages:
        hidden = self.hidden[rows]
        for layer, weights in enumerate(self.weights):
            q, k, v = ((hidden @ weight).unflatten(1, (-1, SIZE)) for weight in weights[:3])
            part = attend(q, k, v, layer).flatten(1) @ weights[3].T
            work = self.launch(part)
            self.launched.append((rows.start, layer))
            yield
            if work is not None:
                work.wait()
            hidden = torch.tanh(hidden + part)
        return hidden

    def steps(self) -> list[Tensor]:
        """Run prompts, then decode steps, of five requests, of which one is gone after two steps."""
        found, lengths, left = [], [0] * 5, list(range(5))
        for step, queries in enumerate([[1, 4, 2, 1, 1][:3], [1, 1], [1, 1, 1, 3, 2], [1] * 5, [1] * 4, [1] * 4]):
            if step == 4:
                left.remove(1)
            requests = [left[index] if step != 1 else index + 3 for index in range(len(queries))]
            if step == 2:
                lengths[3:] = [0, 0]  # they begin again
            for request, query in zip(requests, queries, strict=True):
                lengths[request] += query
            tables = [[1 + 6 * request + page for page in range(6)] for request in requests]
            seq_lens, total = [lengths[request] for request in requests], sum(queries)
            batch = self.manager.dispatch(total, len(queries))
            self.hidden.copy_(torch.randn(self.hidden.shape, generator=torch.Generator().manual_seed(step)))
            if self.overlap:
                self.overlap.set(batch, queries, seq_lens, [tables])
            else:
                shape = batch.descriptor.num_tokens, batch.descriptor.num_reqs
                shape = shape if batch.mode is FULL else (total, len(queries))
                self.whole.metadata.set(queries, seq_lens, tables, num_tokens=shape[0], num_reqs=shape[1])
            for program in self.manager.programs.values():  # a replay must write all that is read
                program.outputs[0].fill_(torch.nan)
            found.append(self.manager.run(batch, self.forward)[:total].clone())
        return found


def serve(
    rank: int, size: int, sizes: tuple[int, ...] | None, device: str = "cpu"
) -> tuple[list[Tensor], list[tuple[int, int]], dict[str, Any], Any]:
    if device == "cuda":
        torch.cuda.set_device(rank)
    with torch.inference_mode():
        served = Ranked(rank, size, sizes, device=device, mode="FULL", capture_sizes=[2, 4, 8])
        assert served.manager.capture(served.forward).failed == {}
        served.launched.clear()
        found = served.steps()
        chosen = served.overlap and sorted(served.overlap.chosen or ())
        stats = served.manager.report().to_dict()
        served.manager.reset()  # before the process group goes
        return [each.cpu() for each in found], served.launched, stats, chosen


@pytest.mark.parametrize("sizes", [ALL, (4,)])
def test_ranks_answer_as_one_rank_that_splits_nothing(sizes: tuple[int, ...]) -> None:
    expected, *_ = serve(0, 1, None)
    results = values(run_ranks(serve, 2, sizes))
    for found, launched, stats, chosen in results:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert (stats["replays"], launched) == (6, [])
        assert chosen == results[0][3]
        assert tuple(each.num_tokens for each in chosen) == sizes


def order_of_collectives(rank: int, size: int) -> list[tuple[int, int]]:
    with torch.inference_mode():
        served = Ranked(rank, size, (8,), mode="FULL", capture_sizes=[8])
        served.manager.capture(served.forward)
        return served.launched


def test_all_ranks_launch_the_halves_collectives_in_turn() -> None:
    for launched in values(run_ranks(order_of_collectives, 2)):
        assert launched == [(0, 0), (4, 0), (0, 1), (4, 1)] * 2  # of the warmup, and of the capture


def capture_with_other_overlap(rank: int, size: int, settings: list[tuple[int, ...] | None]) -> tuple[str, str, float]:
    with torch.inference_mode():
        served = Ranked(rank, size, settings[rank], mode="FULL", capture_sizes=[2, 4])
        return timed_error(lambda: served.manager.capture(served.forward))


@pytest.mark.parametrize("settings", [[(2, 4), None], [None, (4,)], [(2, 4), (4,)]])
def test_ranks_that_disagree_about_overlap_all_get_one_error_before_a_capture(
    settings: list[tuple[int, ...] | None],
) -> None:
    results = values(run_ranks(capture_with_other_overlap, 2, settings))
    (first, *_), *_ = results
    assert first == "ConfigError"
    said = ["; ".join(str(BatchDescriptor(size, size)) for size in sizes or ()) or "none" for sizes in settings]
    assert {text for _, text, _ in results} == {
        f"ranks differ in two_batch_overlap: rank 0 has {said[0]}, rank 1 has {said[1]}. Graphs with "
        "collectives must be captured alike; give every rank the same settings."
    }
    assert max(seconds for *_, seconds in results) < BOUND


def fail_in_a_half(rank: int, size: int) -> tuple[dict[str, Any], list[Tensor]]:
    with torch.inference_mode():
        served = Ranked(rank, size, (4, 8), mode="FULL", capture_sizes=[4, 8])
        stages = served.stages

        def failing(rows: slice) -> two_batch.Stages:
            if rank == 1 and rows == slice(2, 4) and served.manager.device.is_capturing():
                raise ValueError("no half of two rows here")
            return stages(rows)

        served.stages = failing  # type: ignore[method-assign]
        failed = served.manager.capture(served.forward).failed
        return {label: str(error) for label, error in failed.items()}, served.steps()


def test_a_half_that_fails_on_one_rank_drops_the_graph_on_all_and_steps_go_on() -> None:
    expected, *_ = serve(0, 1, None)
    for failed, found in values(run_ranks(fail_in_a_half, 2)):
        assert list(failed) == ["batch size 4"]
        assert "no half of two rows here" in failed["batch size 4"]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
