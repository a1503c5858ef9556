"""Lets `generate` learn one step late that it is over, where this cannot be observed, so as not to wait for tokens.

`generate` reads back after every token whether a sequence is unfinished. When it has read that, the GPU is idle until
Python has prepared the next step. transformers has a check that lags one step behind, and undoes the step too many, but
uses it on one kind of device only; here generations through graphs are given one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from simplegraph.integrations.transformers.kernels.texts import with_names

_CHECK = "DeferredStopCheck"


class LateCheck:
    """Takes the place of transformers' `DeferredStopCheck`, without a streamer and without a cache to undo.

    Args:
        input_ids: (rows, tokens), the prompts.
        max_length: tokens at which all rows are over, which needs no look at the device.
    """

    def __init__(self, input_ids: Tensor, max_length: int | None, *_: Any) -> None:
        self._max_length = max_length
        self._is_cuda, self._device = input_ids.is_cuda, input_ids.device
        # Two of each, since one is written while the other is read.
        self._over = [torch.zeros((), dtype=torch.bool, pin_memory=self._is_cuda) for _ in range(2)]
        self._written = [torch.cuda.Event() for _ in range(2)] if self._is_cuda else []  # type: ignore[no-untyped-call]
        self._steps = 0
        self._steps_to_undo = 0

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        return True

    def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        """True if the step before this one was the last, or this one is by its length."""
        this, before = self._steps % 2, (self._steps + 1) % 2
        self._over[this].copy_(unfinished_sequences.max() == 0, non_blocking=True)
        if self._is_cuda:
            # The stream of its own device, not of the current one.
            self._written[this].record(torch.cuda.current_stream(self._device))
        self._steps += 1
        if self._steps > 1:
            if self._is_cuda:
                self._written[before].synchronize()
            self._steps_to_undo = int(self._over[before])
        return bool(self._steps_to_undo) or (self._max_length is not None and length >= self._max_length)

    def finish(self) -> int:
        """Return the number of steps too many, which the caller undoes."""
        if self._is_cuda and self._steps:
            # The next generation may be on another stream, and writes where the steps of this one read.
            self._written[(self._steps - 1) % 2].synchronize()
        return self._steps_to_undo


def may_run_late(config: Any, kwargs: Mapping[str, Any], *, cache_is_kept: bool) -> bool:
    """True if a generation, and everything that it calls, is the same with one more step at its end.

    Args:
        config: the generation config.
        kwargs: what `_sample` was passed.
        cache_is_kept: whether anybody looks at the cache, now or afterwards.
    """
    if cache_is_kept or kwargs.get("streamer") is not None or kwargs.get("synced_gpus"):
        return False
    criteria = list(kwargs.get("stopping_criteria") or ())
    if [type(criterion) for criterion in criteria] == [MaxLengthCriteria]:
        return True  # no step too many
    # Whoever is told of a step, or draws random numbers in it, could tell.
    if getattr(config, "do_sample", True) or not all(map(_asks_nobody, kwargs.get("logits_processor") or ())):
        return False
    return bool(criteria) and all(map(_may_be_late, criteria))


def _may_be_late(criterion: Any) -> bool:
    """True if it is of the end tokens, or of a length for which the model has positions: a step too many needs one."""
    if type(criterion) is not MaxLengthCriteria:
        return type(criterion) is EosTokenCriteria
    positions = getattr(criterion, "max_position_embeddings", None)
    return positions is None or criterion.max_length <= positions


def _asks_nobody(processor: Any) -> bool:
    """True if it is one of transformers' own, and calls nothing that it was given, a constraint for one."""
    ours = type(processor).__module__.startswith("transformers.")
    return ours and not any(map(callable, vars(processor).values()))


def with_late_check(sample: functools.partial[Any]) -> Any:
    """Return the `_sample` of transformers, bound to a model, but with `LateCheck`; any other as it is."""
    function = sample.func
    if function is not GenerationMixin._sample or _CHECK not in function.__code__.co_names:
        return sample
    return functools.partial(with_names(function, {_CHECK: LateCheck}), *sample.args)
