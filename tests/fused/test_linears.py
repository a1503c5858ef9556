"""Linear layers that get one input run together, and each gives what it would give alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simplegraph.fused.layers import linears
from simplegraph.fused.layers.kinds import fused_forwards
from simplegraph.fused.layers.linears import gate_layers, linear_layers
from simplegraph.fused.torch_operators import Operators


class Attention(nn.Module):
    """Projections as a model's attention has them."""

    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        for name, outputs in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
            setattr(self, name, nn.Linear(6, outputs, bias=biased))
        self.between: Callable[[Tensor], object] = id

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        self.between(x)
        return torch.cat((q, self.k_proj(x), self.v_proj(x)), dim=-1)


class Counted(Operators):
    """Torch's operators, that count how many layers each call has; 0 for a gate."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def linears(self, x: Tensor, weights: Any, biases: Any, kind: str = "") -> list[Tensor]:
        self.counts.append(len(weights))
        return super().linears(x, weights, biases, kind)

    def gated(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        self.counts.append(0)
        return super().gated(gate, up, kind)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Attention)]

    monkeypatch.setattr(linears, "rotary_layers", known)


def run(model: nn.Module, x: Tensor, change: Callable[[], object] = bool) -> tuple[Tensor, list[int]]:
    """Run the model with its linear layers fused; return its answer, and how many layers each launch had.

    It is changed once they are found.
    """
    operators = Counted()
    with torch.no_grad():
        forwards = fused_forwards(gate_layers(model) | linear_layers(model), operators)
        vars_of = [vars(module) for module in forwards]
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        change()
        try:
            return model(x), operators.counts
        finally:
            for attributes in vars_of:
                del attributes["forward"]


@pytest.mark.parametrize("biased", [True, False])
def test_projections_of_one_row_are_computed_together(biased: bool) -> None:
    model, x = Attention(biased), torch.randn(1, 1, 6)
    found, counts = run(model, x)
    assert torch.equal(found, model(x))
    assert counts == [3]


def test_several_rows_are_for_torch() -> None:
    model, x = Attention(), torch.randn(2, 1, 6)
    found, counts = run(model, x)
    assert torch.equal(found, model(x))
    assert counts == []


def test_what_is_written_to_the_input_between_two_projections_counts() -> None:
    model, x = Attention(), torch.randn(1, 1, 6)
    model.between = lambda given: given.add_(1)
    expected = model(x.clone())
    found, counts = run(model, x.clone())
    assert torch.equal(found, expected)
    assert counts == [3, 1, 1]


def test_what_is_written_to_an_inference_tensor_between_two_projections_counts() -> None:
    model = Attention()
    model.between = lambda given: given.add_(1)
    with torch.inference_mode():
        x = torch.randn(1, 1, 6)
        expected = model(x.clone())
        found, counts = run(model, x.clone())
    assert torch.equal(found, expected)
    assert counts == [1, 1, 1]


def test_hooked_projections_and_those_of_unlike_inputs_run_alone() -> None:
    model, x = Attention(), torch.randn(1, 1, 6)
    model.k_proj.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    expected = model(x)
    found, counts = run(model, x)
    assert torch.equal(found, expected)
    assert counts == [1, 1, 1]
    model = Attention()
    model.v_proj = nn.Linear(6, 4, bias=True)
    assert run(model, x)[1] == [1, 1, 1]


def test_a_projection_that_is_called_again_is_computed_again() -> None:
    model, x = Attention(), torch.randn(1, 1, 6)
    model.between = lambda given: model.q_proj(given)
    found, _ = run(model, x)
    assert torch.equal(found, model(x))


def test_subclasses_and_weights_of_subclasses_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Quantized(Tensor):
        pass

    model = nn.Sequential(Scaled(6, 6), nn.Linear(6, 6, bias=False))
    model[1].weight = nn.Parameter(torch.randn(6, 6).as_subclass(Quantized), requires_grad=False)
    x = torch.randn(1, 6)
    found, counts = run(model, x)
    assert torch.equal(found, model(x))
    assert counts == []


def test_autocast_is_for_torch() -> None:
    model, x = Attention(), torch.randn(1, 1, 6)
    with torch.autocast("cpu", torch.bfloat16):
        found, counts = run(model, x)
        assert torch.equal(found, model(x))
    assert counts == []


@pytest.fixture
def mlp() -> Any:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=6, num_attention_heads=1, intermediate_size=10)
    return llama.LlamaMLP(config)


def test_a_gate_of_one_row_comes_with_its_product(mlp: Any) -> None:
    x = torch.randn(1, 1, 6)
    for inference in (False, True):
        with torch.inference_mode(inference):
            found, counts = run(mlp, x)
        assert torch.equal(found, mlp(x))
        assert counts == [2, 0, 1]  # both and their product, then the projection down


def test_a_product_is_not_for_another_activation(mlp: Any) -> None:
    x = torch.randn(1, 1, 6)
    found, counts = run(mlp, x, lambda: setattr(mlp, "act_fn", nn.GELU()))
    assert torch.equal(found, mlp(x))
    assert counts == [2, 0, 1]  # the product that the two came with, and no other: the layer runs as it is written


def test_a_product_is_not_for_what_another_gave(mlp: Any) -> None:
    x = torch.randn(1, 1, 6)
    found, counts = run(mlp, x, lambda: vars(mlp.up_proj).update(forward=lambda x: 2 * mlp.up_proj.weight @ x[0, 0]))
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * 2 * mlp.up_proj(x))
    torch.testing.assert_close(found, expected)
    assert counts == [2, 0, 0, 1]


def test_hooked_projections_of_a_gate_run_alone(mlp: Any) -> None:
    x = torch.randn(1, 1, 6)
    mlp.up_proj.register_forward_hook(lambda module, args, out: 2 * out)
    expected = mlp(x)
    found, counts = run(mlp, x)
    assert torch.equal(found, expected)
    assert counts == [1, 1, 0, 1]


def test_gates_of_several_rows_are_computed_by_themselves(mlp: Any) -> None:
    x = torch.randn(2, 1, 6)
    found, counts = run(mlp, x)
    assert torch.equal(found, mlp(x))
    assert counts == [0]
