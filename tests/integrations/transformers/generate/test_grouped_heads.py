"""Heads that share keys and values attend without copies of them, in captured steps only."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

from operators_seen import OperatorRecorder  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

from simplegraph.fused.torch_operators import Operators  # noqa: E402
from simplegraph.integrations.transformers.generate.grouped_heads import grouped_heads  # noqa: E402

ROWS, SHARED, GROUPS, LENGTH, ELEMENTS = 3, 2, 4, 32, 16


class Attention(nn.Module):
    num_key_value_groups = GROUPS
    is_causal = True


def attention_inputs(device: torch.device, queries: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys and values out of a longer store, and a mask that hides some positions."""
    torch.manual_seed(0)
    query = torch.randn(ROWS, SHARED * GROUPS, queries, ELEMENTS, device=device)
    store = torch.randn(2, ROWS + 1, SHARED, 2 * LENGTH, ELEMENTS, device=device)
    mask = torch.rand(ROWS, 1, queries, LENGTH, device=device) > 0.4
    mask[..., 0] = True
    return query, store[0, :ROWS, :, :LENGTH], store[1, :ROWS, :, :LENGTH], mask


def registered(*tensors: Any, module: Any = None, **kwargs: Any) -> Tensor:
    output: Tensor = AttentionInterface()["sdpa"](module or Attention(), *tensors, **kwargs)[0]
    return output


class OfEqualSizes(Operators):
    """Operators with a kernel for keys and values of one size, as on a GPU; it notes what it is asked to attend."""

    triton = True

    def __init__(self) -> None:
        self.calls = 0

    def attends(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
        return q.shape[-1] == v.shape[-1]

    def attend(self, *args: Any) -> Tensor:
        self.calls += 1
        return super().attend(*args)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.3, 0.0])
def test_heads_in_groups_give_the_same_sums_by_the_kernel(
    masked: bool, scaling: float | None, device: torch.device
) -> None:
    query, keys, values, mask = attention_inputs(device)
    given = (query, keys, values, mask if masked else None)
    expected, kernels = registered(*given, scaling=scaling), OfEqualSizes()
    with grouped_heads(kernels):
        found = registered(*given, scaling=scaling)
    assert kernels.calls == 1
    assert found.shape == expected.shape == (ROWS, 1, SHARED * GROUPS, ELEMENTS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_no_kernel_takes_is_transformers_own(device: torch.device) -> None:
    query, keys, values, mask = attention_inputs(device)
    for operators, given in ((Operators(), values), (OfEqualSizes(), values[..., :8])):
        with grouped_heads(operators):
            found = registered(query, keys, given, mask)
        assert torch.equal(found, registered(query, keys, given, mask))


@pytest.mark.parametrize("case", ["two queries", "a mask of each head", "numbers", "bias", "no groups"])
def test_everything_else_is_what_it_was(case: str, device: torch.device) -> None:
    query, keys, values, mask = attention_inputs(device, queries=2 if case == "two queries" else 1)
    module, kwargs = Attention(), {}
    given: tuple[Any, ...] = (query, keys, values, mask)
    if case == "a mask of each head":
        given = (query, keys, values, torch.rand(ROWS, SHARED * GROUPS, 1, LENGTH, device=device) > 0.4)
    elif case == "numbers":
        given = (query, keys, values, torch.randn(ROWS, 1, 1, LENGTH, device=device))
    elif case == "bias":
        kwargs["position_bias"] = torch.randn(1, SHARED * GROUPS, 1, LENGTH, device=device)
    elif case == "no groups":
        module.num_key_value_groups, given = 1, (query[:, :SHARED], keys, values, mask)
    expected = registered(*given, module=module, **kwargs)
    with grouped_heads(OfEqualSizes()):
        torch.testing.assert_close(registered(*given, module=module, **kwargs), expected, rtol=1e-5, atol=1e-6)


def test_other_threads_and_whoever_comes_later_find_transformers_own(device: torch.device) -> None:
    given = attention_inputs(device)
    operators: list[list[str]] = []

    def elsewhere() -> None:
        with OperatorRecorder() as recorder:
            registered(*given)
        operators.append(recorder.names)

    elsewhere()
    with grouped_heads(OfEqualSizes()):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="the step"), grouped_heads(OfEqualSizes()):
            raise ValueError("the step")
        assert AttentionInterface()["sdpa"] is not sdpa_attention_forward
    assert operators[0] == operators[1]
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_an_attention_that_a_user_registered_as_sdpa_is_called(device: torch.device) -> None:
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", own)
    try:
        with grouped_heads(OfEqualSizes()):
            registered(*attention_inputs(device))
        assert AttentionInterface()["sdpa"] is own
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert calls == [1]


def _window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key > query - 4)


OTHERS: dict[str, dict[str, Any]] = {
    "two queries": {"q_length": 2},
    "a length that Python knows": {"q_offset": 20},
    "a longer cache": {"kv_length": LENGTH + 8},
    "a window": {"mask_function": _window},
    "no mask": {"attention_mask": None},
}


def mask_inputs(device: torch.device) -> dict[str, Any]:
    """What transformers passes for a step at position 20, whose mask hides the later ones and some of the prompt."""
    mask = torch.arange(LENGTH, device=device).expand(ROWS, LENGTH) <= 20
    mask[1, :3] = False
    sizes = {"batch_size": ROWS, "q_length": 1, "kv_length": LENGTH, "q_offset": torch.tensor(20, device=device)}
    return {**sizes, "mask_function": causal_mask_function, "attention_mask": mask, "device": device}


def test_a_steps_mask_is_the_caches(device: torch.device) -> None:
    given = mask_inputs(device) | {"allow_is_causal_skip": False}
    with grouped_heads(Operators()):
        found = AttentionMaskInterface()["sdpa"](**given)
    assert found.data_ptr() == given["attention_mask"].data_ptr()
    assert torch.equal(found, sdpa_mask(**given))
    assert AttentionMaskInterface()["sdpa"] is sdpa_mask


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_mask_is_transformers_own(case: str, device: torch.device) -> None:
    given = mask_inputs(device) | {"allow_is_causal_skip": False} | OTHERS[case]
    expected = sdpa_mask(**given)
    with grouped_heads(Operators()):
        found = AttentionMaskInterface()["sdpa"](**given)
    assert torch.equal(found, expected)
    assert given["attention_mask"] is None or found.data_ptr() != given["attention_mask"].data_ptr()


def test_another_threads_mask_is_transformers_own(device: torch.device) -> None:
    given = mask_inputs(device) | {"allow_is_causal_skip": False}
    given["attention_mask"] = torch.ones_like(given["attention_mask"])  # later positions are hidden by the causal one
    found: list[Tensor] = []
    with grouped_heads(Operators()):
        thread = threading.Thread(target=lambda: found.append(AttentionMaskInterface()["sdpa"](**given)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], sdpa_mask(**given))
    assert not found[0][..., 21:].any()
