"""`graph_encoder`: runs an encoder's calls through graphs, padded to captured batch sizes and lengths."""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from simplegraph.base.errors import ConfigError
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.sizes import default_sizes
from simplegraph.device.protocol import GraphPool
from simplegraph.integrations.lengths import added
from simplegraph.integrations.transformers.encode.lengths import LengthRule, eighths, pad_inputs, read_call
from simplegraph.integrations.transformers.graphed_model import GraphedModel, ModelStep, check_counts, named
from simplegraph.integrations.transformers.refusals import check_model
from simplegraph.manager.jobs import CaptureSummary
from simplegraph.serve.mixin import check_unwrapped, wrap

_SIGNATURES = 4  # of a length: with and without a mask, with some flags
_ROW_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "inputs_embeds")


class EncoderStep(ModelStep):
    """Calls the model's own forward with keyword arguments."""

    def forward(self, **inputs: Any) -> Any:
        """Run the model."""
        return self.run_model(**inputs)


class GraphedEncoder(GraphedModel):
    """Handle of an encoder whose calls go through graphs: has its counters, and `remove` to undo it.

    Args:
        model: the model.
        step: a wrapped `EncoderStep` of the model.
        lengths: lengths in tokens to pad to.
        max_batch_size: rows of the largest batch.
    """

    def __init__(self, model: Any, step: Any, *, lengths: Sequence[int], max_batch_size: int) -> None:
        self._lengths, self._max_batch_size = sorted(lengths), max_batch_size
        self._signature = inspect.signature(type(model).forward)
        self._rules: dict[Hashable, LengthRule] = {}
        self._keeps_masks = getattr(model.config, "_attn_implementation", None) != "sdpa"
        self._pad_token = int(getattr(model.config, "pad_token_id", None) or 0)
        super().__init__(model, step, {"forward": self._forward})

    def capture(
        self,
        sizes: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        *,
        inputs: Collection[str] | None = None,
    ) -> CaptureSummary:
        """Capture all batch sizes and lengths now, so that no later call waits for a capture.

        Made-up tokens are passed, with a mask and, where the encoder tells a batch of full length from others, without.
        The first call of each batch size is still a proof, which runs eagerly.

        Args:
            sizes: batch sizes, in place of those that `graph_encoder` was given; what was captured before is dropped.
            lengths: lengths in tokens, likewise.
            inputs: names of the tensors that later calls pass, of `input_ids`, `attention_mask` and `token_type_ids`;
                None takes the last of them if the model tells segments apart.

        Returns:
            What was captured, and how long it took.

        Raises:
            ConfigError: a size or length is no whole number of at least 1.
        """
        if sizes is not None or lengths is not None:
            lengths = self._lengths if lengths is None else sorted(lengths)
            check_counts("lengths", lengths)
            chosen: Any = {} if sizes is None else {"capture_sizes": sizes}
            self._step.configure_graphs(max_signatures=_SIGNATURES * len(lengths), **chosen)
            self._lengths, self._max_batch_size = lengths, max(sizes or [self._max_batch_size])
        if inputs is None:
            segments = getattr(self.model.config, "type_vocab_size", 0) > 1
            inputs = _ROW_INPUTS[:3] if segments else _ROW_INPUTS[:2]
        summaries = {}
        with torch.no_grad():
            self._check_state()
            for length in (self._lengths[-1], self._lengths[-1] - 1):  # to learn when a mask matters, and what is cut
                self._run_padded(self._step.run_model, self._example(length, inputs))
            for length in reversed(self._lengths):
                example = self._example(length, {*inputs, "attention_mask"})
                summaries[f"{length} tokens"] = self._step.capture_graphs(**example)
                if "attention_mask" not in inputs or not self._keeps_masks:
                    del example["attention_mask"]
                    summaries[f"{length} tokens without a mask"] = self._step.capture_graphs(**example)
        return added(summaries)

    def _example(self, length: int, inputs: Collection[str]) -> dict[str, Tensor]:
        """Make up a batch of the largest size; nothing of it is padding."""
        shape, device = (self._max_batch_size, max(1, length)), self.model.device
        tokens = torch.arange(shape[0] * shape[1], device=device).remainder(self.model.config.vocab_size).view(shape)
        made = tokens, torch.ones_like(tokens), torch.zeros_like(tokens)
        return {name: value for name, value in zip(_ROW_INPUTS, made, strict=False) if name in inputs}

    def _forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call of the model."""
        try:
            self._check_state()
            return self._run_padded(forward, self._by_name(args, kwargs))
        except CannotBind as error:
            self.stats.ran_eagerly(error.reason, error.detail, error.size)
            return forward(*args, **kwargs)

    def _check_state(self) -> None:
        """Refuse a call because of the model's state."""
        if torch.is_grad_enabled():
            raise CannotBind(Reason.GRAD, "")
        check_model(self.model)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not args:
            return kwargs
        call = self._signature.bind(self.model, *args, **kwargs)
        return dict(zip(list(self._signature.parameters)[1:], call.args[1:], strict=False)) | call.kwargs

    def _run_padded(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        inputs, flags, (rows, length) = read_call(given)
        if rows > self._max_batch_size:
            found = f"{rows} rows, the largest is {self._max_batch_size}"
            raise CannotBind(
                Reason.BATCH_TOO_LARGE, f"{found}: raise max_batch_size, or capture_sizes where given", rows
            )
        if length > self._lengths[-1]:
            raise CannotBind(Reason.LENGTH_TOO_LARGE, f"{length} tokens")
        values = tuple(sorted((name, repr(value)) for name, value in flags.items()))
        rule = self._rules.get((tuple(inputs), False, values))
        whole = rule is not None and rule.leaves_whole(length)
        padded = length if whole else self._lengths[bisect.bisect_left(self._lengths, length)]
        mask = inputs.get("attention_mask")
        if mask is not None and mask.shape != (rows, length):  # not one of tokens
            mask = None
        full = pad_inputs(inputs, rows, length, padded, self._pad_token)
        unmasked = padded == length and mask is not None and not self._keeps_masks and bool(mask.all())
        if unmasked:  # as eager goes on without a mask in which nothing is hidden, with other kernels
            del full["attention_mask"]
        elif padded == length:
            return self._step(**full, **flags)
        key = (tuple(inputs), unmasked, values)
        rule = self._rules.get(key)
        if rule is None:
            outputs = forward(**given)
            visible = None if mask is None else mask.bool()
            rule = LengthRule.between(outputs, self._step(**full, **flags), length, padded, visible)
            self._rules[key] = rule
            self._keeps_masks |= unmasked and rule.refuses
            return outputs
        rule.check(length)
        return rule.cut(self._step(**full, **flags), length)


def graph_encoder(
    model: Any,
    *,
    max_batch_size: int = 64,
    lengths: Sequence[int] | None = None,
    capture_sizes: Sequence[int] | None = None,
    pool: GraphPool | None = None,
) -> GraphedEncoder:
    """Run the encoder's calls through CUDA graphs from now on, one graph per padded batch size and length.

    Sequences are padded on the right with tokens that the attention mask hides, and outputs are cut to the real tokens.
    The first padded call of a kind runs twice, unpadded and padded: if the results differ, such calls are not padded,
    and a length gets graphs of its own when it comes again. What a model returns for tokens that the caller's own mask
    hides is not compared, and may differ. A batch of full lengths runs without its mask where the model's own forward
    does.

        with graph_encoder(model) as graphs:
            hidden = model(input_ids, attention_mask=mask).last_hidden_state

    Args:
        model: an encoder of transformers that takes an attention mask, with or without a head; or a sentence encoder
            (``SentenceTransformer``), whose language model is served then, below its `encode`.
        max_batch_size: rows of the largest batch.
        lengths: lengths in tokens to capture; None takes 16, 32, ... in steps of at most an eighth, up to the model's
            `max_position_embeddings`, or 512.
        capture_sizes: batch sizes to capture; None takes the default ones up to `max_batch_size`.
        pool: graph memory to share with other wrappers; see `graph_pool`.

    Returns:
        A handle with `report`, `stats` and `remove`; as a context manager it calls `remove` at the end.

    Raises:
        ConfigError: `model` is no such model, or a setting is invalid.
    """
    model = _language_model(model)
    _check_encoder(model)
    if lengths is None:
        lengths = eighths(getattr(model.config, "max_position_embeddings", None) or 512)
    check_counts("lengths", lengths)
    step = wrap(
        named(EncoderStep, type(model).__name__)(model),
        pool=pool,
        batch_dims=dict.fromkeys(_ROW_INPUTS, 0),
        max_signatures=_SIGNATURES * len(lengths),
        progress=False,
        capture_sizes=capture_sizes or default_sizes(max_batch_size),
    )
    return GraphedEncoder(model, step, lengths=lengths, max_batch_size=max(capture_sizes or [max_batch_size]))


def _language_model(model: Any) -> Any:
    """Return the model of transformers inside a sentence encoder; other models as they are."""
    if isinstance(model, PreTrainedModel) or not callable(getattr(model, "encode", None)):
        return model
    inside = (child for child in getattr(model, "modules", tuple)() if isinstance(child, PreTrainedModel))
    return next(inside, model)  # the outermost comes first


def _check_encoder(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"graph_encoder got a {type(model).__name__}; expected a model of transformers.")
    check_unwrapped(model, "graph_encoder")
    parameters = inspect.signature(type(model).forward).parameters
    if "attention_mask" not in parameters:
        raise ConfigError(f"{type(model).__name__}.forward takes no attention_mask, so its lengths cannot be padded.")
    if not {"input_ids", "inputs_embeds"} & parameters.keys():
        takes = next(iter(list(parameters)[1:]), "nothing")
        raise ConfigError(
            f"graph_encoder pads tokens, and {type(model).__name__}.forward takes {takes}, neither input_ids nor "
            "inputs_embeds: use simplegraph.wrap(model)."
        )
