"""Requests: the caller's parameters, and the engine's record of their progress."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Sequence

import torch

from simplegraph import SimpleGraphError


class EngineError(SimpleGraphError):
    """The engine cannot be built or run with these settings."""


class RequestError(EngineError):
    """One request cannot be served; the others continue."""


class FinishReason(str, enum.Enum):
    """The reason why a request ended."""

    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens, or the model's limit
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return str(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters by which tokens are chosen and a request ends.

    Args:
        max_tokens: the most tokens to generate.
        temperature: 0 always takes the most likely token.
        top_k: only the k likeliest tokens; 0 for all.
        top_p: only the likeliest tokens that together have this probability.
        seed: makes a request's tokens reproducible, whatever else runs; None draws from torch's generator.
        stop_token_ids: tokens that end the request; the token itself is part of the output.

    Raises:
        RequestError: a value is out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _require(_whole(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        finite = isinstance(self.temperature, (int, float)) and math.isfinite(self.temperature)
        _require(finite and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(_whole(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "0 or more, as a whole number")
        _require(isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1")
        stops = self.stop_token_ids
        known = isinstance(stops, Collection) and all(hasattr(token, "__index__") for token in stops)
        _require(known, "stop_token_ids", stops, "token ids")
        _require(self.seed is None or _whole(self.seed), "seed", self.seed, "a whole number or None")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(fine: bool, name: str, value: object, expected: str) -> None:
    if not fine:
        raise RequestError(f"{name} is {value!r}; expected {expected}.")


@dataclasses.dataclass(eq=False)
class Request:
    """One request and its progress.

    Attributes:
        prompt, output: token ids.
        num_computed: tokens whose keys and values are in the cache, or will be after the launched steps.
        pending: tokens that launched steps sample, whose values the host does not know yet.
        slot: the request's row in the engine's tables while it runs.
        num_pages: pages it owns.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    output: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    pending: int = 0
    slot: int | None = None
    num_pages: int = 0
    generator: torch.Generator | None = None
    finished: FinishReason | None = None
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, pending ones included."""
        return len(self.prompt) + len(self.output) + self.pending

    @property
    def num_to_sample(self) -> int:
        """Tokens that the output may still get, without pending ones."""
        return self.params.max_tokens - len(self.output) - self.pending

    @property
    def num_left(self) -> int:
        """Tokens not computed yet; 0 if the output has all its tokens."""
        return self.num_tokens - self.num_computed if self.num_to_sample > 0 else 0
