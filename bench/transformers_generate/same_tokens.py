"""Compares tokens of `generate` through graphs with plain ones, in float32, over ragged batches, from replays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bench.tools.replays import SOON, Replays
from bench.transformers_generate import families
from bench.transformers_generate.families import Batch

ROUNDING = 1e-3  # of the largest logit, in float32
MAX_ROWS = 4


def ragged(prompt: int) -> tuple[list[int], ...]:
    """Return prompt lengths of batches of one, three and four rows; no two rows of a batch are equally long."""
    return [prompt], [prompt, prompt // 2, prompt // 4 + 1], [prompt - 1, prompt + 3, 2, prompt // 2 + 1]


def compare(name: str, device: torch.device, tiny: bool, prompt: int, tokens: int, *_: Any) -> dict[str, int]:
    """Compare the tokens that one model generates with and without graphs.

    If a row's tokens diverge, the two most likely ones must differ by no more than rounding, and so must the logits:
    later tokens belong to another text and are not compared.

    Returns:
        `same_tokens`, the least number of equal tokens of a row; `rows`; and `parted`, the number of rows that diverge.

    Raises:
        RuntimeError: tokens differ by more than rounding.
        NotReplayed: graphs did not serve every token after the prompts.
    """
    from simplegraph.integrations.transformers import graph_generation

    model = families.build(name, device, torch.float32, tiny=tiny)
    batches = [families.batch(name, model, lengths) for lengths in ragged(prompt)]
    expected = [generate(model, batch, tokens) for batch in batches]
    limit = families.FAMILIES[name].max_length
    with graph_generation(model, max_batch_size=MAX_ROWS, max_length=limit) as graphs:
        replays = Replays(graphs, name=name, expected=SOON)
        found = [generate(model, batch, tokens) for batch in batches]
        replays.end(len(batches) * (tokens - 1))
        differing = [at for at, batch in enumerate(found) if not torch.equal(batch, expected[at])]
        logits = {at: _logits(model, batches[at], tokens) for at in differing}
    agreed = []
    for at in differing:
        wanted = _logits(model, batches[at], tokens)
        rows = zip(found[at], expected[at], logits[at], wanted, strict=True)
        agreed += [tokens_in_common(name, *row) for row in rows]
    parted = [count for count in agreed if count < tokens]
    return {"same_tokens": min([tokens, *parted]), "rows": sum(map(len, found)), "parted": len(parted)}


def generate(model: Any, batch: Batch, tokens: int) -> Tensor:
    """Generate greedily; return the new tokens, (rows, tokens) int64."""
    new: Tensor = model.generate(**batch, max_new_tokens=tokens, do_sample=False)[:, -tokens:]
    return new


def _logits(model: Any, batch: Batch, tokens: int) -> Iterable[Tensor]:
    """Return the logits of each row, (tokens, vocabulary) float32."""
    settings = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(**batch, **settings).logits, dim=1).float().unbind()


def tokens_in_common(name: str, found: Tensor, expected: Tensor, logits: Tensor, wanted: Tensor) -> int:
    """Return the number of leading tokens that a row has in common with plain `generate`."""
    if torch.equal(found, expected):
        return len(expected)
    at = int((found != expected).nonzero()[0])
    bound = ROUNDING * float(wanted[: at + 1].abs().max())
    difference = float((logits[: at + 1] - wanted[: at + 1]).abs().max())
    gap = float(wanted[at].max() - wanted[at, found[at]])
    if not (difference <= bound and gap <= bound):
        how = f"logits differ by {difference:.3g}, plain ones of the two tokens by {gap:.3g}"
        raise RuntimeError(f"{name}: token {at} differs from plain generate's: {how}, rounding is {bound:.3g}.")
    return at
