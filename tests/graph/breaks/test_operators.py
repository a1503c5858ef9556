"""Operators that break by their tag or by the configuration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from simplegraph import ConfigError
from tests.graph.breaks.models import Model, check_equal, graphs, piecewise

pytestmark = pytest.mark.usefixtures("inference_mode")


_library = torch.library.Library("sgtest", "FRAGMENT")


_library.define("attend(Tensor x, Tensor(a!) out, float scale) -> ()", tags=[torch.Tag.cudagraph_unsafe])


_library.define("scaled(Tensor x, float scale) -> Tensor")


_library.define("twice(Tensor(a!) x) -> Tensor(a!)", tags=[torch.Tag.cudagraph_unsafe])


for _key in ("CPU", "CUDA"):
    _library.impl("attend", lambda x, out, scale: (out.copy_(x * scale), None)[1], _key)
    _library.impl("scaled", lambda x, scale: x * scale, _key)
    _library.impl("twice", lambda x: x.mul_(2), _key)


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.sgtest.attend(x, out, 3.0)
    return out


def test_an_operator_tagged_unsafe_breaks_by_itself(device: torch.device) -> None:
    module = Model(attend)
    model = piecewise(module, device)
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 1
    assert "sgtest.attend.default x 1" in str(model.graph_report())
    full = piecewise(module, device, mode="FULL")
    check_equal(full, module, device)
    assert graphs(full)[0].breaks == 0


def test_an_operator_that_returns_its_argument_breaks(device: torch.device) -> None:
    module = Model(torch.ops.sgtest.twice)
    model = piecewise(module, device)
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 1


@pytest.mark.parametrize(("name", "breaks"), [("sgtest::scaled", 1), ("aten::sort", 0)])
def test_an_operator_named_in_the_config_breaks_in_this_wrapper_alone(
    device: torch.device, name: str, breaks: int
) -> None:
    module = Model(lambda x: torch.ops.sgtest.scaled(x, 0.5))
    model = piecewise(module, device, break_ops=[name])
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == breaks


def test_torchs_own_operators_can_break(device: torch.device) -> None:
    module = Model(lambda x: torch.sort(x, dim=-1).values + torch.sort(x, dim=-1, stable=True).values)
    model = piecewise(module, device, break_ops=["aten::sort"])
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 2


@pytest.mark.parametrize("name", ["sgtest::nothing", "nothing::at_all", "aten::sort.nothing"])
def test_an_operator_that_does_not_exist_is_an_error_that_names_it(device: torch.device, name: str) -> None:
    model = piecewise(Model(), device, break_ops=[name])
    with pytest.raises(ConfigError, match=name):
        model.capture_graphs(torch.randn(4, 4, device=device))


def test_an_operators_name_has_a_namespace() -> None:
    with pytest.raises(ConfigError, match="mylib::attention"):
        sg.CudaGraphConfig(break_ops=["sort"])
