"""A checkpoint that does not fit says which tensors, and loads nothing silently wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bench.models.checkpoint import CheckpointError, load_checkpoint


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).requires_grad_(False)


def save(folder: Path, *, without: str = "", **more: torch.Tensor) -> nn.Module:
    source = module()
    tensors = source.state_dict() | more
    save_file({name: tensor for name, tensor in tensors.items() if name != without}, folder / "model.safetensors")
    return source


def test_every_tensor_arrives(tmp_path: Path) -> None:
    source, target = save(tmp_path), module()
    load_checkpoint(target, tmp_path)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())


def test_values_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    source, target = save(tmp_path), module().double()
    load_checkpoint(target, tmp_path)
    assert torch.equal(target[0].weight, source[0].weight.double())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, without="1.bias")
    with pytest.raises(CheckpointError, match=r"1 missing: 1\.bias"):
        load_checkpoint(module(), tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, extra=torch.zeros(1))
    with pytest.raises(CheckpointError, match="1 unexpected: extra"):
        load_checkpoint(module(), tmp_path)


def test_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    save(tmp_path, **{"0.weight": torch.zeros(5, 2)})
    with pytest.raises(CheckpointError, match=r"0\.weight is \(5, 2\), the model has \(3, 2\)"):
        load_checkpoint(module(), tmp_path)


def test_no_checkpoint_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_checkpoint(module(), tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"0.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors, which is not there"):
        load_checkpoint(module(), tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load_checkpoint(module(), tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_checkpoint(module(), tmp_path)
