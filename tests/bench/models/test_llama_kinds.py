"""A config.json that states all that a model reads gives the same model without importing transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.models import llama_kinds
from bench.models.llama import CacheShape, Llama, build_llama
from bench.models.llama_kinds import attention_window, load_config, read_config

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": ROPE | {"original_max_position_embeddings": 16}, "tie_word_embeddings": True},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16, "attention_bias": True},
    "Mistral": {"sliding_window": 8, "rms_norm_eps": 1e-3},
}


def written(folder: Path, kind: str, **changes: object) -> Path:
    """Write a config.json with all of its settings, and return its folder."""
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **KINDS[kind], **changes)
    config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config.eos_token_id}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def model(config: Any) -> Llama:
    return build_llama(config, CacheShape(1, 16), 1, seed=1, windows=True)


def refuse_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda folder: pytest.fail("asked transformers"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_transformers_config(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = transformers.AutoConfig.from_pretrained(written(tmp_path, kind))
    refuse_imports(monkeypatch)
    ours = load_config(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id
    layers = range(theirs.num_hidden_layers)
    assert [attention_window(ours, at) for at in layers] == [attention_window(theirs, at) for at in layers]
    one, other = model(ours), model(theirs)
    assert list(one.state_dict()) == list(other.state_dict())
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert torch.equal(one.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq)
    assert [type(part) for part in one.modules()] == [type(part) for part in other.modules()]
    assert one.model.norm.eps == other.model.norm.eps


@pytest.mark.parametrize("shape", ["tiny", "8b", "70b"])
def test_the_shapes_of_the_benchmarks_need_no_transformers(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(llama_kinds.__file__).parent / "configs" / shape
    theirs = transformers.AutoConfig.from_pretrained(folder)
    refuse_imports(monkeypatch)
    ours = load_config(folder)
    named = {name: getattr(ours, name) for name in (*llama_kinds.STATED, "head_dim")}
    assert named == {name: getattr(theirs, name) for name in named}


@pytest.mark.parametrize("left_out", ["hidden_act", "num_key_value_heads", "sliding_window"])
def test_what_a_config_leaves_out_is_asked_of_transformers(left_out: str, tmp_path: Path) -> None:
    file = written(tmp_path, "Mistral") / "config.json"
    settings = json.loads(file.read_text())
    del settings[left_out]
    file.write_text(json.dumps(settings))
    assert read_config(tmp_path) is None
    assert getattr(load_config(tmp_path), left_out) == getattr(transformers.MistralConfig(), left_out)


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "bert"}', '{"model_type": "bamba"}'])
def test_other_files_are_left_to_transformers(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path) is None
    assert read_config(tmp_path / "missing") is None
