"""One layer of the model's shape runs beside the reading of weights, and the engine then answers as without that."""

from __future__ import annotations

import types

import pytest
import torch

import simplegraph as sg
from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.start import load_kernels
from bench.models.serving import ServingLlama
from bench.models.workload import Workload

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_model_len=64, num_pages=16, max_num_seqs=2, fused=True, capture_sizes=(1, 2))
PROMPT = list(range(1, 21))


def test_a_thread_runs_a_prompt_and_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = Workload("tiny", (1,), CPU, lm_head=True).build(windows=True)

    def tokens() -> list[list[int]]:
        return Engine(llama, CONFIG).generate([PROMPT], SamplingParams(max_tokens=4))

    expected, state = tokens(), torch.get_rng_state()
    rows: list[int] = []
    forward = ServingLlama.forward

    def note(model: ServingLlama, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows.append(len(ids))
        assert len(model.llama.model.layers) == 1
        return forward(model, ids, positions)

    with monkeypatch.context() as patch:
        patch.setattr(ServingLlama, "forward", note)
        sg.preload(CPU, then=lambda: load_kernels(llama.config, CONFIG, CPU, len(PROMPT))).wait()
    assert rows == [len(PROMPT), 1]
    assert llama.config.num_hidden_layers == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens() == expected


def test_layers_with_a_window_are_left_alone() -> None:
    shape = Workload("tiny", (1,), CPU).config()
    windowed = types.SimpleNamespace(**{**vars(shape), "model_type": "mistral", "sliding_window": 8})
    load_kernels(windowed, CONFIG, CPU, len(PROMPT))  # type: ignore[arg-type]
    assert windowed.num_hidden_layers == 2
