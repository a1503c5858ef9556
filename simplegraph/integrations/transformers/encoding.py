"""`graph_encoder`: runs an encoder's calls through graphs, padded to captured batch sizes and lengths."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from simplegraph.base.errors import ConfigError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.sizes import default_sizes
from simplegraph.device.protocol import GraphPool
from simplegraph.integrations.lengths import (
    CapturedLengths,
    PaddedOutputs,
    added,
    cut_outputs,
    grown_dims,
    padded_leaf,
    unlike_effects,
)
from simplegraph.integrations.rehearsal import RunEffects, observe_run, rehearse
from simplegraph.integrations.transformers.graphed_model import GraphedModel, ModelStep, check_counts, named
from simplegraph.integrations.transformers.refusals import check_model
from simplegraph.manager.replay_proof import first_difference
from simplegraph.manager.stats import CaptureSummary
from simplegraph.serve.wrap import check_unwrapped, wrap

_SIGNATURES = 4  # of a length: with and without a mask, with some flags
_SEQUENCES = ("input_ids", "inputs_embeds")  # the first of these that is given defines batch size and length
_NEVER_PADDED = ("labels", "cache", "past_key_values", "encoder_hidden_states", "encoder_attention_mask")
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
        new_outputs = functools.partial(TokenOutputs, step._graph_runner.config.verify)
        self._captured, self._max_batch_size = CapturedLengths(lengths, new_outputs), max_batch_size
        self._signature = inspect.signature(type(model).forward)
        self._keeps_masks = getattr(model.config, "_attn_implementation", None) != "sdpa"
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
        The first call of each batch size is still a proof, which runs eagerly, and so is the first of each length.

        Args:
            sizes: batch sizes, in place of the sizes of `graph_encoder`; earlier captures are dropped.
            lengths: lengths in tokens, likewise.
            inputs: names of the tensors that later calls pass, of `input_ids`, `attention_mask` and `token_type_ids`;
                None takes the last of them if the model tells segments apart.

        Returns:
            The captures, and the time that they took.

        Raises:
            ConfigError: a size or length is no whole number of at least 1.
        """
        if sizes is not None or lengths is not None:
            lengths = self._captured.lengths if lengths is None else sorted(lengths)
            check_counts("lengths", lengths)
            self._step.configure_graphs(
                max_signatures=_SIGNATURES * len(lengths), **({} if sizes is None else {"capture_sizes": sizes})
            )
            self._captured.lengths, self._max_batch_size = lengths, max(sizes or [self._max_batch_size])
        if inputs is None:
            inputs = _ROW_INPUTS[: 3 if getattr(self.model.config, "type_vocab_size", 0) > 1 else 2]
        summaries = {}
        with torch.no_grad():
            self._check_state()
            longest = self._captured.lengths[-1]
            for length in (longest, longest - 1):  # to learn when a mask matters, and the cuts
                self._learn(self._example(length, inputs))
            for length in reversed(self._captured.lengths):
                example = self._example(length, {*inputs, "attention_mask"})
                summaries[f"{length} tokens"] = self._step.capture_graphs(**example)
                if "attention_mask" not in inputs or not self._keeps_masks:
                    del example["attention_mask"]
                    summaries[f"{length} tokens without a mask"] = self._step.capture_graphs(**example)
        return added(summaries)

    def _learn(self, example: dict[str, Tensor]) -> None:
        """Compare a made-up call, unpadded and padded, unless such a call was compared; nothing of it stays."""
        call = self._read(example)
        if call.key is None:
            return
        rule = self._captured.outputs(call.key)
        if rule.refusal is None and rule.sizes(call) is None:
            run, leaves = functools.partial(self._step.run_model, **example), flatten(example)[0]
            self._compare(rule, call, functools.partial(rehearse, self.model, run, leaves, self.model.device))

    def _example(self, length: int, inputs: Collection[str]) -> dict[str, Tensor]:
        """Make up a batch of the largest size; nothing of it is padding."""
        shape, device = (self._max_batch_size, max(1, length)), self.model.device
        tokens = torch.arange(shape[0] * shape[1], device=device).remainder(self.model.config.vocab_size).view(shape)
        made = zip(_ROW_INPUTS, (tokens, torch.ones_like(tokens), torch.zeros_like(tokens)), strict=False)
        return {name: value for name, value in made if name in inputs}

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
        """Run a call by the step, padded; or by the model's own forward, to learn how outputs are cut."""
        call = self._read(given)
        if call.key is None:
            return self._step(**call.inputs)
        rule = self._captured.outputs(call.key)
        if rule.refusal is not None and rule.refusal.reason is Reason.LENGTH_PADDING:
            rule.unpadded.add(call.length)
        why = rule.why_compared(call)
        if why is not None:
            self.stats.ran_eagerly(why, size=call.rows)
            observe = functools.partial(observe_run, self.model, functools.partial(forward, **given), self.model.device)
            with self._step._graph_runner.running(self._step):
                return self._compare(rule, call, observe)
        leaves, spec = flatten(self._step(**call.inputs))
        return spec.unflatten(cut_outputs(leaves, rule.sizes(call) or {}))

    def _read(self, given: dict[str, Any]) -> PaddedTokens:
        """Read and pad a call.

        Raises:
            CannotBind: it is too large, or cannot be padded.
        """
        inputs, flags, (rows, length) = _read_call(given)
        if rows > self._max_batch_size:
            size = f"{rows} rows, the largest is {self._max_batch_size}"
            raise CannotBind(
                Reason.BATCH_TOO_LARGE, f"{size}: raise max_batch_size, or capture_sizes where given", rows
            )
        padded = self._captured.holding(length)
        state = self._step._graph_runner.python_state(self._step)
        values = state, tuple(sorted((name, repr(value)) for name, value in flags.items()))
        if padded > length and length in self._captured.outputs((tuple(inputs), False, values)).unpadded:
            padded = length
        mask = inputs.get("attention_mask")
        if mask is not None and mask.shape != (rows, length):  # not a mask of tokens
            mask = None
        pad_token = int(getattr(self.model.config, "pad_token_id", None) or 0)
        full = _pad_inputs(inputs, rows, length, padded, pad_token)
        unmasked = padded == length and mask is not None and not self._keeps_masks and bool(mask.all())
        if unmasked:  # eager drops a mask that hides nothing, and uses other kernels then
            del full["attention_mask"]
        key = (tuple(inputs), unmasked, values) if unmasked or padded > length else None
        return PaddedTokens(full | flags, rows, length, padded, key, unmasked, None if mask is None else mask.bool())

    def _compare(self, rule: TokenOutputs, call: PaddedTokens, observe: Callable[[], RunEffects]) -> Any:
        """Rehearse a padded call, and run it unpadded; return the latter's outputs."""
        step = functools.partial(self._step.run_model, **call.inputs)
        rehearsed = functools.partial(rehearse, self.model, step, flatten(call.inputs)[0], self.model.device)
        outputs = rule.compare(call, rehearsed, observe)
        self._keeps_masks |= call.unmasked and rule.refusal is not None
        return outputs


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
    The first padded call of a kind, of each of the lengths, and one now and then run twice, unpadded and padded: if the
    results differ, or an operator picks among all tokens, as a maximum does, such calls are not padded, and a length
    gets graphs of its own when it comes again. What a model returns for tokens that the caller's own mask
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
        raise ConfigError(
            f"graph_encoder pads tokens, and {type(model).__name__}.forward takes {[*parameters, 'nothing'][1]}, "
            "neither input_ids nor inputs_embeds: use simplegraph.wrap(model)."
        )


