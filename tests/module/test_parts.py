"""`wrap_parts`: the largest parts that can have graphs get them in place, the rest says why, and one call undoes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]


def layers(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(module for _ in range(count) for module in (nn.Linear(width, width), nn.Tanh())))


class View(nn.Module):
    """Computes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 8)


class Head(nn.Module):
    """Keeps the rows that its scores choose, which no graph can."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers(8, 4) for _ in range(2))
        self.shared, self.small, self.view = shared, layers(8, 1), View()

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        features = self.view(self.small(self.shared(features)))
        return features[features.sum(1) > 0]


class Detector(nn.Module):
    """A backbone, and a head that is part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.shared = layers(8, 4), layers(8, 4)
        self.head, self.unused = Head(self.shared), layers(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"chosen": self.head(self.shared(self.backbone(x)))}


@pytest.fixture
def detector(device: torch.device) -> Any:
    torch.manual_seed(3)
    return Detector().eval().to(device)


def test_the_largest_parts_that_can_have_graphs_get_them_and_answers_stay(detector: Any, device: torch.device) -> None:
    batches = [torch.randn(size, 8, device=device) for size in (5, 3, 5, 3, 3, 3, 3, 5, 5)]
    expected, keys = [detector(x)["chosen"] for x in batches], list(detector.state_dict())
    graphs = sg.wrap_parts(detector, batches[0])
    assert list(graphs.parts) == ["backbone", "shared", "head.blocks.0", "head.blocks.1"]
    for x, wanted in zip(batches, expected, strict=True):
        torch.testing.assert_close(detector(x)["chosen"], wanted)
    assert all(part.graph_stats.replays >= 8 for part in graphs.parts.values())
    assert detector.head.shared is detector.shared  # both of its places go through one wrapper
    assert list(detector.state_dict()) == keys


def test_a_part_that_fails_for_another_shape_is_put_back(device: torch.device) -> None:
    class Body(nn.Module):
        """Says how long its latest input was, which a graph of another length cannot."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.length = layers(8, 4), 5

        def forward(self, x: Tensor) -> Tensor:
            self.length = x.shape[1]
            return self.layers(x)

    short, long = (torch.randn(2, length, 8, device=device) for length in (5, 7))
    model = nn.Sequential(Body()).eval().to(device)
    with sg.wrap_parts(model, short) as graphs:
        assert list(graphs.parts) == ["0"]
    with sg.wrap_parts(model, short, others=[long, {"input": long}]) as graphs:
        assert list(graphs.parts) == ["0.layers"]
        assert "the forward changes `length` whenever it runs" in graphs.skipped["0"]
        assert graphs.parts["0.layers"].graph_stats.captures == 2


def test_the_report_says_why_other_parts_have_no_graphs(detector: Any, device: torch.device) -> None:
    report = sg.wrap_parts(detector, {"x": torch.randn(5, 8, device=device)}).report()
    assert "features[features.sum(1) > 0]" in report.skipped["head"]
    assert report.skipped["head.small"] == "fewer operators than 8: a graph would not be faster"
    assert "unused" not in report.skipped
    assert "head.small, head.view run eagerly: fewer operators" in str(report)
    assert report.to_dict()["parts"]["backbone"]["replays"] >= 1


def test_one_call_undoes_it(detector: Any, device: torch.device) -> None:
    before = dict(detector.named_modules())
    x = torch.randn(5, 8, device=device)
    with sg.wrap_parts(detector, [x]) as graphs:
        assert detector.backbone is graphs.parts["backbone"]
        graphs.remove()
        assert dict(detector.named_modules()) == before
    assert dict(detector.named_modules()) == before
    assert not any(part.graph_stats.graphs for part in graphs.parts.values())


def test_another_answer_with_graphs_is_refused_and_nothing_changes(detector: Any, device: torch.device) -> None:
    replays: list[int] = []

    class Dishonest(nn.Module):
        """Answers otherwise once the graphs beside it serve."""

        def forward(self, x: Tensor) -> Tensor:
            graphed = getattr(detector.backbone, "graph_stats", None)
            replays.append(0 if graphed is None else graphed.replays)
            return x + min(replays[-1], 1)

    detector.head = Dishonest()
    with pytest.raises(sg.VerificationError, match="returned something else: output 0 differs by up to 1"):
        sg.wrap_parts(detector, torch.randn(5, 8, device=device))
    assert type(detector.backbone) is nn.Sequential
    assert max(replays) == 1


def test_random_numbers_of_the_search_are_not_the_callers(device: torch.device) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x + torch.rand_like(x))

    model, x = Noisy().eval().to(device), torch.ones(2, 8, device=device)
    torch.manual_seed(5)
    expected = torch.rand(3, device=device)
    torch.manual_seed(5)
    assert list(sg.wrap_parts(model, x).parts) == ["body"]
    assert torch.equal(torch.rand(3, device=device), expected)


def test_a_model_that_trains_or_has_graphs_already_is_refused(detector: Any, device: torch.device) -> None:
    x = torch.randn(5, 8, device=device)
    with pytest.raises(sg.InputError, match="in training mode"):
        sg.wrap_parts(detector.train(), x)
    detector.eval().backbone = sg.wrap(detector.backbone)
    with pytest.raises(sg.InputError, match="with graphs already, in 'backbone'"):
        sg.wrap_parts(detector, x)
    with pytest.raises(sg.ConfigError, match="capture_size"):
        sg.wrap_parts(sg.unwrap(detector), x, capture_size=[1])


def test_the_report_of_a_model_without_parts_for_graphs_says_so(device: torch.device) -> None:
    """An empty text looks as if the report itself had failed."""
    with sg.wrap_parts(nn.Linear(3, 3).to(device).eval(), torch.ones(2, 3, device=device)) as graphs:
        assert str(graphs.report()) == "no part has graphs: the model has no submodules that could have any"
