"""Chooses tokens in graphs of several decode steps, as `generate` chooses them between its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from simplegraph.reasons import CannotBind, Reason

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
    "ForcedEOSTokenLogitsProcessor": lambda one: (one.max_length - 1, float("inf")),
}
_MOST_ELEMENTS = 128  # of a processor's tensor, which is part of the key of graphs


class RowState(NamedTuple):
    """Numbers of each row that a choice of tokens needs, and changes.

    Attributes:
        unfinished: (rows,) int64, 1 for rows that have not ended.
        pad: (rows,) int64, the token of rows that have ended; None if none ends.
        ends: (rows, ends) int64, tokens that end a row; None if none ends.
    """

    unfinished: Tensor
    pad: Tensor | None = None
    ends: Tensor | None = None


class Launched(NamedTuple):
    """Results of a graph of several steps.

    Attributes:
        tokens: (rows, steps) int64.
        unfinished: (rows,) int64, as in `RowState`, after the last step.
        made: (rows,) int64, steps before which the row was unfinished, and one more if it still is; for rows that end.
        words: size of the vocabulary.
        logits: (rows, steps, vocabulary); None if they are not asked for.
    """

    tokens: Tensor
    unfinished: Tensor
    made: Tensor
    words: int
    logits: Tensor | None


class Launch:
    """Steps of one graph: how many there are, and how each chooses its tokens. Equal ones share graphs.

    Args:
        steps: number of steps.
        samples: True to draw tokens, False to take the most likely ones.
        processors: change the scores; from `processors_between`.
        logits: True to return the logits as well.

    Raises:
        CannotBind: a processor holds too many numbers to tell it from others.
    """

    def __init__(self, steps: int, *, samples: bool, processors: LogitsProcessorList, logits: bool) -> None:
        self.steps, self.samples = steps, samples
        self._processors, self._logits = processors, logits
        how = ["sampling" if samples else "greedy", *map(_described, processors), *(["logits"] if logits else [])]
        self._label = f"{steps} steps, {', '.join(how)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Launch) and other._label == self._label

    def __hash__(self) -> int:
        return hash(self._label)

    def __repr__(self) -> str:
        return self._label

    def choose(self, logits: Tensor, ids: Tensor, state: RowState) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the next tokens, (rows,); return them, the scores, and which rows are unfinished then.

        Args:
            logits: (rows, vocabulary) float32.
            ids: (rows, tokens), of the length of the sequences; the values do not count.
            state: of the rows.
        """
        scores = self._processors(ids, logits)
        if self.samples:
            tokens = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        unfinished, pad, ends = state
        if pad is not None and ends is not None:
            tokens = tokens * unfinished + pad * (1 - unfinished)
            unfinished = unfinished & ~(tokens[:, None] == ends).any(1)
        return tokens, scores, unfinished

    def run(self, step: Callable[[Tensor], Tensor], ids: Tensor, state: RowState) -> Launched:
        """Take all steps.

        Args:
            step: computes logits, (rows, 1, vocabulary), of tokens (rows, 1).
            ids: (rows, 1), the tokens to go on from.
            state: of the rows.
        """
        made, all_tokens, all_logits = torch.zeros_like(state.unfinished), [], []
        for _ in range(self.steps):
            logits = step(ids)
            if state.ends is not None:
                made = made + state.unfinished
            tokens, _, unfinished = self.choose(logits[:, -1].to(torch.float32), ids, state)
            ids, state = tokens[:, None], state._replace(unfinished=unfinished)
            all_tokens.append(ids)
            all_logits.append(logits)
        kept = torch.cat(all_logits, 1) if self._logits else None
        return Launched(torch.cat(all_tokens, 1), state.unfinished, made + state.unfinished, logits.shape[-1], kept)


def processors_between(processors: Sequence[Any], first: int, last: int) -> LogitsProcessorList | None:
    """Return the processors that change scores in sequences of `first` to `last` tokens; None if one changes some only.

    Raises:
        CannotBind: one may do more than compute scores from scores.
    """
    found = LogitsProcessorList()
    for one in processors:
        name = type(one).__name__
        builtin = type(one).__module__.startswith("transformers.")
        if not builtin or (name not in _PURE and name not in _BY_LENGTH):
            raise CannotBind(Reason.ONE_TOKEN, f"{name} runs in Python after every token")
        start, end = _BY_LENGTH[name](one) if name in _BY_LENGTH else (0, float("inf"))
        if start <= first and last < end:
            found.append(one)
        elif first < end and start <= last:
            return None
    return found


def _described(processor: Any) -> str:
    """Describe a processor with its settings."""
    settings = {name: _plain(value) for name, value in sorted(vars(processor).items()) if not name.startswith("_")}
    return f"{type(processor).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() > _MOST_ELEMENTS:
        raise CannotBind(Reason.ONE_TOKEN, f"a processor has a tensor of {value.numel()} elements")
    return value.tolist()
