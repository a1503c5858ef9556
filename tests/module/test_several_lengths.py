"""Calls whose arguments have lengths of their own: features of recommenders, a source and a target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import reasons
from tests.module.test_lengths import assert_right
from tests.support.where import without_gpu

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
WIDTH = 4
OWN = {"clicks": (1, "clicks"), "views": (1, "views")}


class Pooled(nn.Module):
    """Two features, each as many items as it has, of which 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.clicked, self.viewed = (nn.Embedding(20, WIDTH, padding_idx=0) for _ in range(2))
        self.top = nn.Linear(2 * WIDTH, 1)

    def forward(self, clicks: Tensor, views: Tensor) -> Tensor:
        return self.top(torch.cat([self.clicked(clicks).sum(1), self.viewed(views).sum(1)], 1))  # type: ignore[no-any-return]


class Jagged(nn.Module):
    """Features as values and offsets, as jagged tensors hold them: one bag of each for a row."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, WIDTH, mode="sum", include_last_offset=True) for _ in range(2))

    def forward(self, clicks: Tensor, click_offsets: Tensor, views: Tensor, view_offsets: Tensor) -> Tensor:
        clicked, viewed = self.bags
        return clicked(clicks, click_offsets) + viewed(views, view_offsets)  # type: ignore[no-any-return]


class Translated(nn.Module):
    """A source with a mask, and a target whose length the output has; the source's is in the output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.table(source) * mask[..., None]
        context = hidden.sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.table(target) + context, hidden[:, ::2]


def graphed(module: nn.Module, device: torch.device, **settings: Any) -> Any:
    common = {"capture_sizes": [2, 4], "progress": False, "lengths": [16, 64]}
    return sg.wrap(module.to(device).eval(), **(common | settings))


def ids(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(1, 20, shape, device=device)


def test_features_of_two_lengths_are_served_by_a_graph_for_each_captured_length(device: torch.device) -> None:
    model = graphed(Pooled(), device, length_dims=OWN)
    for number in range(60):
        rows, clicks, views = (4, 2, 3)[number % 3], 1 + number * 7 % 30, 1 + number * 11 % 60
        assert_right(model, ids(rows, clicks, device=device), ids(rows, views, device=device))
    assert model.graph_stats.captures <= 4  # two sizes times two lengths: both are padded to one
    assert model.graph_stats.replays >= 40


@without_gpu
def test_jagged_features_are_served(device: torch.device) -> None:
    whole = {"clicks": None, "views": None, "click_offsets": None, "view_offsets": None}
    dims = {"clicks": (0, "clicks"), "views": (0, "views")}
    with torch.no_grad():
        model: Any = graphed(
            Jagged(), device, length_dims=dims, batch_dims=whole | {"click_offsets": 0, "view_offsets": 0}
        )
        for _ in range(30):
            passed: list[Tensor] = []
            for scale in (3, 7):
                counts = torch.randint(0, scale, (3,), device=device)
                offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
                passed += [ids(int(counts.sum()) + 1, device=device), offsets]
            assert_right(model, *passed)
        assert model.graph_stats.replays >= 10, model.graph_report()


def test_an_output_is_cut_to_the_length_that_it_follows(device: torch.device) -> None:
    dims: Any = {"source": (1, "source"), "mask": (1, "source"), "target": (1, "target")}
    model = graphed(Translated(), device, length_dims=dims)
    for number in range(80):
        source, target = 2 + number * 13 % 50, 2 + number * 7 % 31
        mask = torch.ones(4, source, device=device)
        assert_right(model, ids(4, source, device=device), mask, ids(4, target, device=device))
    assert model.graph_stats.replays >= 40


def test_arguments_of_one_name_must_be_of_one_length(device: torch.device) -> None:
    dims: Any = {"source": (1, "source"), "mask": (1, "source"), "target": (1, "target")}
    model = graphed(Translated(), device, length_dims=dims)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(ids(4, 9, device=device), torch.ones(4, 5, device=device), ids(4, 3, device=device))
    assert reasons(model) == {"batch_mismatch": 1}


def test_a_sum_of_lengths_is_never_cut_wrongly(device: torch.device) -> None:
    class Joined(nn.Module):
        def forward(self, clicks: Tensor, views: Tensor) -> Tensor:
            return torch.cat([clicks, views], 1) * 2

    model = graphed(Joined(), device, length_dims=OWN)
    for number in range(12):
        assert_right(model, ids(4, 3 + number, device=device), ids(4, 9 + 2 * number, device=device))
    assert model.graph_stats.replays == 0


def test_all_lengths_are_captured_upfront(device: torch.device) -> None:
    model = graphed(Pooled(), device, length_dims=OWN, capture="upfront", batch_dims={"clicks": 0, "views": 0})
    summary = model.capture_graphs(ids(4, 20, device=device), ids(4, 5, device=device))
    assert (summary.captured, summary.failed) == (4, {})
    for number in range(20):
        assert_right(model, ids(4, 1 + number % 7, device=device), ids(4, 40 - number % 3, device=device))
    assert model.graph_stats.captures == 4
    assert model.graph_stats.replays >= 10


def test_a_length_is_a_dimension_or_one_with_a_name() -> None:
    for wrong in ((1,), ("clicks", 1), (1, 2)):
        with pytest.raises(sg.ConfigError, match="expected argument names with a dimension, or a dimension and"):
            sg.wrap(Pooled(), lengths=[16], length_dims={"clicks": wrong})  # type: ignore[dict-item]
