"""Buffers of speculative decoding's steps, with one copy to the device and one back per step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.engine.scheduler import Int64s


class StepInputs:
    """A step's inputs at fixed addresses.

    Attributes:
        slots: (max_num_seqs,) int64; padding has the scratch slot.
        tokens: (max_num_seqs,) int64, for a round: each request's last token.
        grown: (max_num_seqs,) int64, for a round: tokens by which each request is longer than the device's metadata;
            0 if the host has set them.
        ids, positions: (max_num_tokens,) int64; a round writes its own on the device; -1 for no draft.
        shifted: (max_num_tokens,) int64, for prompts: the token after each, if the host knows it.
        last: (max_num_seqs,) int64, for prompts: each request's last row.
        samples: (max_num_seqs,) int64, 1 for prompts whose first new token this step gives.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int, device: torch.device) -> None:
        reqs, tokens = max_num_seqs, max_num_tokens
        sizes = [reqs, reqs, reqs, tokens, tokens, tokens, reqs, reqs]
        self._words = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = self._words.split(sizes)
        self.slots, self.tokens, self.grown, self.ids, self.positions, self.shifted, self.last, self.samples = parts
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=on_gpu)
        self._arrays = [part.numpy() for part in self._host.split(sizes)]
        self._of_rounds = self._words[: 3 * reqs], self._host[: 3 * reqs]
        self._copied: Any = torch.cuda.Event() if on_gpu else None
        self._scratch_slot = max_num_seqs
        self.forget()

    def forget(self) -> None:
        """Make a warmup write its drafts to the scratch slot, and grow no request."""
        self.slots.fill_(self._scratch_slot)
        self.grown.zero_()

    def keep(self, tokens: Tensor, counts: Tensor) -> None:
        """Set the inputs of the next round of the same requests, on the device.

        Args:
            tokens: (R, width) int64, each request's new tokens; counts: (R,) int64, the index of its last one.
        """
        reqs = counts.shape[0]
        torch.gather(tokens, 1, counts[:, None], out=self.tokens[:reqs, None])
        torch.mul(counts + 1, self.slots[:reqs] != self._scratch_slot, out=self.grown[:reqs])

    def load_round(self, slots: Int64s, tokens: Int64s) -> None:
        """Copy a round's slots and last tokens to the device."""
        self._write(slots, tokens)
        self._send(*self._of_rounds)

    def load_prompts(
        self, slots: Int64s, ids: Int64s, positions: Int64s, shifted: Int64s, last: Int64s, samples: Int64s
    ) -> None:
        """Copy a step of prompts to the device."""
        self._write(slots, slots[:0], slots[:0], ids, positions, shifted, last, samples)
        self._send(self._words, self._host)

    def _write(self, slots: Int64s, *others: Int64s) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # do not write to memory whose copy is still running
        self._arrays[0][len(slots) :] = self._scratch_slot
        for array, value in zip(self._arrays, (slots, *others), strict=False):
            array[: len(value)] = value

    def _send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Arriving(NamedTuple):
    """A step's tokens that are being copied to the host."""

    tokens: Int64s
    done: Any

    def wait(self) -> Int64s:
        """Wait for the device, and return (num_reqs, n) int64 tokens, -1 after each request's last."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens


class RoundResults:
    """The tokens of rounds, and the host memory that they are read from, valid until the next round is sent.

    Attributes:
        tokens: (max_num_seqs, width) int64, -1 after each request's last.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device) -> None:
        self.tokens = torch.full((max_num_seqs, width), -1, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        self._host = torch.empty_like(self.tokens, device="cpu", pin_memory=on_gpu)
        self._done: Any = torch.cuda.Event() if on_gpu else None
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor, Arriving]] = {}

    def send(self, reqs: int, width: int) -> Arriving:
        """Start copying the first `reqs` rows to the host, of each the first `width` tokens."""
        copy = self._copies.get((reqs, width))
        if copy is None:
            host = self._host[:reqs]
            arriving = Arriving(host.numpy()[:, :width], self._done)
            copy = self._copies[reqs, width] = (host, self.tokens[:reqs], arriving)
        host, tokens, arriving = copy
        host.copy_(tokens, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return arriving


def last_rows(query_lens: list[int]) -> Int64s:
    """Return the row of each request's last token in a step, (num_reqs,) int64."""
    return np.cumsum(query_lens) - 1
