"""Accepts drafts by the target's logits: greedily, by rejection sampling, or as many as are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.engine.mean_length import MeanLength
from bench.engine.request import SamplingParams
from bench.engine.spec_buffers import RoundResults
from bench.engine.spec_config import SpecConfig
from simplegraph.spec_decode import Accepted, greedy_accept, rejection_sample, target_probabilities


class Verifier:
    """Accepts drafts, on the device and safe in graphs.

    Args:
        config: how drafts are accepted.
        results: receives the tokens of each round.
        vocab_size: of the target's logits.
        dtype: of the target's logits.

    Attributes:
        logits: (max_num_seqs, 1 + num_draft_tokens, vocab_size), of the last round, if the config keeps them.
    """

    def __init__(self, config: SpecConfig, results: RoundResults, vocab_size: int, dtype: torch.dtype) -> None:
        self._results, self._acceptance, self._keep_logits = results, config.acceptance, config.keep_logits
        reqs, width = results.tokens.shape
        device, length = results.tokens.device, config.mean_length
        self._mean_length = None if length is None else MeanLength(length, reqs, device)
        self._noise = torch.zeros(reqs, width, device=device)
        self._temperatures = torch.zeros(reqs + 1, device=device)
        self._generator = torch.Generator(device).manual_seed(config.seed)
        self.logits = torch.zeros(reqs if self._keep_logits else 0, width, vocab_size, dtype=dtype, device=device)

    def set_temperatures(self, slots: Tensor, params: Sequence[SamplingParams]) -> None:
        """Store the temperatures of new requests, whose slots are (R,) int64, if acceptance reads them."""
        if self._acceptance == "rejection":
            device = self._temperatures.device
            temperatures = torch.tensor([one.temperature for one in params], dtype=torch.float32, device=device)
            self._temperatures.index_copy_(0, slots, temperatures)

    def draw(self) -> None:
        """Draw a round's random numbers, if it needs any."""
        if self._acceptance == "rejection":
            # Drawn outside the graph and in one shape, so that every mode and padding uses the same numbers.
            self._noise.uniform_(generator=self._generator)

    def verify(self, drafts: Tensor, logits: Tensor, slots: Tensor) -> Accepted:
        """Accept drafts of a step's first requests by the logits of their rows, and store the tokens.

        Args:
            drafts: (R, K) int64.
            logits: (R * (K + 1), vocab_size).
            slots: (R,) int64.
        """
        reqs, query_len = drafts.shape[0], drafts.shape[1] + 1
        logits = logits.view(reqs, query_len, -1)
        if self._keep_logits:
            self.logits[:reqs, :query_len].copy_(logits)
        if self._mean_length is not None:
            accepted = self._mean_length.accept(drafts, logits.argmax(dim=-1), slots)
        elif self._acceptance == "greedy":
            accepted = greedy_accept(drafts, logits.argmax(dim=-1))
        else:
            probabilities = target_probabilities(logits, self._temperatures.index_select(0, slots))
            accepted = rejection_sample(drafts, probabilities, self._noise[:reqs, :query_len])
        self._results.tokens[:reqs, :query_len].copy_(accepted.tokens)
        return accepted
