"""Requests: the caller's parameters, and the engine's record of their progress."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import SupportsIndex, TypeGuard

from simplegraph import SimpleGraphError

MAX_TOP_K = 2**31 - 1
SEEDS = (-(2**63), 2**63 - 1)
_MAX_TEMPERATURE = 3e38  # in float32, as the device has it


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
        top_k: only the k likeliest tokens; 0 for all. More than the vocabulary has are all, too.
        top_p: only the likeliest tokens that together have this probability.
        seed: makes a request's tokens reproducible, whatever else runs; None draws from torch's generator. Each
            position of a request has random numbers of its own, by seed and position.
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
        fine = _number(self.temperature) and 0 <= self.temperature <= _MAX_TEMPERATURE
        _require(fine, "temperature", self.temperature, f"0 or more, up to {_MAX_TEMPERATURE}")
        fine = _whole(self.top_k) and 0 <= self.top_k <= MAX_TOP_K
        _require(fine, "top_k", self.top_k, f"0 or more, up to {MAX_TOP_K}, as a whole number")
        _require(_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1")
        fine = isinstance(self.stop_token_ids, Collection) and all(map(_is_token_id, self.stop_token_ids))
        _require(fine, "stop_token_ids", self.stop_token_ids, "token ids")
        least, most = SEEDS
        fine = self.seed is None or (_whole(self.seed) and least <= self.seed <= most)
        _require(fine, "seed", self.seed, f"a whole number from {least} to {most}, or None")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0


def token_ids(tokens: Iterable[object]) -> list[int]:
    """Convert token ids to integers.

    Args:
        tokens: whole numbers of any type, such as NumPy's, or a tensor of them.

    Raises:
        RequestError: these are not token ids.
    """
    if not isinstance(tokens, Iterable):
        raise RequestError(f"the prompt is {shown(tokens)}; expected a list of token ids.")
    found: list[int] = []
    for token in tokens:
        if not _is_token_id(token):
            raise RequestError(f"the prompt has {shown(token)}; expected token ids, which are whole numbers.")
        found.append(operator.index(token))
    return found


def _is_token_id(token: object) -> TypeGuard[SupportsIndex]:
    """True if a value is a whole number of any type. True and False count as none."""
    try:
        return not isinstance(token, bool) and operator.index(token) is not None  # type: ignore[arg-type]
    except TypeError:
        return False


def _number(value: object) -> bool:
    return isinstance(value, float) or _whole(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(fine: bool, name: str, value: object, expected: str) -> None:
    if not fine:
        raise RequestError(f"{name} is {shown(value)}; expected {expected}.")


def shown(value: object) -> str:
    """Format a value for a message: at most 80 characters, since a caller chooses it."""
    try:
        text = repr(value)
    except ValueError:  # Python formats no integer of more than 4300 digits
        return "a number of more than 4300 digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


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
