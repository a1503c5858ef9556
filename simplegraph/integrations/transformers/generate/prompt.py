"""Runs short prompts in graphs: a GPU is done with few tokens long before Python has launched the kernels for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from simplegraph.base.failures import user_location
from simplegraph.base.nested import flatten
from simplegraph.integrations.lengths import rehearse
from simplegraph.integrations.transformers.generate.cache.layers import PLAIN
from simplegraph.integrations.transformers.generate.token_step import CACHE_NAMES
from simplegraph.integrations.transformers.graphed_model import ModelStep
from simplegraph.manager.proof import first_difference
from simplegraph.manager.stats import CaptureSummary

_LENGTHS = (64, 256)  # that prompts are padded to; a GPU takes about as long for fewer tokens
_MOST_TOKENS = 512  # of a padded batch; for more, the GPU takes longer than Python
BATCH_DIMS: Mapping[str, Any] = {"ids": 0, "positions": 0, "last": None}  # of a `PromptStep`


class PromptStep(ModelStep):
    """Runs the model's forward for whole prompts, on a new cache: tensors in, tensors out."""

    def forward(self, ids: Tensor, positions: Tensor, last: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute logits, (rows, 1, vocabulary), and each layer's keys and values, (rows, heads, tokens, elements).

        Args:
            ids: (rows, tokens) int64, which may be padded on the right.
            positions: as `ids`; 0 for padding.
            last: (1,) int64, the place of the last token that is no padding.
        """
        cache = DynamicCache()
        outputs = self.run_model(
            input_ids=ids,
            position_ids=positions,
            logits_to_keep=last,
            use_cache=True,
            return_dict=True,
            **{self.cache_name: cache},
        )
        return outputs.logits, [(layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]


class Prompts:
    """Runs the prefills of generations: by graphs if they are short, have no padding, and fill keys and values alone.

    The first such one of each padded length runs by the model's own forward, and is compared.

    Args:
        step: a wrapped `PromptStep`.

    Attributes:
        step: the same; refusal: why all prefills run eagerly; None if they need not.
    """

    def __init__(self, step: Any) -> None:
        self.step = step
        self.reset()

    def __str__(self) -> str:
        return (
            f"no graphs for prompts: {self.refusal}"
            if self.refusal
            else f"prompts in graphs: {self.step.graph_stats.summary}"
        )

    def reset(self) -> None:
        """Drop the graphs; the next prefills that they can serve are compared again."""
        self.step.reset_graphs()
        self.refusal: str | None = None
        self._kinds: dict[int, Any] = {}  # padded lengths that were compared -> the class of the model's outputs

    def use_sizes(self, sizes: Sequence[int]) -> None:
        """Pad batches to those of these sizes that are small enough."""
        small = [size for size in sizes if size * _LENGTHS[0] <= _MOST_TOKENS]
        self.step.configure_graphs(capture_sizes=small or [min(sizes)])

    def run(self, forward: Callable[..., Any], **kwargs: Any) -> Any:
        """Run a prefill with the arguments of the model's `forward`; returns the model's outputs."""
        cache = kwargs[self.step.cache_name]
        length = 0 if self.refusal else self._length(cache, **kwargs)
        if not length:
            return forward(**kwargs)
        inputs = _padded(kwargs["input_ids"], kwargs["position_ids"], length)
        if length not in self._kinds:
            return self._compared(forward, kwargs, inputs)
        outputs = self._outputs(self._kinds[length], cache, kwargs["input_ids"].shape[1], *self.step(*inputs))
        self.refusal = next((str(error) for error in self.step.graph_stats.failures.values()), None)
        return outputs

    def capture(self, device: torch.device) -> dict[str, CaptureSummary]:
        """Capture all batch sizes at the lengths that were compared, if prefills of a model on `device` have graphs."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        lengths = () if self.refusal else sorted(self._kinds, reverse=True)
        return {f"prompts of {each}": self.step.capture_graphs(*_padded(ids, ids, each)) for each in lengths}

    def _length(
        self,
        own: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        logits_to_keep: Any = None,
        **others: Any,
    ) -> int:
        """Return the padded length of a prefill with these arguments, and this cache of its own; 0 without a graph."""
        unknown = others.keys() - {"use_cache", "return_dict", self.step.cache_name}
        taken = (
            isinstance(input_ids, Tensor)
            and isinstance(position_ids, Tensor)
            and position_ids.shape == input_ids.shape
            and input_ids.shape[1] > 1
            and logits_to_keep == 1
            and all(others[name] is None or others[name] is False for name in unknown)
            and all(type(layer) in PLAIN for layer in own.layers)
            and not own.get_seq_length()
            and (attention_mask is None or (attention_mask.shape == input_ids.shape and bool(attention_mask.all())))
        )
        fitting = (each for each in _LENGTHS if each >= input_ids.shape[1] and each * len(input_ids) <= _MOST_TOKENS)
        return next(fitting, 0) if taken else 0

    def _compared(self, forward: Callable[..., Any], kwargs: dict[str, Any], inputs: tuple[Tensor, ...]) -> Any:
        """Run a prefill by the model's own forward, and compare what the step makes of it."""
        name = self.step.cache_name
        cache = copy.deepcopy(kwargs[name])
        outputs = forward(**kwargs)
        kind = self._kinds[inputs[0].shape[1]] = type(outputs)
        try:
            run = rehearse(self.step, inputs, {}, inputs[0].device)
            served = self._outputs(kind, cache, kwargs["input_ids"].shape[1], *run.spec.unflatten(run.leaves))
            found = first_difference(*(_leaves(each, each[name]) for each in (served, outputs)))
            self.refusal = found and f"padded to {inputs[0].shape[1]} tokens, {found}"
        except Exception as error:
            self.refusal = f"{type(error).__name__}: {error} at {user_location(error)}"
        return outputs

    def _outputs(self, kind: Any, cache: Any, tokens: int, logits: Tensor, states: list[tuple[Tensor, Tensor]]) -> Any:
        """Make the model's outputs of what the step returned, of which the first tokens count, and an empty cache."""
        for index, pair in enumerate(states):
            cache.update(*(state[:, :, :tokens] for state in pair), index)
        return kind(logits=logits, **{self.step.cache_name: cache})


def _padded(ids: Tensor, positions: Tensor, length: int) -> tuple[Tensor, ...]:
    """Return a step's arguments, padded to a length."""
    padded = (functional.pad(each, (0, length - ids.shape[1])) for each in (ids, positions))
    return *padded, torch.full((1,), ids.shape[1] - 1, device=ids.device)


def _leaves(outputs: Any, cache: Any) -> list[Any]:
    """List what a model returned, its cache's contents included."""
    return flatten([{**outputs, **dict.fromkeys(CACHE_NAMES)}, *map(vars, cache.layers)])[0]
