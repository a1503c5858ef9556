"""Scores one checkpoint in every way of running it, and compares the scores."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Sequence

from bench.accuracy import engine_runs, generate_runs
from bench.accuracy.checkpoints import Checkpoint
from bench.accuracy.scores import Runner, Score, check_same, score
from bench.accuracy.tasks import TEXTS, task, vocabulary_of
from bench.tools.measure import Figures, say

WAYS = (*engine_runs.WAYS, *generate_runs.WAYS)


@dataclasses.dataclass(frozen=True)
class ScorePlan:
    """The number and size of the questions, and the sizes of the engines.

    Args:
        context: tokens before an answer, at most.
        output: tokens of an answer.
        questions, windows: of each text, at most.
        num_draft_tokens: K; K + 1 tokens of each window are scored.
        batch: requests that run at once.
        attention: the engine's backend.
    """

    context: int = 64
    output: int = 24
    questions: int = 100
    windows: int = 100
    num_draft_tokens: int = 5
    batch: int = 8
    attention: str = "auto"

    @property
    def longest(self) -> int:
        """Tokens of a request, those that begin every text included."""
        return self.context + 4 + max(self.output, 2 * (self.num_draft_tokens + 1))


def measure(checkpoint: Checkpoint, plan: ScorePlan, ways: Sequence[str] = WAYS) -> dict[str, dict[str, Figures]]:
    """Score every text in every way, text -> way -> figures; the first way's score is what others must have.

    Raises:
        ScoreError: a score differs.
        CheckpointError: the checkpoint has no tokenizer.
    """
    vocabulary = vocabulary_of(checkpoint.folder, checkpoint.config.vocab_size)
    sizes = {"context": plan.context, "questions": plan.questions, "windows": plan.windows}
    tasks = [task(name, vocabulary, scored=plan.num_draft_tokens + 1, **sizes) for name in TEXTS]
    found: dict[str, dict[str, Figures]] = {one.name: {} for one in tasks}
    expected: dict[str, Score] = {}
    for way in ways:
        missing = unavailable(checkpoint, way)
        if missing is not None:
            say(f"{way}: not available; {missing}")
            continue
        with contextlib.closing(run(checkpoint, way, plan)) as runner:
            for one in tasks:
                scored = score(runner, one, vocabulary, plan.output)
                found[one.name][way] = scored.figures()
                say(f"{one.name}, {way}: exact match {scored.exact_match:.3f}, perplexity {scored.perplexity:.4f}")
                check_same(f"{one.name}, {way}", scored, expected.setdefault(one.name, scored), checkpoint.dtype)
        del runner  # a model of transformers is another copy of the weights
        gc.collect()
    return found


def unavailable(checkpoint: Checkpoint, way: str) -> str | None:
    """Return the reason why a checkpoint cannot run in a way; None if it can."""
    if way in generate_runs.WAYS:
        return None
    if checkpoint.target is None:
        return f"the reference engine does not run {checkpoint.config.model_type}"
    if engine_runs.WAYS[way].draft is not None and checkpoint.draft is None:
        return "rounds advance their steps on the device, which layers with sliding windows do not allow"
    return None


def run(checkpoint: Checkpoint, way: str, plan: ScorePlan) -> Runner:
    """Start a run of a checkpoint in a way that is available."""
    if checkpoint.target is None or way in generate_runs.WAYS:
        return generate_runs.GenerateRun(checkpoint.model(), way, plan.batch, plan.longest)
    sizes = engine_runs.EnginePlan(plan.batch, plan.longest, plan.num_draft_tokens, plan.attention)
    return engine_runs.engine_run(checkpoint.target, checkpoint.draft, way, sizes)
