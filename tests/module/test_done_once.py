"""What a forward does once for each batch size (count it, draw for it) it does once, whichever size was captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import WIDTH, rows

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
SIZES = [2, 4, 8]
IN_TURN = (8, 4, 2, 4, 2, 8, 8, 4, 2, 4, 4, 2, 8)
PADDED = (7, 8, 5, 7, 8, 5, 3, 4, 3, 4, 2, 1, 2, 1, 7, 8, 5, 3, 4, 2, 1)


class Once(nn.Module):
    """Does something to a buffer at the first call of each batch size, and adds it."""

    def __init__(self, do: Callable[[Tensor], object], note: Callable[[Any, int], bool]) -> None:
        super().__init__()
        self.do, self.note = do, note
        self.register_buffer("state", torch.zeros(WIDTH))
        self.items: set[int] = set()
        self.dict: dict[int, bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.note(self, len(x)):
            self.do(self.state)
        return x * self.state.cos() + self.state


def in_set(module: Any, size: int) -> bool:
    noted = size in module.items
    module.items.add(size)
    return noted


def in_dict(module: Any, size: int) -> bool:
    return bool(module.dict.setdefault(size, False) or module.dict.update({size: True}))


def in_attribute(module: Any, size: int) -> bool:
    noted = hasattr(module, f"done{size}")
    setattr(module, f"done{size}", True)
    return noted


DONE: dict[str, Callable[[Tensor], object]] = {
    "counts": lambda state: state.add_(1),
    "draws": lambda state: state.copy_(torch.randn_like(state)),
    "draws without a trace": lambda state: torch.randn_like(state),
}
NOTES = {"a set": in_set, "a dict": in_dict, "an attribute": in_attribute}


def same_calls(model: Any, twin: Any, sizes: Sequence[int], device: torch.device) -> None:
    """Call both in turn, from the same random state, and compare answers, the buffer, and what is drawn next."""
    for number, size in enumerate(sizes):
        x, found = rows(size, device), []
        for each in (model, twin):
            torch.manual_seed(number)
            found.append([each(x), each.state.clone(), torch.rand(2, device=device)])
        close(*found)


@pytest.mark.parametrize("sizes", [IN_TURN, PADDED, [4] * 4], ids=["in turn", "padded", "one size"])
@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("do", DONE)
def test_sizes_that_were_captured_up_front_do_it_once(
    do: str, note: str, sizes: Sequence[int], device: torch.device
) -> None:
    module = Once(DONE[do], NOTES[note]).to(device).eval()
    twin, x = copy.deepcopy(module), rows(8, device)
    model = sg.wrap(module, capture_sizes=SIZES, padding=sizes is PADDED, progress=False)
    for run in (model.capture_graphs, twin):
        torch.manual_seed(0)
        run(x)
    same_calls(model, twin, sizes, device)


@pytest.mark.parametrize("sizes", [(7, 7, *PADDED), (8, 8, *PADDED), (3, 3, 4, *PADDED)], ids=str)
@pytest.mark.parametrize("do", DONE)
def test_sizes_that_are_captured_by_their_first_calls_do_it_once(
    do: str, sizes: Sequence[int], device: torch.device
) -> None:
    module = Once(DONE[do], in_set).to(device).eval()
    twin = copy.deepcopy(module)
    same_calls(sg.wrap(module, capture_sizes=SIZES, progress=False), twin, sizes, device)


def test_a_size_that_counts_runs_eagerly_and_says_why(device: torch.device) -> None:
    model = sg.wrap(Once(DONE["counts"], in_set).to(device).eval(), capture_sizes=SIZES, progress=False)
    model.capture_graphs(rows(8, device))
    for _ in range(3):
        model(rows(4, device))
    assert "the recording sets items" in model.graph_stats.failures["batch size 4"]
    assert model.graph_stats.replays == 0
    assert reasons(model)["capture_failed"] == 3


@pytest.mark.parametrize("padding", [False, True], ids=["sizes run first", "done before"])
def test_the_remedies_for_memory_that_is_filled_once_work(padding: bool, device: torch.device) -> None:
    module = Once(lambda state: state.fill_(2), in_set).to(device).eval()
    if padding:
        for size in range(1, 9):
            module(rows(size, device))
    model = sg.wrap(module, capture_sizes=SIZES, padding=padding, progress=False)
    if padding:
        model.capture_graphs(rows(8, device))
    for size in (4, 4, 4, 2, 4, 2, 2, 8, 8, 8):
        x = rows(size, device)
        close(model(x), x * torch.full_like(x, 2).cos() + 2)
    assert model.graph_stats.captures == len(SIZES)
    assert model.graph_stats.replays == (7 if padding else 4)
    assert model.graph_stats.failures == {}


def test_a_graph_without_notes_is_served_after_one_proof(device: torch.device) -> None:
    model = sg.wrap(Once(lambda state: state.fill_(2), lambda *_: False).to(device).eval(), capture_sizes=SIZES)
    model.capture_graphs(rows(8, device))
    for _ in range(3):
        model(rows(4, device))
    assert model.graph_stats.replays == 2


def test_a_size_that_failed_between_hides_no_notes(device: torch.device) -> None:
    """What a failed capture puts back, it puts back of the sizes before it, too."""

    class Keeps(Once):
        kept: Sequence[Tensor] = ()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 4:
                self.kept = [x + 1]
                return self.kept[0] + self.state
            return super().forward(x)

    module = Keeps(DONE["counts"], in_attribute).to(device).eval()
    twin = copy.deepcopy(module)
    model = sg.wrap(module, capture_sizes=[4, 8, 16], padding=False, batch_dims={"x": 0}, progress=False)
    model.capture_graphs(rows(16, device))
    assert "batch size 4" in model.graph_stats.failures
    twin(rows(16, device))
    same_calls(model, twin, (8, 8, 8, 8, 16, 16, 16), device)
