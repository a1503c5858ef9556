"""Ranks that capture together return eager's results, and have the same graphs on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

import simplegraph as sg
from simplegraph.device.select import graph_device
from tests.distributed.launch import run_ranks, values
from tests.distributed.models import SIZES, InPlace, batch, expected, timed_error, whole_mlp


class Functional(InPlace):
    """The same, returning the collective's own result: an AsyncCollectiveTensor."""

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(torch.relu(x @ self.up.T) @ (self.down.T * 2), "sum", dist.group.WORLD)


class Gathering(InPlace):
    """An all-gather of what each rank made, into a tensor that the forward allocates."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.whole_down = whole_mlp()[2].weight.data * 2

    def forward(self, x: Tensor) -> Tensor:
        part = torch.relu(x @ self.up.T)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=1) @ self.whole_down.T


def dtensor_mlp(size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(whole_mlp(), init_device_mesh("cpu", (size,)), plan)


class Breaking(InPlace):
    """With an eager break behind the collective."""

    def forward(self, x: Tensor) -> Tensor:
        return halve(super().forward(x)) * 2


@sg.eager_break
def halve(x: Tensor) -> Tensor:
    return x / 2


KINDS = {"in place": InPlace, "functional": Functional, "gathering": Gathering, "breaking": Breaking}


ROWS = (1, 2, 3, 4, 4, 3, 2, 1) * 2


def serve(rank: int, size: int, kind: str, capture: bool, mode: str = "FULL") -> tuple[list[Tensor], dict[str, Any]]:
    module = dtensor_mlp(size) if kind == "dtensor" else KINDS[kind](rank, size)
    model = sg.wrap(module.eval(), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=30), progress=False, mode=mode)
    with torch.inference_mode():
        if capture:
            model.capture_graphs(batch(3))
        found = [model(batch(rows)).clone() for rows in ROWS]
    return found, model.graph_report().to_dict()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["in place", "functional", "gathering", "dtensor"])
def test_a_tensor_parallel_model_replays_the_single_rank_answer_on_every_rank(kind: str, size: int) -> None:
    factor = 1 if kind == "dtensor" else 2
    for found, report in values(run_ranks(serve, size, kind, True)):
        for rows, y in zip(ROWS, found, strict=True):
            torch.testing.assert_close(y, expected(rows) * factor, rtol=1e-5, atol=1e-5)
        assert (report["captures"], report["replays"], report["eager"]) == (2, 14, {"proof": 2}), report


def test_collectives_are_in_the_segments_between_eager_breaks() -> None:
    for found, report in values(run_ranks(serve, 2, "breaking", True, "PIECEWISE")):
        for rows, y in zip(ROWS, found, strict=True):
            torch.testing.assert_close(y, expected(rows) * 2, rtol=1e-5, atol=1e-5)
        assert (report["captures"], report["replays"], report["eager"]) == (2, 14, {"proof": 2}), report


def test_sizes_are_captured_on_all_ranks_as_calls_come() -> None:
    for found, report in values(run_ranks(serve, 2, "in place", False)):
        torch.testing.assert_close(found[-1], expected(1) * 2, rtol=1e-5, atol=1e-5)
        assert report["captures"] == 2
        assert report["replays"] >= 4


def meetings(rank: int, size: int, sizes: list[int]) -> tuple[int, dict[str, float], float]:
    ranks = sg.RankGroup(timeout=30)
    model = sg.wrap(InPlace(rank, size).eval(), capture_sizes=sizes, ranks=ranks, progress=False)
    with torch.inference_mode():
        summary = model.capture_graphs(batch(3))
    assert summary.captured == len(sizes)
    return ranks._rendezvous._round, dict(summary.parts), summary.seconds


def test_ranks_meet_no_more_often_for_many_sizes_than_for_two() -> None:
    (few, _, _), (other, _, _) = values(run_ranks(meetings, 2, [2, 4]))
    (many, parts, seconds), _ = values(run_ranks(meetings, 2, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert few == other == many
    assert set(parts) == {"communicators", "meetings", "warmup", "capture", "instantiate"}
    assert 0 < sum(parts.values()) <= seconds


class ReducesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x + 1


def reduce_inputs(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    model = sg.wrap(ReducesItsInput().eval(), capture_sizes=[4], ranks=sg.RankGroup(timeout=30), progress=False)
    found = []
    with torch.inference_mode():
        for step in range(5):
            x = torch.full((4, 2), float(step + rank))
            found.append((model(x).clone(), x))
    assert model.graph_stats.replays >= 2
    return found


def test_an_input_that_a_collective_writes_is_written_in_the_callers_tensor() -> None:
    for found in values(run_ranks(reduce_inputs, 2)):
        for step, (y, x) in enumerate(found):
            assert torch.equal(x, torch.full((4, 2), 2.0 * step + 1))
            assert torch.equal(y, x + 1)


def move_a_dtensor(rank: int, size: int) -> tuple[Tensor, int]:
    module = dtensor_mlp(size).eval()
    model = sg.wrap(module, capture_sizes=SIZES, ranks=sg.RankGroup(timeout=30), progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        local = module[2].weight._local_tensor
        local.data = local.data * 3
        return [model(batch(4)).clone() for _ in range(4)][-1], model.graph_stats.recaptures


def test_the_weights_of_a_dtensor_that_move_are_captured_anew() -> None:
    for y, recaptures in values(run_ranks(move_a_dtensor, 2)):
        torch.testing.assert_close(y, expected(4) * 3, rtol=1e-5, atol=1e-5)
        assert recaptures == 1


def return_a_dtensor(rank: int, size: int) -> tuple[Tensor, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    module = nn.Sequential(whole_mlp()[0])
    parallelize_module(module, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(use_local_output=False)})
    model = sg.wrap(module.eval(), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=30), progress=False)
    with torch.inference_mode():
        found = [model(batch(4)).full_tensor() for _ in range(4)][-1]
    return found, model.graph_report().to_dict()["eager"]


def test_a_model_that_returns_a_dtensor_runs_eagerly_and_says_so() -> None:
    for y, eager in values(run_ranks(return_a_dtensor, 2)):
        torch.testing.assert_close(y, batch(4) @ whole_mlp()[0].weight.T)
        assert eager == {"first_call": 1, "unsupported_output": 3}


def check_models(rank: int, size: int) -> list[tuple[bool, bool | None, bool]]:
    found = []
    for module in (dtensor_mlp(size).requires_grad_(False), Functional(rank, size), Forgetful(rank, size)):
        report = sg.check(module.eval(), batch(3))
        found.append((report.capturable, report.rows_independent, sg.check(module, batch(3)).capturable))
    return found


def test_check_and_try_full_know_collectives_and_dtensors() -> None:
    assert values(run_ranks(check_models, 2)) == [[(True, True, True), (True, True, True), (False, True, False)]] * 2


def show_progress(rank: int, size: int) -> list[bool]:
    from simplegraph.manager import capture as job_capture

    shown = []
    bar = job_capture.capture_bar
    job_capture.capture_bar = lambda count, device, show: (shown.append(show), bar(count, device, show=False))[1]
    with torch.inference_mode():
        sg.wrap(InPlace(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup()).capture_graphs(batch(3))
    return shown


def test_progress_is_shown_by_the_first_rank_alone() -> None:
    assert values(run_ranks(show_progress, 2)) == [[True], [False]]


class Forgetful(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.up.T) @ self.down.T
        work = dist.all_reduce(y, async_op=True)
        if not graph_device("cpu").is_capturing():
            work.wait()
        return y * 2


def leave_a_collective_on_its_stream(rank: int, size: int) -> tuple[list[str], Tensor]:
    model = sg.wrap(Forgetful(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup(), progress=False)
    with torch.inference_mode():
        summary = model.capture_graphs(batch(3))
        return [str(error) for error in summary.failed.values()], model(batch(4))


def test_a_collective_that_is_not_joined_to_the_forwards_stream_fails_the_capture_on_every_rank() -> None:
    for errors, y in values(run_ranks(leave_a_collective_on_its_stream, 2)):
        assert len(errors) == 2
        assert all("not joined: nobody waited for c10d::allreduce_" in error for error in errors)
        torch.testing.assert_close(y, expected(4) * 2, rtol=1e-5, atol=1e-5)


def test_without_a_process_group_ranks_say_what_to_call() -> None:
    for make in (sg.RankGroup, sg.ShapeConsensus):
        with pytest.raises(sg.ConfigError, match=r"call torch\.distributed\.init_process_group"):
            make()


def bad_groups(rank: int, size: int) -> list[tuple[str, str, float]]:
    group = dist.new_group([0])
    cpu_only = sg.RankGroup()
    return [
        timed_error(lambda: sg.RankGroup(group)),
        timed_error(lambda: sg.RankGroup("tp")),
        timed_error(lambda: sg.RankGroup(timeout=0)),
        timed_error(lambda: cpu_only._check_backends("cuda")),
    ]


def test_groups_that_cannot_be_used_are_refused_in_words() -> None:
    for rank, (foreign, text, timeout, backend) in enumerate(values(run_ranks(bad_groups, 2))):
        assert foreign[0] == ("nothing" if rank == 0 else "ConfigError")
        assert "a process group that this rank is in" in text[1]
        assert "expected seconds, above 0" in timeout[1]
        assert "make it with nccl" in backend[1]
