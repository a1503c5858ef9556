"""`check` of modules with eager breaks: can PIECEWISE become FULL, and which break is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import InputError


class Metadata:
    scale = 1.0


@sg.eager_break
def harmless(x: Tensor) -> Tensor:
    return x.relu()


@sg.eager_break
def reads_back(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 1e9 else x + 1


@sg.eager_break
def reads_python(x: Tensor) -> Tensor:
    return x * Metadata.scale


class Chain(nn.Module):
    def __init__(self, *parts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = self.linear(part(x)) + x
        return x


def chain(device: torch.device, *parts: Callable[[Tensor], Tensor]) -> nn.Module:
    return Chain(*parts).to(device).eval()


def test_breaks_that_could_be_captured_make_one_full_graph(device: torch.device) -> None:
    report = sg.check(chain(device, harmless, harmless), torch.randn(4, 4, device=device))
    assert report
    assert report.problem is None
    assert report.breaks == {"harmless": None}
    assert "mode='FULL'" in str(report)


def test_the_break_that_prevents_it_is_named_with_its_line(device: torch.device) -> None:
    report = sg.check(chain(device, harmless, reads_back), torch.randn(4, 4, device=device))
    assert not report
    assert report.breaks["harmless"] is None
    assert "x.sum() > 1e9" in str(report.breaks["reads_back"])
    assert "reads_back must stay an eager break" in str(report)
    assert "harmless could be captured" in str(report)


def test_metadata_that_changes_from_batch_to_batch_prevents_it(device: torch.device) -> None:
    batches = [torch.randn(4, 4, device=device) for _ in range(3)]
    module = chain(device, harmless, reads_python)

    def before(number: int) -> None:
        Metadata.scale = float(number + 1)

    assert sg.check(module, batches[0])
    report = sg.check(module, batches[0], others=[(batch,) for batch in batches[1:]], before=before)
    assert not report
    assert "does not equal eager" in str(report.breaks["reads_python"])
    assert report.breaks["harmless"] is None


def test_batches_of_other_sizes_have_graphs_of_their_own(device: torch.device) -> None:
    fails_when_small = sg.eager_break(lambda x: x if x.shape[0] > 2 else x * float(x.sum()))
    module = chain(device, fails_when_small)
    assert sg.check(module, torch.randn(4, 4, device=device)).capturable
    report = sg.check(module, torch.randn(4, 4, device=device), others=[(torch.randn(2, 4, device=device),)])
    assert not report.capturable
    assert "batch size 2" in str(report.problem)


def test_what_is_in_the_way_even_of_piecewise_is_said(device: torch.device) -> None:
    report = sg.check(chain(device, harmless, lambda x: x * float(x.sum())), torch.randn(4, 4, device=device))
    assert not report
    assert "float(x.sum())" in str(report.piecewise)
    assert "not piecewise either" in str(report)


def test_the_module_is_left_as_it_was(device: torch.device) -> None:
    module = nn.BatchNorm1d(4).to(device).eval()
    module.register_buffer("calls", torch.zeros(1, device=device))
    module.register_forward_hook(lambda m, args, out: m.calls.add_(1) and None)
    sg.check(module, torch.randn(4, 4, device=device))
    assert module.calls.item() == 0


@pytest.mark.parametrize(
    ("module", "settings", "words"),
    [
        (3, {}, "torch.nn.Module"),
        (nn.Linear(4, 4), {}, "training mode"),
        (nn.Linear(4, 4).eval(), {"others": [torch.zeros(4, 4)]}, "tuples"),
    ],
)
def test_bad_input_is_refused_in_words(module: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sg.check(module, torch.zeros(4, 4), **settings)


def test_what_must_stay_a_break_is_not_told_to_become_one(device: torch.device) -> None:
    report = str(sg.check(chain(device, harmless, reads_back), torch.randn(4, 4, device=device)))
    assert "reads_back must stay an eager break" in report
    assert "mark the function with" not in report


def test_padding_is_tried_on_every_batch_that_is_given(device: torch.device) -> None:
    """One draw may take the same branch with and without padding."""

    @sg.eager_break
    def gate(x: Tensor) -> Tensor:
        return x * 2 if x.mean() > 0 else x

    module, x = chain(device, gate), torch.ones(4, 4, device=device)
    sizes = (x, torch.cat([x, -x / 2]))
    alone = sg.check(module, sizes[0] * 9)
    assert "as far as these inputs tell" in str(alone) or alone.rows_independent is False
    assert sg.check(module, sizes[0] * 9, others=[(sizes[1],)]).rows_independent is False
