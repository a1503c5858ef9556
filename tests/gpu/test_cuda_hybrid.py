"""Recurrent layers on a GPU: kernels beside float64 in every mode, and a hybrid engine's tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simplegraph import CudaGraphMode
from simplegraph.attention import Mamba2Shape
from tests.attention.test_recurrent import StateEngine, run_steps
from tests.gpu.attention_backends import ATTENTION
from tests.gpu.engine_modes import TINY, assert_nearly_same_in_half_precision, assert_same_in_every_mode, generate

FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE
BAMBA = Mamba2Shape(num_heads=128, head_dim=64, num_groups=1, state_size=128)
ODD = Mamba2Shape(num_heads=6, head_dim=24, num_groups=3, state_size=20, conv_width=3, dt_limit=(0.001, 0.3))
GROUPED = Mamba2Shape(num_heads=24, head_dim=80, num_groups=8, state_size=64)
ERROR = {torch.float32: 2e-5, torch.bfloat16: 8e-3}
pytestmark = pytest.mark.usefixtures("timed_inference")


class Prompts(StateEngine):
    prompts = (1, 1, 2, 15, 16, 17, 40)


def served(shape: Mamba2Shape, dtype: torch.dtype, **settings: Any) -> StateEngine:
    limits: dict[str, Any] = {"num_slots": 20, "max_reqs": 16, "max_tokens": 128, "capture_sizes": [1, 4, 16, 128]}
    return Prompts(torch.device("cuda"), shape, dtype, **limits | settings)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("dtype", ERROR)
def test_outputs_are_float64s_whoever_had_the_slot_before(dtype: torch.dtype, mode: str) -> None:
    """Free slots hold NaN, padding rows too; no step changes another's state, or slot 0."""
    modes, error = run_steps(served(GROUPED, dtype, mode=mode), 24, [False, True])
    assert modes == {CudaGraphMode[mode].decode_mode(), CudaGraphMode[mode].mixed_mode()}
    assert error <= ERROR[dtype]


@pytest.mark.parametrize("shape", [ODD, BAMBA])
@pytest.mark.parametrize("dtype", ERROR)
def test_other_shapes(dtype: torch.dtype, shape: Mamba2Shape) -> None:
    modes, error = run_steps(served(shape, dtype, mode="FULL_AND_PIECEWISE"), 12, [False, True, True])
    assert modes == {FULL, PIECEWISE}
    assert error <= ERROR[dtype]


def test_replays_of_one_token_leave_the_states_that_eager_leaves() -> None:
    """To the bit, over many steps: kernels are the same, and requests do not depend on each other."""
    shape = GROUPED
    graphs, eager = (served(shape, torch.bfloat16, mode=mode) for mode in ("FULL_DECODE_ONLY", "NONE"))
    for one in (graphs, eager):
        for length in range(1, 40):
            generator = torch.Generator("cuda").manual_seed(length)
            one.xbc.normal_(generator=generator)
            one.dt.normal_(generator=generator)
            batch = one.manager.dispatch(11, 11, 1)
            padded = batch.descriptor
            slots = list(range(3, 14))
            reqs = padded.num_reqs if batch.mode is FULL else 11
            one.metadata.set(1, [length] * 11, slots, num_tokens=padded.num_tokens, num_reqs=reqs)
            one.manager.run(batch, one.forward)
    for mine, theirs in zip(graphs.cache.tensors, eager.cache.tensors, strict=True):
        assert mine[:, 3:14].any()
        assert torch.equal(mine, theirs)


def states_end_clean(engine: Any) -> Callable[[], None]:
    """Fill free slots with NaN; nothing may have written the one for padding."""
    states = engine.runner.states
    assert states is not None
    for tensor in states.cache.tensors:
        tensor[:, 1:] = torch.nan

    def look_again() -> None:
        assert not any(tensor[:, 0].any() for tensor in states.cache.tensors)

    return look_again


def hybrid(dtype: torch.dtype) -> Any:
    """A Bamba of four layers, of which the second and the fourth attend."""
    transformers = pytest.importorskip("transformers")
    from bench.models.llama import CacheShape, build_llama

    shape = {**TINY, "max_position_embeddings": 1024}
    shape |= {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 32}
    config = transformers.BambaConfig(**shape, initializer_range=0.1)
    return build_llama(config, CacheShape(1, 16), 512, device="cuda", dtype=dtype, seed=3, windows=True)


def test_a_hybrid_generates_the_same_tokens_in_every_mode() -> None:
    answer = functools.partial(generate, hybrid(torch.float32), states_end_clean)
    assert_same_in_every_mode(answer, num_state_slots=10)


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_hybrid_in_half_precision(attention: str) -> None:
    answer = functools.partial(generate, hybrid(torch.bfloat16), states_end_clean)
    assert_nearly_same_in_half_precision(answer, attention)
