"""Replaces the check that `generate`'s loop makes after each token: by a late check, or by one that makes all tokens.

After every token `generate` reads back if any sequence is unfinished, and the GPU is then idle until Python has
prepared the next step. transformers has a check that lags one step behind and undoes the extra step, but uses it on one
kind of device only. Generations through graphs use such a check, too, where that cannot be observed.

Where several tokens are made at once, the check stops the loop as soon as launches can generate the remaining tokens.
The loop then gets these tokens where it would undo its extra step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.device.saved_state import default_generator, put_random_states, random_states
from simplegraph.fused.layers.provable import is_of_library, with_names
from simplegraph.integrations.transformers.generate.launch import Launch, RowState, ignored_tokens, processors_between
from simplegraph.integrations.transformers.generate.served import ServedGeneration

_ASKED = 4  # the check itself, unfinished sequences, tokens, and their length
_CHECK, _LATE_CHECK, _UNDO = "StopCheck", "DeferredStopCheck", "_undo_generation_steps"


# A check that is late.


class LateCheck:
    """Replaces transformers' `DeferredStopCheck`, without support for a streamer or for undoing steps in a cache.

    Args:
        input_ids: (rows, tokens), the prompts.
        max_length: length in tokens at which all rows are finished; checking it needs no read from the device.
    """

    def __init__(self, input_ids: Tensor, max_length: int | None, *_: Any) -> None:
        self._max_length = max_length
        self._backend = torch.get_device_module(input_ids.device)  # of the CPU, events do nothing
        # Two of each: one is written while the other is read.
        self._over = [torch.zeros((), dtype=torch.bool, pin_memory=input_ids.is_cuda) for _ in range(2)]
        self._written = [self._backend.Event() for _ in range(2)]
        self._steps = 0
        self._steps_to_undo = 0

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        return True

    def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        """True if the previous step finished all sequences, or this one reaches the maximum length."""
        this, before = self._steps % 2, (self._steps + 1) % 2
        self._over[this].copy_(unfinished_sequences.max() == 0, non_blocking=True)
        # The stream of the tokens' device, which need not be the current one.
        self._written[this].record(self._backend.current_stream(tokens.device))
        self._steps += 1
        if self._steps > 1:
            self._written[before].synchronize()
            self._steps_to_undo = int(self._over[before])
        return bool(self._steps_to_undo) or (self._max_length is not None and length >= self._max_length)

    def finish(self) -> int:
        """Return the number of extra steps, which the caller undoes."""
        # The next generation may use another stream, and overwrites memory that this one's steps still read.
        self._written[(self._steps - 1) % 2].synchronize()
        return self._steps_to_undo


def may_run_late(kwargs: Mapping[str, Any], *, cache_is_kept: bool) -> bool:
    """True if an extra step at the end of a generation cannot be observed by anything that it calls or returns.

    Args:
        kwargs: keyword arguments of `_sample`.
        cache_is_kept: True if the user can see the cache, during or after the generation.
    """
    if cache_is_kept or kwargs.get("streamer") is not None or kwargs.get("synced_gpus"):
        return False
    criteria = list(kwargs.get("stopping_criteria") or ())
    if [type(criterion) for criterion in criteria] == [MaxLengthCriteria]:
        return True  # there is no extra step
    # An extra step can be observed by random numbers and by callbacks of the user.
    if getattr(kwargs.get("generation_config"), "do_sample", True):
        return False
    processors = kwargs.get("logits_processor") or ()
    return bool(criteria) and all(map(may_be_late, criteria)) and all(map(_has_no_callback, processors))


def may_be_late(criterion: Any) -> bool:
    """True if a criterion checks end tokens, or a length within the model's positions, all that extra steps need."""
    if type(criterion) is not MaxLengthCriteria:
        return type(criterion) is EosTokenCriteria
    positions = getattr(criterion, "max_position_embeddings", None)
    return positions is None or criterion.max_length <= positions


def _has_no_callback(processor: Any) -> bool:
    """True if the processor is one of transformers' own and holds no function of the user's, such as a constraint."""
    return type(processor).__module__.startswith("transformers.") and not any(map(callable, vars(processor).values()))


def with_late_check(sample: functools.partial[Any]) -> Any:
    """Return transformers' `_sample`, bound to a model, with `LateCheck`; any other function is returned unchanged."""
    if not _asks_by_name(sample, _LATE_CHECK):
        return sample
    function: Any = sample.func
    return functools.partial(with_names(function, {_LATE_CHECK: LateCheck}), *sample.args)


