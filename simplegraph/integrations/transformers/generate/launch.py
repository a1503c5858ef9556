"""Chooses tokens in graphs of several decode steps, as `generate` chooses them between its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.fused.torch_operators import most_likely

# Processors of transformers that compute the new scores from the scores alone.
_PURE = frozenset(
    (
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"),
        *("EpsilonLogitsWarper", "LogitNormalization", "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor"),
    )
)
# Those that do so in sequences of some lengths, and nothing in others -> the first such length, and the first after it.
_BY_LENGTH: Mapping[str, Callable[[Any], tuple[int, float]]] = {
    "MinLengthLogitsProcessor": lambda one: (0, one.min_length),
    "MinNewTokensLengthLogitsProcessor": lambda one: (0, one.prompt_length_to_skip + one.min_new_tokens),
    "ForcedBOSTokenLogitsProcessor": lambda one: (1, 2),
    "ForcedEOSTokenLogitsProcessor": lambda one: (one.max_length - 1, one.max_length),
}
# Their settings that say at which lengths. The change itself depends only on the others, so that prompts of all lengths
# share graphs.
_LENGTHS = frozenset(("min_length", "min_new_tokens", "prompt_length_to_skip", "max_length"))
_REPETITION = "RepetitionPenaltyLogitsProcessor"  # needs to know which tokens a row has, but not their order
_MAX_ELEMENTS = 128  # of a processor's tensor, which is part of the key of graphs


class RowState(NamedTuple):
    """Numbers of each row that a choice of tokens needs, and changes.

    Attributes:
        unfinished: (rows,) int64, 1 for rows that have not ended.
        pad: (rows,) int64, the token of rows that have ended; None if none ends.
        ends: (rows, ends) int64, tokens that end a row; None if none ends.
        seen: (rows, vocabulary) bool, True for the tokens that the row has; None if no processor asks.
    """

    unfinished: Tensor
    pad: Tensor | None = None
    ends: Tensor | None = None
    seen: Tensor | None = None


class Launched(NamedTuple):
    """Results of a graph of several steps.

    Attributes:
        tokens: (rows, steps) int64.
        unfinished: (rows,) int64, as in `RowState`, after the last step.
        made: (rows,) int64, steps before which the row was unfinished, and one more if it still is; for rows that end.
    """

    tokens: Tensor
    unfinished: Tensor
    made: Tensor


class Launch:
    """Steps of one graph: how many there are, and how each chooses its tokens. Equal ones share graphs.

    Args:
        steps: number of steps.
        samples: True to draw tokens, False to take the most likely ones.
        processors: change the scores; from `processors_between`.

    Raises:
        CannotBind: a processor holds too many numbers to tell it from others.
    """

    def __init__(self, steps: int, *, samples: bool, processors: LogitsProcessorList) -> None:
        self.steps, self.samples, self._processors = steps, samples, processors
        self._label = ", ".join([f"{steps} steps", "sampling" if samples else "greedy", *map(_described, processors)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Launch) and other._label == self._label

    def __hash__(self) -> int:
        return hash(self._label)

    def __repr__(self) -> str:
        return self._label

    def choose(self, logits: Tensor, ids: Tensor, state: RowState) -> tuple[Tensor, RowState]:
        """Choose the next tokens, (rows,); return them and the new state.

        Args:
            logits: (rows, vocabulary), in float32 for sampling and processors.
            ids: (rows, tokens), of the length of the sequences; the values do not count.
            state: of the rows.
        """
        unfinished, pad, ends, seen = state
        for one in self._processors:
            if seen is not None and type(one).__name__ == _REPETITION:
                penalty = one.penalty
                logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
            else:
                logits = one(ids, logits)
        if self.samples:
            tokens = torch.multinomial(torch.nn.functional.softmax(logits, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = most_likely(logits)
        if pad is not None and ends is not None:
            tokens = tokens * unfinished + pad * (1 - unfinished)
            unfinished = unfinished & ~(tokens[:, None] == ends).any(1)
        if seen is not None:
            seen = seen.scatter(1, tokens[:, None], True)
        return tokens, RowState(unfinished, pad, ends, seen)

    def run(self, step: Callable[[Tensor], Tensor], ids: Tensor, state: RowState) -> Launched:
        """Take all steps.

        Args:
            step: computes logits, (rows, 1, vocabulary), of tokens (rows, 1).
            ids: (rows, 1), the tokens to go on from.
            state: of the rows.
        """
        made, all_tokens = torch.zeros_like(state.unfinished), []
        for _ in range(self.steps):
            logits = step(ids)[:, -1]
            if state.ends is not None:
                made = made + state.unfinished
            # Of scores that float32 holds, the most likely one is the same.
            scores = logits if logits.itemsize <= 4 and not (self.samples or self._processors) else logits.float()
            tokens, state = self.choose(scores, ids, state)
            ids = tokens[:, None]
            all_tokens.append(ids)
        return Launched(torch.cat(all_tokens, 1), state.unfinished, made + state.unfinished)


def ignored_tokens(processors: Sequence[Any], prompt: int) -> Any:
    """Return how many first tokens do not count as a row's own; None if no processor asks for them.

    Args:
        processors: of the scores.
        prompt: tokens of the prompts.

    Returns:
        A number, or (rows,) int64.

    Raises:
        CannotBind: two processors ask, or tokens after the prompts do not count either.
    """
    asking = [one for one in processors if type(one).__name__ == _REPETITION]
    if not asking:
        return None
    ignored = asking[0].prompt_ignore_length
    ignored = 0 if ignored is None else ignored
    if len(asking) > 1 or int(ignored.max() if isinstance(ignored, Tensor) else ignored) > prompt:
        raise CannotBind(Reason.ONE_TOKEN, f"a {_REPETITION} ignores tokens after the prompt, or is not the only one")
    return ignored


def processors_between(processors: Sequence[Any], first: int, last: int) -> LogitsProcessorList | None:
    """Return the processors that change scores in sequences of `first` to `last` tokens; None if one changes some only.

    Raises:
        CannotBind: one may do more than compute scores from scores.
    """
    chosen = LogitsProcessorList()
    for processor in processors:
        name = type(processor).__name__
        allowed = name in _PURE or name in _BY_LENGTH or name == _REPETITION
        if not allowed or not type(processor).__module__.startswith("transformers."):
            raise CannotBind(Reason.ONE_TOKEN, f"{name} runs in Python after every token")
        start, end = _BY_LENGTH[name](processor) if name in _BY_LENGTH else (0, float("inf"))
        if start <= first and last < end:
            chosen.append(processor)
        elif first < end and start <= last:
            return None
    return chosen


def _described(processor: Any) -> str:
    """Describe a processor that changes scores in a launch by its name and settings."""
    kind = type(processor).__name__
    left_out = _LENGTHS if kind in _BY_LENGTH else frozenset()
    names = ["penalty"] if kind == _REPETITION else sorted(vars(processor).keys() - left_out)
    settings = {name: _plain(getattr(processor, name)) for name in names if not name.startswith("_")}
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() > _MAX_ELEMENTS:
        raise CannotBind(Reason.ONE_TOKEN, f"a processor has a tensor of {value.numel()} elements")
    return value.tolist()
