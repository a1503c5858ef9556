"""Fused operators on a GPU: nothing compiles inside a capture, and models are as exact as with their own operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers", minversion="5.0")

from bench.fused_operators.libraries import TINY, Shapes, inputs, ours  # noqa: E402
from simplegraph.fused.choice import operators_for  # noqa: E402
from simplegraph.fused.layers.kinds import find_layers, fused_forwards, operators_of  # noqa: E402
from simplegraph.fused.torch_operators import DTYPES, Operators  # noqa: E402
from simplegraph.integrations.transformers.overrides import override_forwards  # noqa: E402
from tests.fused.test_layers import MODELS, call, tiny  # noqa: E402

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", [TINY, Shapes()], ids=["tiny", "8b"])
def test_after_its_trial_a_kernel_is_captured_for_any_number_of_rows(shapes: Shapes, dtype: torch.dtype) -> None:
    for name, trial in shapes.trials().items():
        operators = operators_for(CUDA, dtype, [trial])
        assert operators.triton, name
        for rows in (1, 3, 64, 257):
            first, second = (inputs(shapes, rows, CUDA, dtype)[name] for _ in range(2))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = ours(operators, name, first)()
            graph.replay()
            expected = ours(Operators(), name, second)()
            if found is None:
                found, expected = (
                    (given["qkv"][:, : shapes.heads], *(kept[:-1] for kept in given["pages"]))
                    for given in (first, second)
                )
            tolerance = 8 * torch.finfo(dtype).eps
            for one, other in zip(*map(_as_tuple, (found, expected)), strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", MODELS)
def test_models_on_the_kernels_are_as_exact_as_they_were(name: str) -> None:
    model = tiny.build(MODELS[name], CUDA)
    for norm in model.modules():
        if isinstance(norm, nn.Module) and type(norm).__name__.endswith("Norm"):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    for router in model.modules():
        if hasattr(router, "top_k") and hasattr(router, "num_experts"):
            router.top_k = router.num_experts  # else rounding may route a row to others
    wide = copy.deepcopy(model).double()
    if name in tiny.MIXTURES:  # grouped products know no float64
        wide.set_experts_implementation("eager")
    model = model.to(torch.bfloat16)
    layers = find_layers(model)
    operators = operators_of(layers, CUDA, torch.bfloat16)
    assert operators.triton
    with torch.no_grad():
        exact = call(wide, name, CUDA, torch.float64)
        plain = call(model, name, CUDA, torch.bfloat16)
        with override_forwards(fused_forwards(layers, operators)):
            found = call(model, name, CUDA, torch.bfloat16)
    was, now = (float((each.double() - exact).norm() / exact.norm()) for each in (plain, found))
    assert now <= 1.5 * was + 0.01
