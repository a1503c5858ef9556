"""The list of what the library changes of other people's, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.graph import patches


class Theirs:
    """A class that is not ours."""

    def method(self) -> str:
        return "theirs"


class Derived(Theirs):
    pass


@pytest.mark.parametrize("owner", [Theirs, Derived])
def test_a_replaced_attribute_is_listed_and_comes_back(owner: Any) -> None:
    patches.replace(owner, "method", lambda self: "ours")
    assert owner().method() == "ours"
    assert any(label.endswith(f"{owner.__name__}.method") for label in patches.installed())
    patches.restore(owner, "method")
    assert owner().method() == "theirs"
    assert ("method" in vars(owner)) is (owner is Theirs)
    patches.restore(owner, "method")
    assert not any(label.endswith(f"{owner.__name__}.method") for label in patches.installed())


def test_what_a_capture_patches_can_be_taken_back_and_comes_again(device: torch.device, inference_mode: None) -> None:
    x = torch.randn(2, 4, device=device)

    def captured() -> Any:
        model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[2], progress=False)
        model.capture_graphs(x)
        return model

    captured()
    assert any(label.endswith("Tensor.data") for label in patches.installed())
    patches.remove()
    assert patches.installed() == []
    assert type(torch.Tensor.data).__name__ == "getset_descriptor"
    model = captured()
    assert any(label.endswith("Tensor.data") for label in patches.installed())
    torch.testing.assert_close(model(x), sg.unwrap(model)(x))
    model.weight.data = torch.zeros_like(model.weight)
    torch.testing.assert_close(model(x), model.bias.expand(2, 4), msg="a moved weight is noticed again")
