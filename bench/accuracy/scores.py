"""A model's score on a task, and the bounds within which two runs of one model must agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from bench.accuracy.tasks import Question, Task, Vocabulary, Window
from bench.tools.measure import Figures
from bench.tools.tables import cell, grid


class Runner(Protocol):
    """A model that is run in one way."""

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Generate greedily; return `count` tokens for each prompt."""

    def losses(self, windows: Sequence[Window]) -> list[float]:
        """Return -log p of every scored token, window by window."""

    def acceptance(self) -> Figures:
        """Return what was drafted and accepted since the last call; nothing without speculation."""

    def close(self) -> None:
        """Drop the graphs."""


class Bounds(NamedTuple):
    """Limits of the difference of two runs: share of the answers, and relative difference of the perplexities."""

    answers: float
    perplexity: float


# In half precision rounding decides between near ties, and is about 1 % of a logit.
BOUNDS = {torch.float32: Bounds(0.0, 1e-4)}
HALF = Bounds(0.05, 0.05)


class ScoreError(RuntimeError):
    """Two runs of one model have different scores."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A model's score on one task.

    Attributes:
        right: for each question, True if the answer was the text's next word.
        losses: -log p of every scored token.
        acceptance: of drafts, while the questions were answered.
    """

    right: list[bool]
    losses: list[float]
    acceptance: Figures

    @property
    def exact_match(self) -> float:
        """Share of the questions that were answered with the text's next word."""
        return sum(self.right) / len(self.right)

    @property
    def perplexity(self) -> float:
        """Perplexity of a token."""
        return math.exp(math.fsum(self.losses) / len(self.losses))

    def figures(self) -> Figures:
        """Return everything for JSON."""
        return {
            "exact_match": self.exact_match,
            "questions": len(self.right),
            "perplexity": self.perplexity,
            "tokens": len(self.losses),
        } | self.acceptance


def score(runner: Runner, task: Task, vocabulary: Vocabulary, output: int) -> Score:
    """Ask all questions of a task, with `output` tokens for an answer, and measure the likelihood of its windows."""
    runner.acceptance()
    outputs = runner.generate([question.prompt for question in task.questions], output)
    pairs: zip[tuple[Question, list[int]]] = zip(task.questions, outputs, strict=True)
    right = [question.answered_by(vocabulary.decode(ids)) for question, ids in pairs]
    accepted = runner.acceptance()
    return Score(right, runner.losses(task.windows), accepted)


def check_same(name: str, found: Score, expected: Score, dtype: torch.dtype) -> None:
    """Refuse a score that is not the expected one, up to the rounding of the dtype.

    Raises:
        ScoreError: answers or perplexity differ by more.
    """
    bounds = BOUNDS.get(dtype, HALF)
    differing = sum(one != other for one, other in zip(found.right, expected.right, strict=True))
    off = abs(found.perplexity / expected.perplexity - 1)
    if differing <= bounds.answers * len(found.right) and off <= bounds.perplexity:  # also refuses NaN
        return
    raise ScoreError(
        f"{name}: {differing} of {len(found.right)} answers are right or wrong where eager ones are not, and the "
        f"perplexity is {found.perplexity:.6g} where eager's is {expected.perplexity:.6g}; expected at most "
        f"{bounds.answers:.0%} of the answers, and {bounds.perplexity:.2%} of the perplexity."
    )


def render(title: str, rows: Mapping[str, Mapping[str, Figures]]) -> str:
    """Format the figures of every task and way as a table."""
    lines = [("task", "way", "exact match", "perplexity", "tokens a round", "accepted in each position")]
    for name, ways in rows.items():
        for way, figures in ways.items():
            rates = " ".join(f"{rate:.3f}" for rate in figures.get("per_position", ())) or "-"
            cells = [cell(figures, key, form) for key, form in CELLS]
            lines.append((name, way, *cells, rates))
    return f"{title}\n{grid(lines)}"


CELLS = (("exact_match", ".3f"), ("perplexity", ".4f"), ("mean_length", ".2f"))
