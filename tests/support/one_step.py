"""A small `BatchMetadata`, and what of it reaches the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simplegraph.attention import BatchMetadata

TOKENS, REQS, LENGTH, PAGE = 16, 6, 24, 4


def metadata(device: torch.device | str = "cpu", **settings: Any) -> BatchMetadata:
    limits = {"max_num_tokens": TOKENS, "max_num_reqs": REQS, "max_model_len": LENGTH, "page_size": PAGE}
    return BatchMetadata(device=device, **(limits | settings))


def fields(built: BatchMetadata, num_tokens: int = TOKENS, num_reqs: int = REQS) -> tuple[Tensor, ...]:
    view = built.view(num_tokens, num_reqs)
    return view.query_start_loc, view.seq_lens, view.block_table, view.slot_mapping


def poison(built: BatchMetadata) -> None:
    for field in fields(built):
        field.fill_(-7777)
