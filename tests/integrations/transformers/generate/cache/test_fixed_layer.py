"""A token's keys and values are written where they belong and nowhere else, by a kernel or by torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from interpreted import needs_triton  # noqa: E402

from simplegraph.fused.torch_operators import DTYPES  # noqa: E402
from simplegraph.integrations.transformers.generate.cache.layers import FixedLayer  # noqa: E402


@needs_triton
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@given(data=st.data())
@settings(max_examples=40)
def test_a_token_s_keys_and_values_are_written_where_they_belong_and_nowhere_else(
    dtype: torch.dtype, data: Any
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, heads, length = (data.draw(st.integers(1, most)) for most in (4, 3, 40))
    elements = data.draw(st.sampled_from([1, 16, 33, 64]))
    position = data.draw(st.integers(0, length - 1))
    states = torch.randn(2, rows, 1, heads, elements).to(device, dtype).transpose(2, 3)
    stores = [torch.randn(2, rows + 1, heads, length + 7, elements).to(device, dtype)]
    stores.append(stores[0].clone())
    for store, triton in zip(stores, (True, False), strict=True):
        keys, values = store[:, :rows, :, :length]
        layer = FixedLayer(keys, values, torch.tensor([position], device=device), 0, triton=triton)
        assert layer._are_written_together(*states)
        layer.update(*states)
    assert torch.equal(*stores)
    assert torch.equal(stores[0][0, :rows, :, position], states[0, :, :, 0])


@pytest.mark.parametrize("case", ["as kept", "float32 into bfloat16", "smaller values", "two tokens"])
def test_what_the_kernel_would_not_copy_is_written_by_torch(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    kernels = ModuleType("simplegraph.fused.cache_kernels")
    kernels.write_pages = lambda *args: written.append(args)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    dtype = torch.bfloat16 if case == "float32 into bfloat16" else torch.float32
    keys, values = torch.zeros(2, 2, 3, 8, 16, device=device, dtype=dtype)
    values = values[..., :8].clone() if case == "smaller values" else values
    tokens = 2 if case == "two tokens" else 1
    position = torch.arange(5, 5 + tokens, device=device)
    key, value = (torch.randn(2, 3, tokens, kept.shape[3], device=device) for kept in (keys, values))
    FixedLayer(keys, values, position, 0, triton=True).update(key, value)
    assert len(written) == (case == "as kept")
    if not written:
        assert torch.equal(keys[:, :, 5 : 5 + tokens], key.to(dtype))
        assert torch.equal(values[:, :, 5 : 5 + tokens], value.to(dtype))
