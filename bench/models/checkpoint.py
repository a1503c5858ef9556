"""Loads weights from safetensors files, single or sharded, with Hugging Face's names."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.models.shard import WHOLE, Shard
from simplegraph.base.errors import install_command

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: {install_command('bench')}", name=error.name) from None

SINGLE = "model.safetensors"
PICKLED = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"
LISTED = 5


class CheckpointError(ValueError):
    """A checkpoint does not match the model; the message names the tensors."""


def has_checkpoint(folder: Path) -> bool:
    """True if the folder holds safetensors weights."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def load_checkpoint(model: nn.Module, folder: Path | str, shard: Shard = WHOLE) -> None:
    """Copy a checkpoint's tensors into the model's parameters, on their device and in their dtype.

    Args:
        model: the whole model, or the part that `shard` describes.
        folder: with safetensors files.
        shard: this rank's share of the model.

    Raises:
        CheckpointError: files are missing or unreadable; tensors are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    files = _files(folder)
    own_name = getattr(model, "own_name", str)
    named = ((own_name(name), tensor) for name, tensor in _tensors(folder, files))
    tensors = ((name, shard.part(name, tensor)) for name, tensor in named)
    load_tensors(model, tensors, folder)


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Copy named tensors, which came from `folder`, into the model's parameters.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    missing, extra, misshaped = set(targets), [], []
    for name, tensor in tensors:
        target = targets.get(name)
        if target is None:
            extra.append(name)
            continue
        missing.discard(name)
        if target.shape == tensor.shape:
            target.copy_(tensor)
        else:
            misshaped.append(f"{name} is {tuple(tensor.shape)}, the model has {tuple(target.shape)}")
    _raise_unless_whole(folder, _untied(missing, targets), _unexpected(extra, model), misshaped)


def read_checkpoint(folder: Path | str) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint to the CPU, from safetensors files or a pickled state dict.

    Raises:
        CheckpointError: the folder has neither, or they are unreadable.
    """
    folder = Path(folder)
    if has_checkpoint(folder) or not (folder / PICKLED).is_file():
        return dict(_tensors(folder, _files(folder)))
    try:
        found = torch.load(folder / PICKLED, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{folder / PICKLED} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{folder / PICKLED} holds no state dict; expected names mapped to tensors.")
    return found


def _files(folder: Path) -> list[str]:
    """Return the checkpoint's file names, from the index if there is one."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        if not isinstance(index.get("weight_map"), dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map; expected tensor names mapped to file names.")
        return sorted(set(index["weight_map"].values()))
    if (folder / SINGLE).is_file():
        return [SINGLE]
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}.")


def _tensors(folder: Path, files: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / INDEX} names {file}, which is not there; is the download complete?")
        try:
            with safe_open(folder / file, framework="pt") as opened:
                names = opened.keys()  # the handle itself is not iterable in older releases
                for name in names:
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file} cannot be read: {error}") from error


def _untied(missing: set[str], targets: dict[str, nn.Parameter]) -> list[str]:
    """List missing parameters that do not share memory with one that was loaded."""
    loaded = {id(parameter) for name, parameter in targets.items() if name not in missing}
    return sorted(name for name in missing if id(targets[name]) not in loaded)


def _unexpected(extra: list[str], model: nn.Module) -> list[str]:
    """List extra tensors that the model does not use, except those that may be ignored."""
    headless = getattr(model, "lm_head", None) is None
    return [name for name in extra if not ((headless and name == "lm_head.weight") or name.endswith("inv_freq"))]


def _raise_unless_whole(folder: Path, missing: list[str], extra: list[str], misshaped: list[str]) -> None:
    kinds = {"missing": missing, "unexpected": extra, "of another shape": misshaped}
    lines = [f"  {len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if lines:
        reason = f"{folder} does not fit the model; is its config.json the right one?"
        raise CheckpointError("\n".join([reason, *lines]))


def _listed(names: list[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")
