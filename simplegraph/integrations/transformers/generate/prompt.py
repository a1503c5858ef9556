"""Runs short prompts in graphs: for few tokens, a GPU takes far less time than Python takes to launch the kernels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from simplegraph.base.context import CALLS
from simplegraph.base.failures import user_location
from simplegraph.base.nested import flatten
from simplegraph.call.rehearsals import Undo
from simplegraph.device.saved_state import default_generator, drew, random_states
from simplegraph.integrations.rehearsal import observe_run
from simplegraph.integrations.transformers.generate.cache.layers import PLAIN
from simplegraph.integrations.transformers.generate.decoder import ON_THE_WAY
from simplegraph.integrations.transformers.graphed_model import ModelStep
from simplegraph.manager.replay_proof import first_difference

_LENGTHS = (64, 256)  # that prompts are padded to; a GPU takes about as long for fewer tokens
_MAX_TOKENS = 512  # of a padded batch; for more, the GPU takes longer than Python
MAX_ROWS = _MAX_TOKENS // _LENGTHS[0]


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

    The model's own forward serves each number of rows and tokens, until a replay has equalled it.

    Args:
        step: a wrapped `PromptStep`.
        sizes: batch sizes that it captures.

    Attributes:
        step: the same; refusal: why all prefills run eagerly; None if they need not.
    """

    def __init__(self, step: Any, sizes: Sequence[int]) -> None:
        self.step, self._sizes = step, sorted(sizes)
        self.reset()

    def lines(self) -> list[str]:
        """Describe the prefills in a line, once there was one that graphs may serve."""
        if self.refusal:
            return [f"no graphs for prompts: {self.refusal.splitlines()[0]}"]
        return [f"prompts in graphs: {self.step.graph_stats.summary}"] if self._kind else []

    def reset(self) -> None:
        """Drop the graphs; later prefills are compared again."""
        self.step.reset_graphs()
        self.refusal: str | None = None
        self._kind: Any = None  # the class of the model's outputs; None until a prefill was compared
        self._equal: set[torch.Size] = set()  # rows and tokens of which a replay equalled the model's own forward

    def run(self, forward: Callable[..., Any], **kwargs: Any) -> Any:
        """Run a prefill with the arguments of the model's `forward`; returns the model's outputs."""
        length = 0 if self.refusal else self._length(kwargs[self.step.cache_name], **kwargs)
        if not length:
            return forward(**kwargs)
        ids, more = kwargs["input_ids"], length - kwargs["input_ids"].shape[1]
        inputs = (
            functional.pad(ids, (0, more)),
            functional.pad(kwargs["position_ids"], (0, more)),
            torch.full((1,), ids.shape[1] - 1, device=ids.device),
        )
        if ids.shape not in self._equal:
            return self._compared(forward, kwargs, inputs)
        result, replayed = self._try(inputs)
        if replayed:
            return self._outputs(kwargs[self.step.cache_name], ids.shape[1], *result)
        self._equal.clear()  # what was captured has changed
        return forward(**kwargs)

    def _length(
        self,
        self_attention_cache: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        logits_to_keep: Any = None,
        **others: Any,
    ) -> int:
        """Return the padded length of a prefill with these arguments and its own cache; 0 if graphs cannot serve it."""
        unknown = others.keys() - {"use_cache", "return_dict", self.step.cache_name}
        taken = (
            isinstance(input_ids, Tensor)
            and isinstance(position_ids, Tensor)
            and position_ids.shape == input_ids.shape
            and 1 < input_ids.shape[1] <= input_ids.numel() <= _MAX_TOKENS
            and logits_to_keep == 1
            and all(others[name] is None or others[name] is False for name in unknown)
            and all(type(layer) in PLAIN for layer in self_attention_cache.layers)
            and not self_attention_cache.get_seq_length()
            and not torch.is_grad_enabled()
            and (CALLS.context is None or CALLS.context.bypass is None)
            and (attention_mask is None or (attention_mask.shape == input_ids.shape and bool(attention_mask.all())))
        )
        rows = next((size for size in self._sizes if taken and size >= len(input_ids)), _MAX_TOKENS)
        return next((length for length in _LENGTHS if length * rows <= _MAX_TOKENS and length >= input_ids.shape[1]), 0)

    def _try(self, inputs: tuple[Tensor, ...]) -> tuple[Any, bool]:
        """Run the step; returns its result, and True for a replay. A call without a graph refuses later prefills."""
        stats = self.step.graph_stats
        replays, before, result = stats.replays, stats.eager.copy(), None
        try:
            result = self.step(*inputs)
        except Exception as error:
            self.refusal = f"{type(error).__name__}: {error} at {user_location(error)}"
        for reason in set(stats.eager - before) - ON_THE_WAY:
            self.refusal = stats.explained(reason)
        return result, result is not None and stats.replays > replays

    def _compared(self, forward: Callable[..., Any], kwargs: dict[str, Any], inputs: tuple[Tensor, ...]) -> Any:
        """Run a prefill by the model's own forward, and compare the step's result, of which nothing stays."""
        name, ids, model = self.step.cache_name, kwargs["input_ids"], self.step.model
        cache, generators = copy.deepcopy(kwargs[name]), [default_generator(ids.device)]
        states = random_states(generators)
        run = observe_run(model, functools.partial(forward, **kwargs), ids.device)
        outputs, self._kind = run.outputs, type(run.outputs)
        if drew(generators, states) or run.written:
            self.refusal = "the forward draws random numbers, or writes to memory that it does not make"
            return outputs
        with Undo(None, generators) as undo:
            undo.watch(model)
            result, replayed = self._try(inputs)
            if self.refusal is None:
                try:
                    both = self._outputs(cache, ids.shape[1], *result), outputs
                    leaves = [
                        flatten([dict(output, **{name: [*map(vars, output[name].layers)]})])[0] for output in both
                    ]
                    difference = first_difference(*leaves)
                    self.refusal = difference and f"padded to {inputs[0].shape[1]} tokens, {difference}"
                except Exception as error:
                    self.refusal = f"{type(error).__name__}: {error} at {user_location(error)}"
            if self.refusal is None and replayed:
                self._equal.add(ids.shape)
        return outputs

    def _outputs(self, cache: Any, tokens: int, logits: Tensor, states: list[tuple[Tensor, Tensor]]) -> Any:
        """Make the model's outputs from an empty cache and the step's result, of which the first tokens count."""
        for index, pair in enumerate(states):
            cache.update(*(state[:, :, :tokens] for state in pair), index)
        return self._kind(logits=logits.clone(), **{self.step.cache_name: cache})
