"""The batches every arm runs: decode steps over a real text, on a paged cache."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.models.checkpoint import has_checkpoint, load_checkpoint
from bench.models.llama import CacheShape, Llama, build_llama
from bench.models.llama_kinds import config_dtype, load_config
from bench.models.shard import WHOLE, Shard
from bench.tools import text
from bench.tools.options import CONFIGS, SHAPES, listed

if TYPE_CHECKING:
    from transformers import LlamaConfig

INPUT_NAMES = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table")
PAD_VALUES = {"input_ids": 0, "positions": 0, "slot_mapping": -1, "seq_lens": 0, "block_table": 0}
PAGE_SIZE = 16
CONTEXT = 200

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Decode steps of requests with a given context.

    Args:
        model: ``tiny``, ``8b``, ``70b``, or a folder with a Hugging Face config.json, with weights or without.
        sizes: batch sizes to have ready, in requests.
        device: device of the model.
        context: tokens in each request's cache, the step's own included.
        lm_head: True if the model returns logits.
        seed: of random weights and cache contents.
        layers: replaces the config's number of layers.
        shard: this rank's share of the model.
    """

    model: str
    sizes: tuple[int, ...]
    device: torch.device
    context: int = CONTEXT
    lm_head: bool = False
    seed: int = 0
    layers: int | None = None
    shard: Shard = WHOLE

    @property
    def max_batch(self) -> int:
        """The largest size, in requests."""
        return max(self.sizes)

    @property
    def blocks(self) -> int:
        """Pages per request."""
        return math.ceil(self.context / PAGE_SIZE)

    @property
    def pages(self) -> int:
        """Pages of the cache, the scratch page included."""
        return 1 + self.max_batch * self.blocks

    @property
    def folder(self) -> Path:
        """Folder of the model's config.json.

        Raises:
            FileNotFoundError: there is no such shape and no such folder.
        """
        for folder in (CONFIGS / self.model, Path(self.model)):
            if (folder / "config.json").is_file():
                return folder
        raise FileNotFoundError(
            f"--model is {self.model!r}; expected {listed(SHAPES)}, or a folder with a config.json."
        )

    def config(self) -> LlamaConfig:
        """Load the model's config."""
        config = load_config(self.folder)
        config.num_hidden_layers = self.layers or config.num_hidden_layers
        return config

    def build(self, *, windows: bool = False) -> Llama:
        """Build the model on its device, with a checkpoint's weights if there is one, else seeded random ones.

        Args:
            windows: True to allow layers with sliding windows and recurrent layers, for `bench.engine`.
        """
        config, weights = self.config(), has_checkpoint(self.folder)
        cache = CacheShape(self.pages, PAGE_SIZE)
        dtype = config_dtype(config) if self.device.type == "cuda" else torch.float32
        model = build_llama(
            config,
            cache,
            self.max_batch,
            device=self.device,
            dtype=dtype,
            lm_head=self.lm_head,
            seed=self.seed,
            random_weights=not weights,
            shard=self.shard,
            windows=windows,
        )
        if weights:
            load_checkpoint(model, self.folder, self.shard)
        return model

    def batch(self, count: int, vocab_size: int, *, start: int = 0, mixed_lengths: bool = False) -> Batch:
        """Make one decode step of requests 0 to count - 1.

        Args:
            count: requests, at most `max_batch`.
            start: the first byte of the text that is used, so that different calls use different tokens.
            mixed_lengths: contexts of 1 to `context` tokens, drawn from the text, instead of full ones.

        Returns:
            input_ids, positions, slot_mapping: (count,) int64. seq_lens: (count,) int32.
            block_table: (count, blocks) int32.
        """
        lengths = torch.full((count,), self.context)
        if mixed_lengths:
            lengths = 1 + text.token_ids(count, 256, start=start) * 31 % self.context
        positions = lengths - 1
        pages = 1 + torch.arange(count * self.blocks).view(count, self.blocks)
        slots = pages.gather(1, positions[:, None] // PAGE_SIZE)[:, 0] * PAGE_SIZE + positions % PAGE_SIZE
        ids = text.token_ids(count, vocab_size, start=start)
        batch = (ids, positions, slots, lengths.int(), pages.int())
        return tuple(tensor.to(self.device) for tensor in batch)  # type: ignore[return-value]
