"""What ranks that capture together promise: eager's answers, and on every rank the same graphs or the same error."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

import simplegraph as sg
from simplegraph.graph.select import graph_device
from tests.distributed.launch import GONE, Failed, run_ranks, values

WAIT = 1.5  # seconds that ranks wait for each other, where one never comes
BOUND = 15.0  # seconds within which every rank must have its error then
SIZES = [2, 4]
WIDTH, INNER = 16, 32


class InPlace(nn.Module):
    """A tensor parallel MLP: columns of the first weight, rows of the second, one all-reduce."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        whole = whole_mlp()
        part = slice(rank * INNER // size, (rank + 1) * INNER // size)
        self.up = nn.Parameter(whole[0].weight.data[part].clone(), requires_grad=False)
        self.down = nn.Parameter(whole[2].weight.data[:, part].clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.up.T) @ self.down.T
        dist.all_reduce(y)
        return y * 2


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


def whole_mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.ReLU(), nn.Linear(INNER, WIDTH, bias=False))


def dtensor_mlp(size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(whole_mlp(), init_device_mesh("cpu", (size,)), plan)


def batch(rows: int) -> Tensor:
    return torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH).sin()


def expected(rows: int) -> Tensor:
    with torch.no_grad():
        return whole_mlp()(batch(rows))


class Breaking(InPlace):
    """With an eager break behind the collective."""

    def forward(self, x: Tensor) -> Tensor:
        return halve(super().forward(x)) * 2


@sg.eager_break
def halve(x: Tensor) -> Tensor:
    return x / 2


KINDS = {"in place": InPlace, "functional": Functional, "gathering": Gathering, "breaking": Breaking}


def serve(rank: int, size: int, kind: str, capture: bool, mode: str = "FULL") -> tuple[list[Tensor], dict[str, Any]]:
    module = dtensor_mlp(size) if kind == "dtensor" else KINDS[kind](rank, size)
    model = sg.wrap(module.eval(), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=30), progress=False, mode=mode)
    with torch.inference_mode():
        if capture:
            model.capture_graphs(batch(3))
        found = [model(batch(rows)).clone() for rows in (1, 2, 3, 4, 4, 3, 2, 1)]
    return found, model.graph_report().to_dict()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["in place", "functional", "gathering", "dtensor"])
def test_a_tensor_parallel_model_replays_the_single_rank_answer_on_every_rank(kind: str, size: int) -> None:
    factor = 1 if kind == "dtensor" else 2
    for found, report in values(run_ranks(serve, size, kind, True)):
        for rows, y in zip((1, 2, 3, 4, 4, 3, 2, 1), found, strict=True):
            torch.testing.assert_close(y, expected(rows) * factor, rtol=1e-5, atol=1e-5)
        assert (report["captures"], report["replays"], report["eager"]) == (2, 8, {}), report


def test_collectives_are_in_the_segments_between_eager_breaks() -> None:
    for found, report in values(run_ranks(serve, 2, "breaking", True, "PIECEWISE")):
        for rows, y in zip((1, 2, 3, 4, 4, 3, 2, 1), found, strict=True):
            torch.testing.assert_close(y, expected(rows) * 2, rtol=1e-5, atol=1e-5)
        assert (report["captures"], report["replays"], report["eager"]) == (2, 8, {}), report


def test_sizes_are_captured_on_all_ranks_as_calls_come() -> None:
    for found, report in values(run_ranks(serve, 2, "in place", False)):
        torch.testing.assert_close(found[-1], expected(1) * 2, rtol=1e-5, atol=1e-5)
        assert report["captures"] == 2
        assert report["replays"] >= 4


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


class FailsOnOneRank(InPlace):
    """Cannot be captured on rank 1 at two rows, and says so before its collective."""

    def __init__(self, rank: int, size: int, error: type[Exception] = ValueError) -> None:
        super().__init__(rank, size)
        self.rank, self.error = rank, error

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 1 and len(x) == 2 and graph_device("cpu").is_capturing():
            raise self.error("no graph of two rows here")
        return super().forward(x)


