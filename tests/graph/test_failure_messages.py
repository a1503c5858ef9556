"""Torch's messages about a failed capture become a cause and a remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.base.failures import capture_error

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("CUDA error: operation not permitted when stream is capturing", "read back", "eager_break"),
        (
            "CUDA error: operation failed due to a previous error during capture",
            "the error swallowed: a tensor read back",
            "eager_break",
        ),
        ("CUDA error: capturing stream has unjoined work", "not joined", "wait_stream"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "out of memory", "capture_sizes"),
        ("Offset increment outside graph capture encountered unexpectedly.", "generator", "eed outside"),
        (
            "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same "
            "as the original seed.",
            "reseeded",
            "eed outside",
        ),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", "generator", "attribute"),
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
            "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True.",
            "host",
            "outside the forward",
        ),
    ],
)
def test_torchs_messages_become_a_cause_and_a_remedy(text: str, cause: str, remedy: str) -> None:
    error = capture_error(RuntimeError(text), "batch size 8")
    assert "batch size 8" in str(error)
    assert cause in str(error)
    assert remedy in str(error)
    assert text[:40] in str(error), "torch's own words stay"


@pytest.mark.parametrize(
    "text",
    [
        "unsupported head size: 80; expected 64 or 128",
        "the captured frame is too small",
        "no seed given",
        "generator must be a list",
        "expected pinned positions",
    ],
)
def test_the_users_own_message_is_not_mistaken_for_one_of_torchs(text: str) -> None:
    error = capture_error(RuntimeError(text), "batch size 8")
    assert f"RuntimeError: {text}" in str(error)
    assert "read back" not in str(error)
    assert "pinned memory" not in str(error)
    assert "reseeded" not in str(error)


class EagerInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with sg.eager():
            return self.layer(x)


def test_eager_inside_a_captured_forward_is_said_to_have_no_effect(device, caplog):
    model = sg.wrap(EagerInside().to(device).eval(), capture_sizes=[1, 2], progress=False)
    with torch.no_grad(), caplog.at_level("WARNING", "simplegraph"):
        model.capture_graphs(torch.ones(2, 4, device=device))
        assert model(torch.ones(2, 4, device=device)).shape == (2, 4)
    said = [record.getMessage() for record in caplog.records if "eager()" in record.getMessage()]
    assert len(said) == 1
    assert "with sg.eager():" in said[0]
    assert "has no effect inside a forward that is captured" in said[0]
    assert "eager_break" in said[0]


def test_eager_around_a_call_is_said_nothing_of(device, caplog):
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[2], progress=False)
    with torch.no_grad(), caplog.at_level("WARNING", "simplegraph"), sg.eager():
        model(torch.ones(2, 4, device=device))
    assert "eager()" not in caplog.text
