"""The configuration of an engine with speculative decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.engine.config import EngineConfig, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecConfig(EngineConfig):
    """The limits of an engine that drafts, and how it runs. Its `capture_sizes` are requests in a round.

    Args:
        num_draft_tokens: K, or several values that an engine can switch between at run time; it starts with the first.
        draft_mode: mode of the draft's graphs, by name; the target's mode by default.
        mixed_capture_sizes: in tokens, of piecewise graphs: steps of prompts, and rounds in mode PIECEWISE; the
            library's default ones up to 512.
        acceptance: "greedy" takes the target's most likely tokens; "rejection" samples at each request's temperature.
        seed: of sampling.
        mean_length: for benchmarks: replaces acceptance by a given average of tokens per round, the target's own
            included, regardless of the drafts.
        keep_logits: for measurements: keep the logits that drafts were verified by; see `SpecRunner.logits`.

    Raises:
        EngineError: a number is out of range.
    """

    num_draft_tokens: int | Sequence[int] = 5
    draft_mode: str | None = None
    mixed_capture_sizes: tuple[int, ...] | None = None
    acceptance: str = "greedy"
    seed: int = 0
    mean_length: float | None = None
    keep_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tokens_per_launch == 1, "tokens_per_launch", self.tokens_per_launch, "1 with drafts")
        require(self.two_batch_overlap == "off", "two_batch_overlap", self.two_batch_overlap, "'off' with drafts")
        expected = "at least 1; without drafts use Engine"
        require(bool(self.drafts), "num_draft_tokens", self.num_draft_tokens, expected)
        for count in self.drafts:
            whole = isinstance(count, int) and not isinstance(count, bool)
            require(whole and count >= 1, "num_draft_tokens", count, expected)
        require(len(set(self.drafts)) == len(self.drafts), "num_draft_tokens", self.drafts, "each once")
        most = max(self.drafts)
        require(most < self.max_model_len, "num_draft_tokens", most, f"below max_model_len={self.max_model_len}")
        needed = self.max_num_seqs * (most + 1)
        what = f"at least max_num_seqs * (1 + num_draft_tokens) = {needed}"
        require(self.max_num_tokens >= needed, "max_num_tokens", self.max_num_tokens, what)
        require(self.acceptance in ("greedy", "rejection"), "acceptance", self.acceptance, "'greedy' or 'rejection'")
        length = self.mean_length
        what = f"from 1 to {1 + min(self.drafts)}"
        require(length is None or 1 <= length <= 1 + min(self.drafts), "mean_length", length, what)

    @property
    def drafts(self) -> tuple[int, ...]:
        """All values of K, starting with the first."""
        given = self.num_draft_tokens
        return tuple(given) if isinstance(given, Sequence) else (given,)
