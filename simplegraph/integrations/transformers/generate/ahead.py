"""Lets `generate` find out one step late that it is finished, if that cannot be observed, so that it need not wait.

After every token `generate` reads back if any sequence is unfinished, and the GPU is then idle until Python has
prepared the next step. transformers has a check that lags one step behind and undoes the extra step, but uses it on one
kind of device only. Generations through graphs use such a check, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from simplegraph.fused.layers.texts import with_names

_CHECK = "DeferredStopCheck"


class LateCheck:
    """Replaces transformers' `DeferredStopCheck`, without support for a streamer or for undoing steps in a cache.

    Args:
        input_ids: (rows, tokens), the prompts.
        max_length: length in tokens at which all rows are finished; checking it needs no read from the device.
    """

    def __init__(self, input_ids: Tensor, max_length: int | None, *_: Any) -> None:
        self._max_length = max_length
        self._is_cuda, self._device = input_ids.is_cuda, input_ids.device
        # Two of each: one is written while the other is read.
        self._over = [torch.zeros((), dtype=torch.bool, pin_memory=self._is_cuda) for _ in range(2)]
        self._written = [torch.cuda.Event() for _ in range(2)] if self._is_cuda else []  # type: ignore[no-untyped-call]
        self._steps = 0
        self._steps_to_undo = 0

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        return True

    def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        """True if the previous step finished all sequences, or this one reaches the maximum length."""
        this, before = self._steps % 2, (self._steps + 1) % 2
        self._over[this].copy_(unfinished_sequences.max() == 0, non_blocking=True)
        if self._is_cuda:
            # The stream of the tokens' device, which need not be the current one.
            self._written[this].record(torch.cuda.current_stream(self._device))
        self._steps += 1
        if self._steps > 1:
            if self._is_cuda:
                self._written[before].synchronize()
            self._steps_to_undo = int(self._over[before])
        return bool(self._steps_to_undo) or (self._max_length is not None and length >= self._max_length)

    def finish(self) -> int:
        """Return the number of extra steps, which the caller undoes."""
        if self._is_cuda and self._steps:
            # The next generation may use another stream, and overwrites memory that this one's steps still read.
            self._written[(self._steps - 1) % 2].synchronize()
        return self._steps_to_undo


def may_run_late(config: Any, kwargs: Mapping[str, Any], *, cache_is_kept: bool) -> bool:
    """True if an extra step at the end of a generation cannot be observed by anything that it calls or returns.

    Args:
        config: the generation config.
        kwargs: keyword arguments of `_sample`.
        cache_is_kept: True if the user can see the cache, during or after the generation.
    """
    if cache_is_kept or kwargs.get("streamer") is not None or kwargs.get("synced_gpus"):
        return False
    criteria = list(kwargs.get("stopping_criteria") or ())
    if [type(criterion) for criterion in criteria] == [MaxLengthCriteria]:
        return True  # there is no extra step
    # An extra step can be observed by random numbers and by callbacks of the user.
    if getattr(config, "do_sample", True) or not all(map(_has_no_callback, kwargs.get("logits_processor") or ())):
        return False
    return bool(criteria) and all(map(may_be_late, criteria))


def may_be_late(criterion: Any) -> bool:
    """True if it checks end tokens, or a length up to which the model has positions: an extra step needs one more."""
    if type(criterion) is not MaxLengthCriteria:
        return type(criterion) is EosTokenCriteria
    positions = getattr(criterion, "max_position_embeddings", None)
    return positions is None or criterion.max_length <= positions


def _has_no_callback(processor: Any) -> bool:
    """True if the processor is one of transformers' own and holds no function of the user's, such as a constraint."""
    builtin = type(processor).__module__.startswith("transformers.")
    return builtin and not any(map(callable, vars(processor).values()))


def with_late_check(sample: functools.partial[Any]) -> Any:
    """Return transformers' `_sample`, bound to a model, with `LateCheck`; any other function is returned unchanged."""
    function = sample.func
    if function is not GenerationMixin._sample or _CHECK not in function.__code__.co_names:
        return sample
    return functools.partial(with_names(function, {_CHECK: LateCheck}), *sample.args)