def _asks_by_name(sample: functools.partial[Any], *names: str) -> bool:
    """True if a bound `_sample` is transformers' own, and calls these names, whose meaning was not replaced."""
    function: Any = sample.func
    if function is not GenerationMixin._sample or not is_of_library(function):
        return False
    meanings = [function.__globals__.get(name) for name in names]
    is_same_module = all(getattr(meaning, "__module__", None) == function.__module__ for meaning in meanings)
    return is_same_module and {*names} <= {*function.__code__.co_names}


# A check that generates the rest.


def is_known_loop(sample: functools.partial[Any]) -> bool:
    """True if a bound `_sample` is transformers' own, and calls its check as `LaunchedGeneration` expects.

    The check is called with a step's results, and the undo function with the number of steps, then the tensors.
    """
    if not _asks_by_name(sample, _CHECK, _UNDO):
        return False
    asked, undone = (sample.func.__globals__[name] for name in (_CHECK, _UNDO))
    asked, undone = (list(inspect.signature(function).parameters) for function in (asked.__call__, undone))
    return len(asked) == _ASKED and undone[:2] == ["num_steps", "input_ids"]


class LaunchedGeneration:
    """Replaces the check of `_sample`'s loop, and generates the remaining tokens after the loop's first steps.

    Args:
        served: serves the generation's steps.
        steps: number of steps of a launch.
        ids: (rows, tokens) int64, the prompts.
        kwargs: keyword arguments of `_sample`.

    Attributes:
        max_length: length in tokens at which all rows are finished.
        launch: takes several steps, with all logits processors.
        refused: why the loop takes all steps, if it was found in the loop.

    Raises:
        CannotBind: something depends on each token in a way that a graph cannot repeat.
    """

    def __init__(self, served: ServedGeneration, steps: int, ids: Tensor, kwargs: Mapping[str, Any]) -> None:
        self._served, self._steps = served, steps
        config = kwargs["generation_config"]
        self.max_length, self._ends = _limits(kwargs.get("stopping_criteria") or ())
        self._pad: Any = getattr(config, "_pad_token_tensor", None)
        self._streamer = kwargs.get("streamer")
        self._processors = LogitsProcessorList(kwargs.get("logits_processor") or ())
        processors_between(self._processors, 0, 0)
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            raise CannotBind(Reason.ONE_TOKEN, "scores or logits of every token are returned")
        self._samples = bool(config.do_sample)
        self._launches: dict[tuple[int, ...], Launch] = {}  # by the steps and the ids of processors
        self.launch = self._launch_of(steps, self._processors)
        self.refused: CannotBind | None = None
        self._ignored = ignored_tokens(self._processors, ids.shape[1])
        self._first = [ids]  # the prompts, and the loop's own tokens
        self._tokens: list[Tensor] = []  # for `_append`

    def run(self, sample: functools.partial[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a bound `_sample` with this check; returns its result."""
        names = {
            _CHECK: lambda *_: self,
            _LATE_CHECK: SimpleNamespace(is_supported=lambda *_, **__: False),
            _UNDO: self._append,
        }
        function: Any = sample.func
        return with_names(function, names)(*sample.args, *args, **kwargs)

    # Calls of the loop.

    def __call__(self, unfinished: Tensor, tokens: Tensor, length: int) -> bool:
        """True if the loop is to stop: all rows are finished, or the rest of the tokens has been generated.

        Args:
            unfinished: (rows,) int64, 1 for rows that have not ended.
            tokens: (rows,) int64, the latest ones.
            length: tokens of the sequences, the latest ones included.
        """
        self._show(tokens)
        if length >= self.max_length or self._is_over(unfinished):
            return True
        self._first.append(tokens[:, None])
        with self._served.lock:
            if not self._may_go_on(self.max_length - length):
                return False
            self._generate(unfinished, tokens, length)
        return True

    def finish(self) -> int:
        """Return the number of steps to undo, for which `_append` adds tokens instead."""
        return len(self._tokens)

    def _append(self, _: int, ids: Tensor, *others: Any) -> tuple[Any, ...]:
        """Add the tokens of the launches to the loop's sequences."""
        return torch.cat([ids, *self._tokens], dim=-1), *others

    # Generating the remaining tokens.

    def _may_go_on(self, steps: int) -> bool:
        if self.refused is not None:
            return False
        try:
            if self._served.kept and self._ends is not None and self._served.has_states:
                raise CannotBind(Reason.ONE_TOKEN, "states cannot be put back if all rows end, and the cache is kept")
            return self._served.may_go_on(steps)
        except CannotBind as error:
            self.refused = error
            return False

    def _generate(self, unfinished: Tensor, tokens: Tensor, length: int) -> None:
        state, over = self._state(unfinished), False
        while length < self.max_length and not over:
            launch = self._launch_at(length)
            take = self._take_one if launch.steps == 1 else self._take_several
            new, state, over = take(launch, tokens[:, None], state, length)
            self._tokens.append(new)
            tokens, length = new[:, -1], length + new.shape[1]

    def _state(self, unfinished: Tensor) -> RowState:
        rows, pad, ends, seen = len(unfinished), None, None, None
        if self._ends is not None:
            pad = self._pad.to(unfinished).expand(rows)
            ends = self._ends.to(unfinished).expand(rows, -1)
        if self._ignored is not None:
            ids, words = torch.cat(self._first, dim=1), self._served.words
            ignored = torch.as_tensor(self._ignored, device=ids.device).view(-1, 1)
            ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < ignored, words)
            # Prompts may hold numbers above the vocabulary, which stand for images.
            seen = torch.zeros(rows, words + 1, dtype=torch.bool, device=ids.device)
            seen = seen.scatter_(1, ids.clamp(max=words), True)[:, :words]
        return RowState(unfinished, pad, ends, seen)

    def _launch_at(self, length: int) -> Launch:
        """Return the launch for the next steps: a full one, or of one step."""
        last = length + self._steps - 1
        if last < self.max_length and self._served.fits(self._steps):
            between = processors_between(self._processors, length, last)
            if between is not None:
                return self._launch_of(self._steps, between)
        return self._launch_of(1, self._processors)

    def _launch_of(self, steps: int, processors: LogitsProcessorList) -> Launch:
        key = (steps, *map(id, processors))
        if key not in self._launches:
            self._launches[key] = Launch(steps, samples=self._samples, processors=processors)
        return self._launches[key]

    def _take_one(self, launch: Launch, ids: Tensor, state: RowState, length: int) -> tuple[Tensor, RowState, bool]:
        logits = self._served.go_on(ids)[:, -1].to(copy=True, dtype=torch.float32)
        tokens, state = launch.choose(logits, ids.expand(-1, length), state)
        self._show(tokens)
        return tokens[:, None], state, self._is_over(state.unfinished)

    def _take_several(self, launch: Launch, ids: Tensor, state: RowState, length: int) -> tuple[Tensor, RowState, bool]:
        generators = [default_generator(ids.device)] if self._samples else []
        before = random_states(generators)
        launched = self._served.go_on(ids, launch.steps, launch=launch, rows=state)
        if self._served.over:
            self._steps = 1  # the report has the reason
        # The next replay overwrites the results.
        tokens, unfinished = launched.tokens.clone(), launched.unfinished.clone()
        made = launch.steps + 1 if self._ends is None else int(launched.made.max())
        tokens = tokens[:, :made]
        shown, kept = 0, tokens.shape[1]
        try:
            for shown in range(1, kept + 1):
                self._show(tokens[:, shown - 1])
        finally:  # a streamer may raise
            if shown < launch.steps:
                self._served.take_back(launch.steps - shown)
                put_random_states(generators, before)
                self._draw(len(ids), shown)
        seen = None if state.seen is None else state.seen.scatter(1, tokens, True)
        return tokens, RowState(unfinished, state.pad, state.ends, seen), made <= launch.steps

    def _draw(self, rows: int, steps: int) -> None:
        """Draw as many random numbers as this many steps do; their number does not depend on the scores."""
        if self._samples:
            scores = torch.ones(rows, self._served.words, device=self._first[0].device)
            for _ in range(steps):
                torch.multinomial(scores, num_samples=1)

    def _is_over(self, unfinished: Tensor) -> bool:
        """True if all rows have ended; waits for the GPU if they can end."""
        return self._ends is not None and not bool(unfinished.max())

    def _show(self, tokens: Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())


def _limits(criteria: Any) -> tuple[int, Tensor | None]:
    """Return the length at which all rows are finished, and the tokens that end a row; None if none does.

    Raises:
        CannotBind: there are other criteria.
    """
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    ends = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    other = next((one for one in criteria if not may_be_late(one)), None)
    if other is not None or len(lengths) != 1 or len(ends) > 1:
        name = "its stopping criteria" if other is None else f"a {type(other).__name__}"
        raise CannotBind(Reason.ONE_TOKEN, f"{name} must be asked after every token")
    return lengths[0], ends[0] if ends else None
