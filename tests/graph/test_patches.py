"""The list of what the library changes of other people's, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import simplegraph as sg
from simplegraph.base import patches


class Theirs:
    """A class that is not ours."""

    def method(self) -> str:
        return "theirs"


class Derived(Theirs):
    pass


@pytest.mark.parametrize("owner", [Theirs, Derived])
def test_a_replaced_attribute_is_listed_and_comes_back(owner: Any) -> None:
    patches.replace(owner, "method", lambda _: lambda self: "ours")
    assert owner().method() == "ours"
    assert any(label.endswith(f"{owner.__name__}.method") for label in patches.installed())
    patches.restore(owner, "method")
    assert owner().method() == "theirs"
    assert ("method" in vars(owner)) is (owner is Theirs)
    patches.restore(owner, "method")
    assert not any(label.endswith(f"{owner.__name__}.method") for label in patches.installed())


def test_what_several_replace_comes_back_with_the_last_of_them() -> None:
    for _ in range(2):
        patches.replace(Theirs, "method", lambda theirs: lambda self: f"ours, {theirs(self)}")
    assert Theirs().method() == "ours, theirs"
    patches.restore(Theirs, "method")
    assert Theirs().method() == "ours, theirs"
    patches.restore(Theirs, "method")
    assert Theirs().method() == "theirs"
    assert not any(label.endswith("Theirs.method") for label in patches.installed())


def _namespaces() -> dict[str, dict[str, Any]]:
    owners = [
        torch,
        torch._C,
        Tensor,
        nn.Module,
        nn.Linear,
        torch.UntypedStorage,
        torch.optim.Optimizer,
        RemovableHandle,
    ]
    owners += [torch.backends.ContextProp, torch.cuda, torch.overrides]
    return {str(owner): dict(vars(owner)) for owner in owners}


def _changed(before: dict[str, dict[str, Any]]) -> list[str]:
    pairs = [
        (f"{owner}.{name}", value, before[owner].get(name))
        for owner, held in _namespaces().items()
        for name, value in held.items()
    ]
    return [name for name, now, then in pairs if now is not then and not name.endswith(("__doc__", "__annotations__"))]


def test_nothing_of_torch_or_of_the_module_is_replaced_while_graphs_are_there(
    device: torch.device, inference_mode: None
) -> None:
    before = _namespaces()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device).eval()
    held = [
        (owner, dict(vars(owner)), {name: type(value) for name, value in vars(owner).items()})
        for owner in module.modules()
    ]
    x = torch.randn(2, 4, device=device)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    model.capture_graphs(x)
    for _ in range(3):
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays >= 2
    assert _changed(before) == []
    for owner, attributes, kinds in held:
        assert {name: type(value) for name, value in vars(owner).items()} == kinds
        assert all(vars(owner)[name] is value for name, value in attributes.items())
    model.reset_graphs()
    assert _changed(before) == []


def test_setting_an_attribute_of_another_module_is_torchs_own_code(device: torch.device) -> None:
    setter = nn.Module.__setattr__
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[2], progress=False)
    with torch.inference_mode():
        model.capture_graphs(torch.randn(2, 4, device=device))
    assert nn.Module.__setattr__ is setter
    assert setter.__module__ == "torch.nn.modules.module"
