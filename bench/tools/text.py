"""Token ids of a real text: its bytes, so that no tokenizer is needed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

TEXT = Path(__file__).parents[1] / "data" / "declaration.txt"


def token_ids(count: int, vocab_size: int, *, start: int = 0, path: Path = TEXT) -> Tensor:
    """Return the bytes of a text as token ids, starting over at its end.

    Args:
        count: number of ids.
        vocab_size: ids are the bytes modulo this.
        start: the first byte that is used, so that different calls get different tokens.

    Returns:
        (count,) int64, on the CPU.

    Raises:
        ValueError: the text is empty.
    """
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; the benchmarks take their token ids from its bytes.")
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return text[torch.arange(start, start + count) % len(text)].long() % vocab_size
