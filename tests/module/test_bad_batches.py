"""Bad input gives eager's answer or eager's error, and the next good call is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from troubled import SIZES, WIDTH, Net, replayed, right, rows, warm, wrapped

import simplegraph as sg
from simplegraph import ConfigError, InputError, Reason

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def settled(device: torch.device, **settings: Any) -> Any:
    model = wrapped(device, **settings)
    model.capture_graphs(rows(3, device))
    return model


def test_a_batch_above_every_size_runs_eagerly(device: torch.device) -> None:
    model = settled(device)
    for size in (9, 100):
        right(model, rows(size, device))
    assert model.graph_stats.eager == {Reason.BATCH_TOO_LARGE: 2}
    replayed(model, device)


@dataclasses.dataclass
class Batch:
    """Holds what a module is passed."""

    x: Tensor


class OfBatch(Net):
    """Is passed a dataclass."""

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().forward(batch.x)


def test_a_batch_above_every_size_in_a_container_keeps_no_other_from_graphs(device: torch.device) -> None:
    module = OfBatch().to(device).eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    with torch.inference_mode():
        for size in (9, 2) * 4:
            x = rows(size, device)
            torch.testing.assert_close(model(Batch(x)), module(Batch(x)))
    assert model.graph_stats.replays >= 2


@pytest.mark.parametrize(
    ("before", "said", "after"),
    [
        ({"capture_sizes": [2, 4]}, "add 9 to capture_sizes", {"capture_sizes": [2, 4, 9]}),
        ({"capture_sizes": [2, 4], "padding": False}, "add 9 to capture_sizes", {"capture_sizes": [2, 4, 9]}),
    ],
)
def test_a_batch_above_every_size_is_told_a_setting_that_serves_it(
    device: torch.device, caplog: pytest.LogCaptureFixture, before: Any, said: str, after: Any
) -> None:
    model = wrapped(device, **before)
    right(model, rows(9, device))
    assert f"{said})." in caplog.text
    assert f"{said})" in str(model.graph_report()), "the report says it, too"
    model.configure_graphs(**after)
    for _ in range(3):
        right(model, rows(9, device))
    assert model.graph_stats.replays == 2


@pytest.mark.parametrize("first", [True, False])
def test_an_empty_batch_is_eagers(device: torch.device, first: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped(device) if first else settled(device)
    assert model(rows(0, device)).shape == (0, WIDTH)
    assert "empty_batch" not in caplog.text, "no graph could serve it faster"
    assert model.graph_stats.eager == {Reason.EMPTY_BATCH: 1}
    warm(model, device)
    replayed(model, device)


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_arguments_that_disagree_on_the_batch_are_eagers_answer_or_eagers_error(device: torch.device) -> None:
    model = sg.wrap(Two().eval(), capture_sizes=SIZES, progress=False)
    for size in (3, 4, 3, 4, 3):
        x, y = rows(size, device), rows(size, device)
        assert torch.equal(model(x, y), x + y)
    replays = model.graph_stats.replays
    assert replays >= 1
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(rows(3, device), rows(2, device))
    x, y = rows(3, device), rows(1, device)  # eager broadcasts
    for _ in range(3):
        assert torch.equal(model(x, y), x + y)
    assert model.graph_stats.replays == replays
    assert model.graph_stats.eager[Reason.BATCH_MISMATCH] == 4
    for size in (3, 4):
        x, y = rows(size, device), rows(size, device)
        assert torch.equal(model(x, y), x + y)
    assert model.graph_stats.replays == replays + 2


def test_a_changed_dtype_has_a_graph_of_its_own(device: torch.device) -> None:
    model = sg.wrap(Two().eval(), capture_sizes=SIZES, progress=False)
    for _ in range(4):
        for dtype in (torch.float32, torch.float64, torch.int64):
            for size in (3, 4):
                x, y = (rows(size, device) * 9).to(dtype), (rows(size, device) * 9).to(dtype)
                actual = model(x, y)
                assert actual.dtype == dtype
                assert torch.equal(actual, x + y)
    assert model.graph_stats.captures == 3


def test_a_dtype_that_the_weights_refuse_is_eagers_error(device: torch.device) -> None:
    model = settled(device)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="dtype"):
            model(rows(3, device).double())
    replayed(model, device)


def test_a_changed_rank_or_trailing_shape_is_eagers_answer_or_error(device: torch.device) -> None:
    model = settled(device)
    for shape in ((3, 2, WIDTH), (4, 5, WIDTH)):
        for _ in range(4):
            x = torch.randn(shape, device=device)
            torch.testing.assert_close(model(x), model.linear(x) * 2)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(3, WIDTH + 1, device=device))
    x = torch.randn(WIDTH, device=device)
    torch.testing.assert_close(model(x), model.linear(x) * 2)
    with pytest.raises(RuntimeError):
        model(torch.tensor(1.0, device=device))
    replayed(model, device)


def test_a_call_with_arguments_missing_or_too_many_is_eagers_error(device: torch.device) -> None:
    model = settled(device)
    x = rows(3, device)
    for args, kwargs in [((), {}), ((x, x), {}), ((x,), {"scale": 2}), ((None,), {}), (("text",), {})]:
        with pytest.raises((TypeError, RuntimeError, AttributeError)):
            model(*args, **kwargs)
    replayed(model, device)


def test_a_meta_tensor_is_eagers_error(device: torch.device) -> None:
    model = settled(device)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(torch.empty(3, WIDTH, device="meta"))
    replayed(model, device)


@pytest.mark.parametrize(
    "sizes", [[], [0], [-1, 2], [1.5], ["2"], "12", 4, [True], [None]], ids=lambda sizes: repr(sizes)
)
def test_invalid_capture_sizes_are_refused_before_anything_runs(device: torch.device, sizes: Any) -> None:
    module = Net().to(device).eval()
    with pytest.raises(ConfigError, match="capture_sizes"):
        sg.wrap(module, capture_sizes=sizes)


def test_capture_sizes_above_the_token_limit_are_refused_and_odd_ones_put_in_order(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="max_num_tokens"):
        wrapped(device, capture_sizes=[1, 64], max_num_tokens=32)
    model = wrapped(device, capture_sizes=[8, 2, 8, 4, 2])
    assert model.capture_graphs(rows(3, device)).captured == 3
    replayed(model, device)


def test_capture_graphs_with_inputs_it_cannot_use_says_why_and_breaks_nothing(device: torch.device) -> None:
    model = wrapped(device)
    for args, words in [
        ((rows(0, device),), "no rows"),
        ((), "pass a tensor"),
        ((torch.tensor(1.0, device=device),), "batch"),
    ]:
        with pytest.raises(InputError, match=words):
            model.capture_graphs(*args)
    with pytest.raises(InputError, match="eval"):
        model.train().capture_graphs(rows(3, device))
    assert model.eval().capture_graphs(rows(3, device)).captured == len(SIZES)
    replayed(model, device)
