"""Runs short prompts in graphs: a GPU is done with few tokens long before Python has launched the kernels for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from simplegraph.base.context import CALLS
from simplegraph.base.failures import user_location
from simplegraph.base.nested import flatten
from simplegraph.call.memory import Undo
from simplegraph.device.memory import default_generator, drew, random_states
from simplegraph.integrations.lengths import rehearse
from simplegraph.integrations.transformers.generate.cache.layers import PLAIN
from simplegraph.integrations.transformers.generate.decoder import ON_THE_WAY
from simplegraph.integrations.transformers.generate.token_step import CACHE_NAMES
from simplegraph.integrations.transformers.graphed_model import ModelStep
from simplegraph.manager.proof import first_difference
from simplegraph.manager.stats import CaptureSummary
from simplegraph.program.snapshot import Snapshot

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

    The model's own forward serves, until a replay of the batch size and padded length has equalled it.

    Args:
        step: a wrapped `PromptStep`.
        sizes: batch sizes to capture.

    Attributes:
        step: the same; refusal: why all prefills run eagerly; None if they need not.
    """

    def __init__(self, step: Any, sizes: Sequence[int]) -> None:
        self.step = step
        self.use_sizes(sizes)
        self.reset()

    def lines(self) -> list[str]:
        """Say in a line what came of prefills, once there was one that graphs may serve."""
        if self.refusal:
            return [f"no graphs for prompts: {self.refusal}"]
        return [f"prompts in graphs: {self.step.graph_stats.summary}"] if self._came else []

    def reset(self) -> None:
        """Drop the graphs; later prefills are compared again."""
        self.step.reset_graphs()
        self.refusal: str | None = None
        self._kind: Any = None  # the class of the model's outputs
        self._came: set[int] = set()  # padded lengths
        self._equal: set[tuple[int, int]] = set()  # batch sizes and padded lengths with such a replay

    def use_sizes(self, sizes: Sequence[int]) -> None:
        """Pad batches to those of these sizes that are small enough."""
        self._sizes = sorted(size for size in sizes if size * _LENGTHS[0] <= _MOST_TOKENS)
        self.step.configure_graphs(capture_sizes=self._sizes or [min(sizes)])

    def run(self, forward: Callable[..., Any], **kwargs: Any) -> Any:
        """Run a prefill with the arguments of the model's `forward`; returns the model's outputs."""
        cache = kwargs[self.step.cache_name]
        shape = None if self.refusal else self._shape(cache, **kwargs)
        if shape is None:
            return forward(**kwargs)
        ids, positions = kwargs["input_ids"], kwargs["position_ids"]
        inputs = _padded(ids, positions, shape[1])
        if shape not in self._equal:
            return self._compared(forward, kwargs, shape, inputs)
        result, replayed = self._try(inputs)
        if replayed:
            return self._outputs(cache, ids.shape[1], *result)
        self._equal.clear()  # what was captured has changed
        return forward(**kwargs)

    def capture(self, device: torch.device) -> dict[str, CaptureSummary]:
        """Capture all batch sizes at the padded lengths that came, unless prefills of the model run eagerly."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        lengths = () if self.refusal else sorted(self._came, reverse=True)
        return {f"prompts of {each}": self.step.capture_graphs(*_padded(ids, ids, each)) for each in lengths}

    def _shape(
        self,
        own: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        logits_to_keep: Any = None,
        **others: Any,
    ) -> tuple[int, int] | None:
        """Return the padded rows and length of a prefill with these arguments and its cache; None without graphs."""
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
            and not torch.is_grad_enabled()
            and (CALLS.context is None or CALLS.context.bypass is None)
            and (attention_mask is None or (attention_mask.shape == input_ids.shape and bool(attention_mask.all())))
        )
        if not taken:
            return None
        rows = next((size for size in self._sizes if size >= len(input_ids)), _MOST_TOKENS)
        fitting = (each for each in _LENGTHS if each >= input_ids.shape[1] and each * rows <= _MOST_TOKENS)
        return next(((rows, length) for length in fitting), None)

    def _try(self, inputs: tuple[Tensor, ...]) -> tuple[Any, bool]:
        """Run the step; returns its result, and True for a replay's. What leads to no graph refuses later prefills."""
        stats = self.step.graph_stats
        replays, before, result = stats.replays, stats.eager.copy(), None
        try:
            result = self.step(*inputs)
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error} at {user_location(error)}")
        for reason in set(stats.eager - before) - ON_THE_WAY:
            self._refuse(stats.explained(reason))
        return result, result is not None and stats.replays > replays

    def _refuse(self, why: str) -> None:
        self.refusal = why.strip().splitlines()[0]

    def _compared(
        self, forward: Callable[..., Any], kwargs: dict[str, Any], shape: tuple[int, int], inputs: tuple[Tensor, ...]
    ) -> Any:
        """Run a prefill by the model's own forward, and compare what the step makes of it, of which nothing stays."""
        cache, buffers = copy.deepcopy(kwargs[self.step.cache_name]), list(self.step.model.buffers())
        generators = [default_generator(inputs[0].device)]
        states, versions = random_states(generators), [each._version for each in buffers]
        outputs = forward(**kwargs)
        if drew(generators, states) or versions != [each._version for each in buffers]:
            self._refuse("the forward draws random numbers, or writes to a buffer")
            return outputs
        self._kind = type(outputs)
        self._came.add(shape[1])
        after = Snapshot(self.step.model)
        with Undo(None, generators) as undo:
            undo.callback(lambda: after.put_back(after.changes()))
            result, replayed = self._try(inputs)
            if self.refusal is None:
                self._judge(outputs, cache, kwargs["input_ids"], kwargs["position_ids"], shape, result, replayed)
        return outputs

    def _judge(
        self,
        outputs: Any,
        cache: Any,
        ids: Tensor,
        positions: Tensor,
        shape: tuple[int, int],
        result: Any,
        replayed: bool,
    ) -> None:
        """Compare a result with the model's own outputs, and, after a replay, what padding changes for two tokens.

        A model may do otherwise with few tokens than with many, and this prompt may be as long as a padded one.
        """
        try:
            served = self._outputs(cache, ids.shape[1], *result)
            found = first_difference(*(_leaves(each, each[self.step.cache_name]) for each in (served, outputs)))
            if found is None and replayed:
                short = ids[:, :2], positions[:, :2]
                whole, padded = (rehearse(self.step, _padded(*short, each), {}, ids.device) for each in (2, shape[1]))
                cut = [padded.leaves[0], *(leaf[:, :, :2] for leaf in padded.leaves[1:])]
                otherwise = sorted(whole.left_otherwise(padded))
                found = first_difference(cut, whole.leaves) or (f"{otherwise[0]} differs" if otherwise else None)
        except Exception as error:
            found = f"{type(error).__name__}: {error} at {user_location(error)}"
        if found is not None:
            self._refuse(f"padded to {shape[1]} tokens, {found}")
        elif replayed:
            self._equal.add(shape)

    def _outputs(self, cache: Any, tokens: int, logits: Tensor, states: list[tuple[Tensor, Tensor]]) -> Any:
        """Make the model's outputs of what the step returned, of which the first tokens count, and an empty cache."""
        for index, pair in enumerate(states):
            cache.update(*(state[:, :, :tokens] for state in pair), index)
        return self._kind(logits=logits.clone(), **{self.step.cache_name: cache})


def _padded(ids: Tensor, positions: Tensor, length: int) -> tuple[Tensor, ...]:
    """Return a step's arguments, padded to a length."""
    padded = (functional.pad(each, (0, length - ids.shape[1])) for each in (ids, positions))
    return *padded, torch.full((1,), ids.shape[1] - 1, device=ids.device)


def _leaves(outputs: Any, cache: Any) -> list[Any]:
    """List what a model returned, its cache's contents included."""
    return flatten([{**outputs, **dict.fromkeys(CACHE_NAMES)}, *map(vars, cache.layers)])[0]
