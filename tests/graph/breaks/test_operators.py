"""Operators that break by their tag or by the configuration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
