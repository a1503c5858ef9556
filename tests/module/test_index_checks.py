"""Indices that fit one batch alone: no run of the library's own reads out of range, which ends the use of a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.manager.replay_proof import ReplayProof
from simplegraph.program.index_checks import IndexChecks

ROWS, WIDTH = 8, 4
pytestmark = pytest.mark.usefixtures("grad_mode")


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def grad_mode(request: pytest.FixtureRequest) -> Any:
    """In inference mode torch dispatches operators whole that are made of others."""
    with request.param():
        yield


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Name the operators that came to a kernel with such an index, where a CPU's raises."""
    found: list[str] = []
    leave = IndexChecks.leave

    def seen(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return leave(self, func, args, kwargs)
        except Exception:
            found.append(str(func))
            raise

    monkeypatch.setattr(IndexChecks, "leave", seen)
    return found


@pytest.fixture
def failed_replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the errors of replays in proofs, of which some would end the use of a GPU."""
    failed: list[str] = []
    replay = ReplayProof.replay

    def watched(self: Any, *args: Any) -> Any:
        try:
            return replay(self, *args)
        except Exception as error:
            failed.append(str(error))
            raise

    monkeypatch.setattr(ReplayProof, "replay", watched)
    return failed


def by_columns(index: Tensor) -> Tensor:
    return index.unsqueeze(1).expand(-1, WIDTH)


# What a forward does with rows, and the rows that an index of the module names.
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x[index]": lambda x, index: x[index],
    "x[index - size]": lambda x, index: x[index - ROWS],
    "x[:, index] of its transpose": lambda x, index: x.T[:, index].T,
    "x[index, columns]": lambda x, index: x[index.unsqueeze(1), torch.arange(WIDTH, device=x.device)],
    "index_select": lambda x, index: x.index_select(0, index),
    "gather": lambda x, index: x.gather(0, by_columns(index)),
    "take": lambda x, index: x.take(index * WIDTH),
    "embedding": lambda x, index: F.embedding(index, x),
    "embedding_bag": lambda x, index: F.embedding_bag(index.unsqueeze(1), x, mode="sum"),
    "index_add": lambda x, index: x.new_zeros(x.shape).index_add(0, index, torch.ones(ROWS, WIDTH, device=x.device)),
    "index_copy": lambda x, index: x.index_copy(0, index, torch.ones(ROWS, WIDTH, device=x.device)),
    "index_fill": lambda x, index: x.index_fill(0, index, 1.0),
    "index_put": lambda x, index: x.index_put((index,), torch.ones((), device=x.device)),
    "x[index] = 1": lambda x, index: assigned(x + 1, index),
    "scatter": lambda x, index: x.scatter(0, by_columns(index), 1.0),
    "scatter_add": lambda x, index: x.scatter_add(0, by_columns(index), torch.ones(ROWS, WIDTH, device=x.device)),
    "scatter_reduce": lambda x, index: x.scatter_reduce(
        0, by_columns(index), torch.ones(ROWS, WIDTH, device=x.device), "sum"
    ),
    "cross_entropy": lambda x, index: F.cross_entropy((x @ x.T)[:1].expand(ROWS, -1), index, reduction="none"),
}


def assigned(x: Tensor, index: Tensor) -> Tensor:
    x[index] = 1
    return x


class Reads(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], index: Tensor) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x * 2, self.index)


@pytest.mark.parametrize("read", READS)
def test_captures_up_front_read_no_row_that_a_smaller_batch_lacks(
    read: str, reached: list[str], device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    module = Reads(READS[read], torch.arange(ROWS, device=device).flip(0)).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[1, 2, 4, ROWS], progress=False)
    with caplog.at_level(logging.DEBUG, logger="simplegraph"):
        assert model.capture_graphs(torch.randn(ROWS, WIDTH, device=device)).captured
    assert "is passed the index" in caplog.text
    assert reached == []
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays >= 2


def test_an_argument_that_names_rows_is_read_in_range(
    reached: list[str], device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """As the edges of a graph, or an order that rows are brought into."""
    model: Any = sg.wrap(lambda x, order: x[order] * 2, capture_sizes=[4, ROWS], progress=False)
    x, order = torch.randn(ROWS, WIDTH, device=device), torch.arange(ROWS, device=device).flip(0)
    with caplog.at_level(logging.DEBUG, logger="simplegraph"):
        model.capture_graphs(x, order)
    assert "aten.index.Tensor is passed the index" in caplog.text
    assert reached == []
    for _ in range(3):
        torch.testing.assert_close(model(x, order), x[order] * 2)


def test_a_size_that_failed_is_tried_again_in_range(reached: list[str], device: torch.device) -> None:
    """Its second try runs it eagerly."""
    index = torch.arange(ROWS, device=device)

    def read(x: Tensor) -> Tensor:
        return x[index] * (x.sum().item() if len(x) == 2 else 1)

    model: Any = sg.wrap(read, capture_sizes=[2, ROWS], progress=False)
    summary = model.capture_graphs(torch.randn(ROWS, WIDTH, device=device))
    assert summary.captured == 1
    assert reached == []


def test_half_of_a_padded_batch_is_compared_in_range(reached: list[str], device: torch.device) -> None:
    index = torch.arange(5, device=device)
    model: Any = sg.wrap(lambda x: x.index_fill(0, index, 1.0), capture_sizes=[ROWS], progress=False)
    for rows in (ROWS, 7, 6, 7, 5, 5, 6):
        x = torch.randn(rows, WIDTH, device=device)
        torch.testing.assert_close(model(x), x.index_fill(0, index, 1.0))
    assert reached == []


def test_check_reads_in_range(reached: list[str], device: torch.device) -> None:
    module = Reads(READS["x[index]"], torch.arange(ROWS, device=device)).to(device).eval()
    report = str(sg.check(module, torch.randn(ROWS, WIDTH, device=device)))
    assert "it raises IndexError with 4 rows: " in report
    assert reached == []


IN_RANGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a negative index": lambda x, index: x[index - len(x)],
    "classes, some of them ignored": lambda x, index: F.cross_entropy(
        x, index.new_full((len(x),), -100), reduction="none"
    ),
    "no index at all": lambda x, index: x + x[index[:0]].sum(),
    "an empty bag": lambda x, index: x + F.embedding_bag(index[:0], x, index.new_zeros(1)).sum(),
}


@pytest.mark.parametrize("read", IN_RANGE)
def test_what_is_in_range_at_any_size_teaches_of_other_sizes(read: str, device: torch.device) -> None:
    module = Reads(IN_RANGE[read], torch.zeros(1, dtype=torch.int64, device=device)).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[2, 4, ROWS], padding=False, progress=False)
    model.capture_graphs(torch.randn(ROWS, WIDTH, device=device))
    for rows in (2, 4, ROWS) * 2:
        x = torch.randn(rows, WIDTH, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 6
    assert not model.graph_stats.eager


def test_a_mask_has_several_dimensions(device: torch.device) -> None:
    x = torch.arange(24.0, device=device).view(4, 3, 2)
    mask, columns = torch.ones(4, 3, dtype=torch.bool, device=device), torch.ones(12, dtype=torch.int64, device=device)
    with IndexChecks():
        assert torch.equal(x[mask, columns], x.view(12, 2)[:, 1])
        with pytest.raises(IndexError, match=r"is passed the index 2, and the dimension has size 2"):
            x[mask, columns + 1]
        with pytest.raises(IndexError, match=r"is passed the index -1, and the dimension has size 4"):
            x.index_select(0, columns - 2)


class Counted(nn.Module):
    """Looks rows up by positions that it counts, in a table of as many rows as the largest batch."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.look_up = look_up
        self.register_buffer("table", torch.arange(5.0 * WIDTH).view(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.look_up(self.table, torch.ones_like(x[:, 0]).cumsum(0).long() - 1)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, at: table[at],
        lambda table, at: F.embedding(at, table),
        lambda table, at: table.index_select(0, at),
        lambda table, at: table[torch.arange(len(at), device=at.device)],
    ],
)
def test_no_replay_reads_by_an_index_that_padding_rows_count_up(
    look_up: Callable[[Tensor, Tensor], Tensor], failed_replays: list[str], device: torch.device
) -> None:
    module = Counted(look_up).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4, 8], verify=1, progress=False)
    for rows in (4, 4, 3, 3, 5, 5, 5, 5, 4, 3):
        x = torch.randn(rows, WIDTH, device=device)
        assert torch.equal(model(x), module(x))
    assert not failed_replays
    assert model.graph_stats.replays
    assert model.graph_stats.eager[Reason.PADDING_SHOWS]