def fail_on_one_rank(rank: int, size: int, capture: bool, on_failure: str) -> dict[str, Any]:
    ranks = sg.RankGroup(timeout=30)
    model = sg.wrap(
        FailsOnOneRank(rank, size).eval(),
        capture_sizes=SIZES,
        ranks=ranks,
        progress=False,
        on_capture_failure=on_failure,
    )
    error = None
    with torch.inference_mode():
        try:
            if capture:
                model.capture_graphs(batch(3))
            else:
                for _ in range(4):
                    model(batch(2))
        except sg.CaptureError as caught:
            error = str(caught)
        found = {rows: model(batch(rows)).clone() for rows in ((4, 2, 3, 1) if on_failure == "eager" else (4,))}
    return {"found": found, "error": error, "stats": model.graph_report().to_dict()}


@pytest.mark.parametrize("size", [2, 4])
def test_a_size_that_fails_on_one_rank_runs_eagerly_on_all_and_every_rank_says_why(size: int) -> None:
    for rank, told in enumerate(values(run_ranks(fail_on_one_rank, size, True, "eager"))):
        for rows, y in told["found"].items():
            torch.testing.assert_close(y, expected(rows) * 2, rtol=1e-5, atol=1e-5)
        stats = told["stats"]
        assert (stats["captures"], stats["replays"], stats["eager"]) == (1, 2, {"capture_failed": 2}), stats
        ((label, failure),) = stats["failures"].items()
        assert label == "batch size 2"
        assert "no graph of two rows here" in failure
        assert ("on rank 1" in failure) == (rank != 1)


@pytest.mark.parametrize("capture", [True, False])
def test_a_failed_capture_raises_on_every_rank_where_failures_raise(capture: bool) -> None:
    for told in values(run_ranks(fail_on_one_rank, 2, capture, "raise")):
        assert "no graph of two rows here" in told["error"]
        torch.testing.assert_close(told["found"][4], expected(4) * 2, rtol=1e-5, atol=1e-5)


def timed_error(call: Any) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def capture_with(rank: int, size: int, what: str) -> tuple[str, str, float]:
    fails = what in ("raises", "dies in a capture")
    module = FailsOnOneRank(rank, size, sg.InputError) if fails else InPlace(rank, size)
    ranks = sg.RankGroup(timeout=WAIT)
    settings: dict[str, Any] = {"capture_sizes": SIZES, "progress": rank == 0}
    late = rank == size - 1
    if what == "other settings" and late:
        settings["capture_sizes"] = [2, 8]
    if what == "dies" and late:
        os._exit(1)
    if what == "holds the store and dies" and rank == 0:
        time.sleep(WAIT / 2)  # until the others wait for it
        os._exit(1)
    if what == "dies in a capture" and late:
        module.error = end_process  # type: ignore[union-attr]
    if what == "is late" and late:
        time.sleep(2 * WAIT)
    model = sg.wrap(module.eval(), ranks=ranks, **settings)

    with torch.inference_mode():
        return timed_error(lambda: model.capture_graphs(batch(3)))


def end_process(*args: Any) -> Any:
    os._exit(1)


def test_ranks_with_other_settings_all_get_the_same_error_that_names_them() -> None:
    results = values(run_ranks(capture_with, 4, "other settings"))
    assert {(name, text) for name, text, _ in results} == {
        (
            "ConfigError",
            "ranks differ in capture_sizes: rank 0 has (2, 4), rank 3 has (2, 8). Graphs with collectives must be "
            "captured alike; give every rank the same settings.",
        )
    }
    assert max(seconds for *_, seconds in results) < BOUND


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_that_are_left_learn_within_a_bound_that_one_died(size: int) -> None:
    *left, dead = run_ranks(capture_with, size, "dies")
    assert isinstance(dead, Failed)
    assert dead.text == GONE
    for name, text, seconds in values(left):
        assert name == "RankError"
        assert f"rank {size - 1} did not come within 1.5 s" in text
        assert WAIT <= seconds < BOUND


def test_a_rank_that_dies_in_the_midst_of_a_capture_is_missed_where_they_meet_next() -> None:
    left, dead = run_ranks(capture_with, 2, "dies in a capture")
    assert dead.text == GONE
    name, text, seconds = left
    assert name == "RankError"
    assert "rank 1 did not come within 1.5 s, where rank 0 was at the result of capturing batch size 2" in text
    assert seconds < BOUND


