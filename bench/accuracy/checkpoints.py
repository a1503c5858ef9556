"""A trained model and its draft: the pair of `data/eagle`, or a folder in the format of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from bench.models.checkpoint import load_checkpoint
from bench.models.eagle import TINY, Eagle, Eagle3
from bench.models.llama import CacheShape, Llama, build_llama
from bench.models.llama_kinds import KINDS, config_dtype, load_config
from bench.spec_decode.pairs import KINDS as DRAFTS
from bench.spec_decode.pairs import TRAINED, load_draft


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A trained model.

    Attributes:
        folder: of its files.
        config: of transformers.
        dtype: of its weights, once loaded.
        target: on the device, for the reference engine; None if that does not run its kind.
        draft: for speculation; None if the engine does not speculate with this target.
        draft_is_trained: False for random weights, whose drafts are refused.
    """

    folder: Path
    config: Any
    device: torch.device
    dtype: torch.dtype
    target: Llama | None = None
    draft: Eagle | Eagle3 | None = None
    draft_is_trained: bool = False

    def model(self) -> Any:
        """Load the model of transformers.

        Raises:
            OSError: files are missing.
            ValueError: the checkpoint is of no decoder that transformers knows.
        """
        from transformers import AutoModelForCausalLM

        found = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, local_files_only=True)
        return found.to(self.device).eval()


def load_trained(name: str, draft: str, device: torch.device, dtype: torch.dtype | None = None) -> Checkpoint:
    """Load a model with trained weights.

    Args:
        name: `TRAINED`, or a folder.
        draft: a kind of draft, whose weights are random except for the trained pair; or a folder.
        device: where.
        dtype: of the weights; by default the checkpoint's own on a GPU, float32 elsewhere and for the trained pair.

    Raises:
        CheckpointError: files are missing or do not match.
    """
    trained = name == TRAINED
    folder = TINY / "target" if trained else Path(name)
    config = load_config(folder)
    chosen = dtype or (torch.float32 if trained or device.type != "cuda" else config_dtype(config))
    found = Checkpoint(folder, config, device, chosen)
    if config.model_type not in KINDS:
        return found
    target = build_llama(config, CacheShape(1, 1), 1, device=device, dtype=chosen, random_weights=False, windows=True)
    load_checkpoint(target, folder)
    found = dataclasses.replace(found, target=target)
    if any(layer.self_attn.window is not None for layer in target.model.layers):
        return found
    if trained and draft in DRAFTS:
        draft = str(TINY / draft)
    return dataclasses.replace(found, draft=load_draft(draft, target), draft_is_trained=draft not in DRAFTS)
