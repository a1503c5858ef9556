"""Does `generate` through graphs give plain `generate`'s tokens? In float32, over ragged batches, from replays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bench.transformers_generate import families
from bench.transformers_generate.families import Batch
from simplegraph import Reason

ROUNDING = 1e-3  # of the largest logit, in float32
MAX_ROWS = 4


def ragged(prompt: int) -> tuple[list[int], ...]:
    """Lengths of the prompts of one, three and four rows, none of which is as long as another of its batch."""
    return [prompt], [prompt, prompt // 2, prompt // 4 + 1], [prompt - 1, prompt + 3, 2, prompt // 2 + 1]


def compare(name: str, device: torch.device, tiny: bool, prompt: int, tokens: int) -> dict[str, int]:
    """Generate with and without graphs, one model.

    Where a row's tokens part, the two likeliest ones must be as near as rounding, and the logits be the same up to it:
    what comes after is another text, and not compared.

    Returns:
        `same_tokens`, that every row has in common; `rows`, and `parted`, those of them that went another way.

    Raises:
        RuntimeError: tokens differ by more than rounding, or graphs were not replayed.
    """
    from simplegraph.integrations.transformers import graph_generation

    model = families.build(name, device, torch.float32, tiny=tiny)
    batches = [families.batch(name, model, lengths) for lengths in ragged(prompt)]
    expected = [generate(model, batch, tokens) for batch in batches]
    limit = families.FAMILIES[name].max_length
    with graph_generation(model, max_batch_size=MAX_ROWS, max_length=limit) as graphs:
        found = [generate(model, batch, tokens) for batch in batches]
        others = set(graphs.stats.eager) - {Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF}
        if graphs.stats.failures or others or not graphs.stats.replays:
            raise RuntimeError(f"graphs of {name} did not serve every generation:\n{graphs.report()}")
        differing = [at for at, batch in enumerate(found) if not torch.equal(batch, expected[at])]
        logits = {at: _logits(model, batches[at], tokens) for at in differing}
    agreed = []
    for at in differing:
        wanted = _logits(model, batches[at], tokens)
        agreed += [_parting(name, *row) for row in zip(found[at], expected[at], logits[at], wanted, strict=True)]
    parted = [count for count in agreed if count < tokens]
    return {"same_tokens": min([tokens, *parted]), "rows": sum(map(len, found)), "parted": len(parted)}


def generate(model: Any, batch: Batch, tokens: int) -> Tensor:
    """(rows, tokens) int64, the new ones; greedily."""
    new: Tensor = model.generate(**batch, max_new_tokens=tokens, do_sample=False)[:, -tokens:]
    return new


def _logits(model: Any, batch: Batch, tokens: int) -> Iterable[Tensor]:
    """(tokens, vocabulary) float32 for each row."""
    settings = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(**batch, **settings).logits, dim=1).float().unbind()


def _parting(name: str, found: Tensor, expected: Tensor, logits: Tensor, wanted: Tensor) -> int:
    """Tokens that a row has in common with plain generate's."""
    if torch.equal(found, expected):
        return len(expected)
    at = int((found != expected).nonzero()[0])
    bound = ROUNDING * float(wanted[: at + 1].abs().max())
    difference = float((logits[: at + 1] - wanted[: at + 1]).abs().max())
    gap = float(wanted[at].max() - wanted[at, found[at]])
    if not (difference <= bound and gap <= bound):
        told = f"logits differ by {difference:.3g}, plain ones of the two tokens by {gap:.3g}"
        raise RuntimeError(f"{name}: token {at} of graphs is not plain generate's: {told}, rounding is {bound:.3g}.")
    return at
