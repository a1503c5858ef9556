"""The kernels of Mamba2 in Triton's interpreter, which needs no GPU: with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from interpreted import needs_interpreter

from simplegraph import CudaGraphMode
from simplegraph.attention import Mamba2Shape
from tests.attention.test_recurrent import EXACT, SHAPE, StateEngine, run_steps

pytestmark = needs_interpreter
SHAPES = [
    SHAPE,
    Mamba2Shape(num_heads=2, head_dim=5, num_groups=1, state_size=3, conv_width=2),
    Mamba2Shape(num_heads=2, head_dim=24, num_groups=2, state_size=40, conv_width=3, dt_limit=(0.01, 0.3)),
]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def served(shape: Mamba2Shape) -> StateEngine:
    engine = StateEngine(torch.device("cpu"), shape, mode="NONE")
    engine.backend._fused = True
    return engine


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_float64s_whoever_had_the_slot_before(shape: Mamba2Shape) -> None:
    """Prompts longer than a block of tokens, single tokens, slots full of NaN; the states of others stay."""
    modes, error = run_steps(served(shape), 8, [False, True, False])
    assert modes == {CudaGraphMode.NONE}
    assert error <= EXACT


def test_padding_rows_and_dummy_steps_write_no_state() -> None:
    """Rows of no request, as a graph has them, and a step of slot 0 alone."""
    engine = served(SHAPE)
    run_steps(engine, 4, [True])
    before = [tensor.nan_to_num(7.0) for tensor in engine.cache.tensors]
    view = engine.metadata.set_dummy(8, 8, 1)
    out = engine.xbc.new_zeros(8, 32)
    engine.backend.run(1, (engine.xbc[0, :8], engine.dt[0, :8]), out, view)
    view = engine.metadata.set(1, [1], [2], num_tokens=8, num_reqs=8)
    engine.xbc[0, 1:8] = torch.nan
    out.fill_(5.0)
    engine.backend.run(1, (engine.xbc[0, :8], engine.dt[0, :8]), out, view)
    assert (out[1:] == 5.0).all()
    for tensor, old in zip(engine.cache.tensors, before, strict=True):
        kept = [slot for slot in range(engine.cache.num_slots + 1) if slot != 2]
        assert torch.equal(tensor.nan_to_num(7.0)[:, kept], old[:, kept])
        assert tensor[0, 2].isfinite().all()