# The inputs and outputs of one call.


def _read_call(given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], tuple[int, int]]:
    """Return the tensors of a call, its other arguments, and its rows and length in tokens.

    Raises:
        CannotBind: the call has no sequence, or an argument that cannot be padded with it.
    """
    sequence = next((given[name] for name in _SEQUENCES if given.get(name) is not None), None)
    if not isinstance(sequence, Tensor) or sequence.dim() < 2:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, "neither input_ids nor inputs_embeds")
    rows, length = sequence.shape[:2]
    inputs, flags = {}, {}
    for name, value in given.items():
        if value is None:
            continue
        if name in _NEVER_PADDED:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} was given")
        if not isinstance(value, Tensor):
            if type(value).__hash__ is None and not isinstance(value, (list, dict)):
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(value).__name__}")
            flags[name] = value
        elif value.shape[:2] == (rows, length) and value.dim() <= sequence.dim():
            inputs[name] = value
        else:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} of shape {tuple(value.shape)}")
    return inputs, flags, (rows, length)


def _pad_inputs(inputs: dict[str, Tensor], rows: int, length: int, padded: int, pad_token: int) -> dict[str, Tensor]:
    """Pad inputs (rows, length, ...) on the right, and add a mask of the real tokens if none is given.

    Args:
        inputs: the tensors, by name.
        rows: rows of the inputs.
        length: length of the inputs in tokens.
        padded: the length to pad to; nothing is done if it is the same.
        pad_token: fills the padding of `input_ids`; other inputs get zeros.
    """
    if padded == length:
        return inputs
    first = next(iter(inputs.values()))
    if "attention_mask" not in inputs:
        inputs = inputs | {"attention_mask": torch.ones(rows, length, dtype=torch.int64, device=first.device)}
    return {
        name: padded_leaf(value, 1, padded - length, pad_token if name == "input_ids" else 0)
        for name, value in inputs.items()
    }


