"""Runs any decoder of transformers through its `generate`: as it is, and with a graph for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.accuracy.tasks import Window
from bench.tools.measure import Figures
from bench.tools.replays import SOON, Replays

GRAPHS = "generate, graphs"
WAYS = ("generate", GRAPHS)


class GenerateRun:
    """A model's `generate`, for `bench.accuracy.scores`.

    Args:
        model: of transformers.
        way: one of `WAYS`.
        batch: rows of a call, at most.
        longest: tokens of a row, at most.
    """

    def __init__(self, model: Any, way: str, batch: int, longest: int) -> None:
        self._model, self._batch, self._graphs = model, batch, None
        self._replays, self._steps = Replays(), 0
        self._settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if way == GRAPHS:
            from simplegraph.integrations.transformers import graph_generation

            self._graphs = graph_generation(model, max_batch_size=batch, max_length=longest)
            self._replays = Replays(self._graphs, name=way, expected=SOON)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        found: list[list[int]] = []
        for group in self._groups(prompts):
            found += self._tokens(group, count).sequences[:, -count:].tolist()
        return found

    @torch.inference_mode()
    def losses(self, windows: Sequence[Window]) -> list[float]:
        """Generate each window's tail token by token, whatever the model would have chosen."""
        found: list[float] = []
        for group in self._groups(windows):
            tails = torch.tensor([window.tail for window in group], device=self._model.device)
            start = max(len(window.context) for window in group)
            forced = {"logits_processor": [Forced(tails, start)], "output_logits": True}
            logits = self._tokens([window.context for window in group], tails.shape[1], **forced).logits
            likelihoods = torch.stack(logits[1:], dim=1).double().log_softmax(dim=-1)
            found += (-likelihoods.gather(2, tails[:, 1:, None])).flatten().tolist()
        return found

    def _tokens(self, prompts: Sequence[Sequence[int]], count: int, **settings: Any) -> Any:
        self._steps += count - 1  # the first token is the prompt's
        settings |= self._settings | {"max_new_tokens": count, "return_dict_in_generate": True}
        return self._model.generate(**self._padded(prompts), **settings)

    def acceptance(self) -> Figures:
        return {}

    def close(self) -> None:
        """Drop the graphs.

        Raises:
            NotReplayed: graphs did not serve every token after the prompts.
        """
        if self._graphs is None:
            return
        try:
            self._replays.end(self._steps)
        finally:
            self._graphs.remove()

    def _groups(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        return (items[at : at + self._batch] for at in range(0, len(items), self._batch))

    def _padded(self, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Pad prompts on the left, with a mask."""
        longest, device = max(map(len, prompts)), self._model.device
        ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(masks, device=device)}


class Forced:
    """A logits processor that chooses given tokens.

    Args:
        tails: (rows, n) int64, the tokens.
        start: tokens of each prompt.
    """

    def __init__(self, tails: Tensor, start: int) -> None:
        self._tails, self._start = tails, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores with which the next given token is the only possible one."""
        place = input_ids.shape[1] - self._start
        return torch.full_like(scores, -torch.inf).scatter(1, self._tails[:, place, None], 0.0)