def test_when_the_rank_that_holds_the_store_dies_the_others_say_so() -> None:
    dead, *left = run_ranks(capture_with, 3, "holds the store and dies")
    assert dead.text == GONE
    for name, text, seconds in values(left):
        assert name == "RankError"
        assert "lost the store of the process group" in text
        assert seconds < BOUND


def test_a_late_rank_gets_the_error_of_those_that_gave_up_on_it() -> None:
    for name, text, seconds in values(run_ranks(capture_with, 2, "is late")):
        assert name == "RankError"
        assert "rank 1 did not come within 1.5 s" in text
        assert seconds < BOUND


def test_what_one_rank_raises_ends_the_capture_on_all_at_once() -> None:
    first, last = values(run_ranks(capture_with, 2, "raises"))
    assert first[0] == "RankError"
    assert "rank 1 left with" in first[1]
    assert last[:2] == ("InputError", "no graph of two rows here")
    assert first[2] < WAIT


class Independent(nn.Module):
    """No collective in eager code, so that ranks with other batches get as far as the capture."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def call_with_other_sizes(rank: int, size: int) -> tuple[str, str, float]:
    ranks = sg.RankGroup(timeout=WAIT)
    model = sg.wrap(Independent().eval(), capture_sizes=SIZES, ranks=ranks, progress=False)

    def call() -> None:
        for _ in range(4):
            model(batch(2 + 2 * rank))

    with torch.inference_mode():
        return timed_error(call)


def test_ranks_that_capture_for_batches_of_other_sizes_are_all_told() -> None:
    for name, text, seconds in values(run_ranks(call_with_other_sizes, 2)):
        assert name == "RankError"
        assert "rank 0 batch size 2; rank 1 batch size 4" in text
        assert seconds < WAIT


def replay_with_other_sizes(rank: int, size: int, eager: bool) -> tuple[str, str, float]:
    ranks = sg.RankGroup(timeout=WAIT)
    model = sg.wrap(Independent().eval(), capture_sizes=SIZES, progress=False, debug=True)
    model.use_ranks(ranks)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        if eager and rank == 1:
            time.sleep(2 * WAIT)  # as in a collective that nobody answers
            return "nothing", "", 0.0
        return timed_error(lambda: model(batch(2 + 2 * rank)))


def test_with_debug_ranks_that_replay_other_sizes_are_all_told() -> None:
    for name, text, seconds in values(run_ranks(replay_with_other_sizes, 2, False)):
        assert name == "RankError"
        assert "rank 0 at a FULL replay of 2 tokens; rank 1 at a FULL replay of 4 tokens" in text
        assert seconds < WAIT


def test_with_debug_a_rank_that_replays_alone_is_told_who_is_missing() -> None:
    (name, text, seconds), _ = values(run_ranks(replay_with_other_sizes, 2, True))
    assert name == "RankError"
    assert "rank 1 did not come within 1.5 s, where rank 0 was at a FULL replay of 2 tokens" in text
    assert seconds < BOUND


class BreakThatDies(InPlace):
    """A collective on either side of a break in which the last rank's process ends, once it is told to."""

    dies = False

    def forward(self, x: Tensor) -> Tensor:
        y = end_if(super().forward(x), self)
        dist.all_reduce(y)
        return y


@sg.eager_break
def end_if(y: Tensor, module: BreakThatDies) -> Tensor:
    if module.dies:
        os._exit(1)
    return y * 1


def die_in_a_replay(rank: int, size: int, where: str) -> list[tuple[str, str, float]]:
    module = (BreakThatDies if where == "in" else InPlace)(rank, size)
    mode = "PIECEWISE" if where == "in" else "FULL"
    model = sg.wrap(module.eval(), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=WAIT), progress=False, mode=mode)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        if rank == size - 1:
            if where == "before":
                os._exit(1)
            module.dies = True
        found = [timed_error(lambda: model(batch(4))) for _ in range(2)]
        assert model.graph_stats.replays == 1  # what failed is not counted as one
    return [*found, timed_error(model.reset_graphs)]