class PaddedTokens(NamedTuple):
    """A call, read and padded.

    Attributes:
        inputs: the arguments, padded.
        rows, length: of the call, the latter in tokens.
        padded: the length that it is padded to.
        key: tells such calls from others, whatever their sizes; None if nothing of it is padded or left out.
        unmasked: True if its mask, which hides nothing, is left out.
        visible: (rows, length), the caller's mask; the tokens that it hides affect only the length.
    """

    inputs: dict[str, Any]
    rows: int
    length: int
    padded: int
    key: Hashable
    unmasked: bool
    visible: Tensor | None

    @property
    def said(self) -> str:
        """Describe what differs from the caller's own call."""
        return f"from {self.length} to {self.padded} tokens" if self.padded > self.length else "without the mask"


class TokenOutputs(PaddedOutputs):
    """Cuts the outputs of padded calls of one kind to the call's length in tokens.

    Args:
        verify: the setting.

    Attributes:
        unpadded: refused lengths that get graphs without padding when they come again.
    """

    def __init__(self, verify: int) -> None:
        super().__init__(verify)
        self.unpadded = set[int]()
        self._grown: list[tuple[int, int]] | None = None  # the dimensions that grow with the length, by output

    def sizes(self, call: PaddedTokens) -> dict[tuple[int, int], int] | None:
        """Return the sizes that padding changes, by output and dimension; None before a comparison."""
        return None if self._grown is None else dict.fromkeys(self._grown, call.length)

    def _difference(self, call: PaddedTokens, run: RunEffects, padded_run: RunEffects) -> str | None:
        pairs = zip(run.leaves, padded_run.leaves, strict=True)
        grown = [(index, dim) for index, pair in enumerate(pairs) for dim in grown_dims(*pair)]
        if self._grown not in (None, grown):
            return "other dimensions of the outputs grow than from other lengths"
        self._grown = grown
        for index, dim in grown:
            leaf, other = run.leaves[index], padded_run.leaves[index]
            if (leaf.shape[dim], other.shape[dim]) != (call.length, call.padded):
                return f"an output of shape {tuple(leaf.shape)} has shape {tuple(other.shape)}"
        cut = cut_outputs(padded_run.leaves, dict.fromkeys(grown, call.length))
        compared = (_without_hidden(call.visible, leaves, grown) for leaves in (cut, run.leaves))
        return first_difference(*compared) or unlike_effects(run, padded_run)


def _without_hidden(visible: Tensor | None, leaves: Sequence[Any], grown: Sequence[tuple[int, int]]) -> list[Any]:
    """Zero the values of outputs for tokens that the mask hides, in all dimensions that follow the length."""
    leaves = list(leaves)
    if visible is None:
        return leaves
    for index, dim in grown:
        leaf = leaves[index]
        if leaf.shape[0] == visible.shape[0]:
            shape = [size if at in (0, dim) else 1 for at, size in enumerate(leaf.shape)]
            leaves[index] = leaf.masked_fill(~visible.view(shape), 0)
    return leaves


def eighths(largest: int) -> list[int]:
    """List 16, 32 and so on up to `largest`, each at most an eighth of a power of two above the one before."""
    lengths, length = [], 16
    while length < largest:
        lengths.append(length)
        length += max(16, (1 << length.bit_length() - 1) // 8)
    return [*lengths, largest]
