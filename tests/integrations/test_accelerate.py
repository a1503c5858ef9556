"""Models that accelerate offloads or dispatches: the reason for running eagerly is told, and answers stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph import Reason

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

from simplegraph.integrations.transformers import graph_encoder, graph_generation  # noqa: E402

TOKENS = 8
GREEDY = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}


def llamas(device: torch.device) -> tuple[Any, Any]:
    plain, model = (tiny.build(tiny.DECODERS["llama"], device) for _ in range(2))
    return plain, model


def offloaded(model: Any, device: torch.device, folder: Path, how: str) -> Any:
    if how == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=device)
    if how == "disk_offload":
        return accelerate.disk_offload(model, str(folder), execution_device=device)
    place: Any = device.index or 0 if device.type == "cuda" else "cpu"
    places = {"model.embed_tokens": place, "model.layers.0": place, "model.layers.1": "disk"}
    places |= {"model.norm": place, "model.rotary_emb": place, "lm_head": place}
    return accelerate.dispatch_model(model, places, main_device=place, offload_dir=str(folder))


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_an_offloaded_model_generates_as_it_did_and_the_report_says_why(
    how: str, device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = llamas(device)
    model = offloaded(model, device, tmp_path, how)
    batch = tiny.prompts([6, 4], device)
    with graph_generation(model, max_batch_size=4, max_length=64) as graphs:
        for count in (1, 2):
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
            assert graphs.stats.eager[Reason.WRONG_DEVICE] == count
        assert graphs.stats.replays == 0
        assert Reason.WRONG_DEVICE.text in str(graphs.report())
    assert ("device_map over" if how == "dispatch_model" else "an accelerate hook at") in caplog.text


def test_a_model_that_is_offloaded_after_its_graphs_were_captured(device: torch.device) -> None:
    plain, model = llamas(device)
    batch = tiny.prompts([6, 4], device)
    with graph_generation(model, max_batch_size=4, max_length=64) as graphs:
        model.generate(**batch, **GREEDY)
        replays = graphs.stats.replays
        assert replays > 0
        accelerate.cpu_offload(model, execution_device=device)
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == replays
        assert graphs.stats.eager[Reason.WRONG_DEVICE] == 1


def test_a_model_dispatched_to_one_device_is_served(device: torch.device) -> None:
    plain, model = llamas(device)
    place: Any = device.index or 0 if device.type == "cuda" else "cpu"
    model = accelerate.dispatch_model(model, {"": place})
    batch = tiny.prompts([6, 4], device)
    with graph_generation(model, max_batch_size=4, max_length=64) as graphs:
        for _ in range(2):
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == 2 * (TOKENS - 1) - 1


def test_an_offloaded_encoder(device: torch.device) -> None:
    plain, model = (
        tiny.build(lambda: transformers.BertModel(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2)
    )
    accelerate.cpu_offload(model, execution_device=device)
    batch = tiny.prompts([7, 4], device)
    with graph_encoder(model, lengths=[16], capture_sizes=[2]) as graphs, torch.inference_mode():
        for _ in range(3):
            found, expected = model(**batch).last_hidden_state, plain(**batch).last_hidden_state
            real = batch["attention_mask"].bool()
            torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-4)
        assert graphs.stats.replays == 0


def test_wrapping_an_offloaded_module_is_right_at_every_call(device: torch.device) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device).eval()
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device).eval()
    module.load_state_dict(plain.state_dict())
    model = sg.wrap(accelerate.cpu_offload(module, execution_device=device), capture_sizes=[2], progress=False)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(2, 8, device=device)
            torch.testing.assert_close(model(x), plain(x))
    # What accelerate copies to the device is copied in a replay, too; CUDA refuses to capture that of pageable memory.
    assert model.graph_stats.replays or model.graph_stats.failures