@pytest.mark.parametrize(("where", "size"), [("before", 2), ("in", 2), ("in", 4)])
def test_a_rank_that_dies_before_or_in_a_replay_is_an_error_of_it_on_every_other(where: str, size: int) -> None:
    *left, dead = run_ranks(die_in_a_replay, size, where)
    assert dead.text == GONE
    for first, second, dropped in values(left):
        assert "nothing" not in (first[0], second[0])
        assert max(first[2], second[2]) < BOUND
        assert dropped[0] == "nothing"  # graphs can be given up without the rank that is gone


def destroy_everything(rank: int, size: int) -> list[tuple[str, str, float]]:
    model = sg.wrap(InPlace(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup(), progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        dist.destroy_process_group()
        calls = (lambda: model(batch(4)), lambda: model.capture_graphs(batch(3)), sg.RankGroup, model.reset_graphs)
        return [timed_error(call) for call in calls]


def test_when_all_groups_are_destroyed_under_live_graphs_every_rank_is_told_and_may_drop_them() -> None:
    for replay, capture, made, dropped in values(run_ranks(destroy_everything, 2)):
        assert {replay[0], capture[0]} == {"ReplayError"}
        assert made[0] == "ConfigError"
        assert dropped[0] == "nothing"


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
    job_capture.capture_bar = lambda count, show: (shown.append(show), bar(count, False))[1]
    with torch.inference_mode():
        sg.wrap(InPlace(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup()).capture_graphs(batch(3))
    return shown


def test_progress_is_shown_by_the_first_rank_alone() -> None:
    assert values(run_ranks(show_progress, 2)) == [[True], [False]]


def move_a_weight(rank: int, size: int, everywhere: bool) -> tuple[tuple[str, str, float], Tensor, dict[str, Any]]:
    module = Independent() if not everywhere else InPlace(rank, size)
    module.weight = nn.Parameter(torch.ones(1), requires_grad=False)
    ranks = sg.RankGroup(timeout=WAIT)
    model = sg.wrap(module.eval(), capture_sizes=SIZES, ranks=ranks, progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        if everywhere:
            module.down.data = module.down.data * 3
        elif rank == 1:
            module.weight.data = torch.ones(1)
        told = timed_error(lambda: [model(batch(4)) for _ in range(4)])
        found = model(batch(4)).clone() if everywhere else batch(4)
        return told, found, model.graph_report().to_dict()


def test_weights_moved_on_all_ranks_are_captured_anew_by_all() -> None:
    for told, y, stats in values(run_ranks(move_a_weight, 2, True)):
        assert told[0] == "nothing", told
        torch.testing.assert_close(y, expected(4) * 6, rtol=1e-5, atol=1e-5)
        assert stats["recaptures"] == 1


def test_a_weight_moved_on_one_rank_alone_is_an_error_there() -> None:
    first, second = values(run_ranks(move_a_weight, 2, False))
    assert first[0][0] == "nothing"
    assert second[0][0] == "RankError"
    assert "rank 0 did not come" in second[0][1]
    assert "dropping graphs" in second[0][1]
    assert second[0][2] < BOUND


def destroy_the_group(rank: int, size: int) -> list[tuple[str, str, float]]:
    group = dist.new_group(list(range(size)))
    model = sg.wrap(InPlace(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup(group), progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        dist.destroy_process_group(group)
        return [timed_error(lambda: model(batch(4))), timed_error(lambda: sg.RankGroup(group))]


def test_a_group_that_is_destroyed_under_live_graphs_is_named_on_every_rank() -> None:
    for replay, made in values(run_ranks(destroy_the_group, 2)):
        assert replay[0] == "ReplayError"
        assert "process group that the graphs' collectives belong to was destroyed" in replay[1]
        assert made[:2] == ("ConfigError", "the process group was destroyed; make a new one.")


class Forgetful(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.up.T) @ self.down.T
        self.work = dist.all_reduce(y, async_op=True)
        if not graph_device("cpu").is_capturing():
            self.work.wait()
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
