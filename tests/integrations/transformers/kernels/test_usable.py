"""Triton's kernels are tried before they are used, and torch's operators serve where they fail."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

from interpreted import EXACT_DTYPES, needs_triton  # noqa: E402

from simplegraph.integrations.transformers.kernels import usable  # noqa: E402
from simplegraph.integrations.transformers.kernels.rotary import apply_rotary_pos_emb  # noqa: E402
from simplegraph.integrations.transformers.kernels.usable import triton_runs  # noqa: E402


class Kernels:
    """Stands in for Triton's kernels, by torch's operators."""

    def rotate(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(apply_rotary_pos_emb(*tensors))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, eps)

    def write_pages(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *rest: Any) -> None:
        for kept, state in ((keys, k), (values, v)):
            kept.index_copy_(2, slots, state.unsqueeze(2))

    # Wrong ones.

    def rounded_once(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        wide = apply_rotary_pos_emb(*(tensor.double() for tensor in (q, k, cos, sin)))
        return tuple(tensor.to(q.dtype) for tensor in wide)

    def another_eps(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(x, weight, 0.1)

    def without_values(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *rest: Any) -> None:
        self.write_pages(k, k, keys, values, slots)

    def without_compiler(self, *args: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")


HOMES = {
    "rotate": "simplegraph.integrations.transformers.kernels.triton_kernels",
    "rms_norm": "simplegraph.integrations.transformers.kernels.triton_kernels",
    "write_pages": "simplegraph.attention.kernels.pages",
}


@pytest.mark.parametrize(
    ("kernel", "wrong", "words"),
    [
        ("rotate", "rounded_once", "rounded"),
        ("rms_norm", "another_eps", "norm"),
        ("write_pages", "without_values", "written"),
        *((kernel, "without_compiler", "C compiler") for kernel in HOMES),
    ],
)
def test_where_a_kernel_fails_or_answers_otherwise_torch_s_operators_serve(
    kernel: str, wrong: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Device:
        """A GPU, as far as the question goes."""

        type = "cuda"

        def __str__(self) -> str:
            return "cuda:7"

    for home in set(HOMES.values()):
        monkeypatch.setitem(sys.modules, home, ModuleType(home))
    for name, home in HOMES.items():
        setattr(sys.modules[home], name, getattr(Kernels(), name))
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda count, device: arange(count))
    assert triton_runs(Device(), torch.bfloat16, 64) is True
    assert not caplog.text
    monkeypatch.setattr(sys.modules[HOMES[kernel]], kernel, getattr(Kernels(), wrong))
    assert triton_runs(Device(), torch.bfloat16, 64) is False
    assert "cuda:7" in caplog.text
    assert words in caplog.text
    assert caplog.handler.level <= logging.WARNING


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize("elements", [2, 64, 80, 256])
def test_the_kernels_pass_their_own_trial(dtype: torch.dtype, elements: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert usable._find_error(device, dtype, elements) is None


def test_a_cpu_is_not_asked_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "_find_error", lambda *args: pytest.fail("it was tried"))
    assert triton_runs(torch.device("cpu"), torch.float32, 64) is False
