"""A module that runs a model for one token per row and can be captured: tensors in, logits out, a fixed cache."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from simplegraph.base.config import BatchDim
from simplegraph.fused.layers.kinds import KINDS, ONE_QUERY, TOKEN_KINDS, find_layers, fused_forwards
from simplegraph.fused.layers.layer import Layer
from simplegraph.fused.torch_operators import Operators
from simplegraph.integrations.transformers.generate.cache.store import CacheStore
from simplegraph.integrations.transformers.generate.grouped_heads import grouped_heads
from simplegraph.integrations.transformers.generate.known_length import KnownLength, masked_forwards, unmasked_parts
from simplegraph.integrations.transformers.generate.launch import Launch, Launched, RowState
from simplegraph.integrations.transformers.graphed_model import ModelStep
from simplegraph.integrations.transformers.overrides import override_forwards

CACHE_NAMES = frozenset({"cache", "past_key_values", "cache_params"})  # of the argument that holds a cache, by release
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Arguments of a step that have one entry for every row; the batch is their first dimension.
ROW_INPUTS: Mapping[str, BatchDim] = dict.fromkeys(
    (
        *("order", "carried", "rows", "input_ids", "decoder_input_ids", "position_ids", "decoder_position_ids"),
        *TOKEN_TYPES,
    ),
    0,
)
POSITIONS = ("position_ids", "decoder_position_ids")  # which grow by one from step to step
SHORTEN_MASK = "_get_feature_vector_attention_mask"


class TokenStep(ModelStep):
    """Runs the model's forward for one token per row, on the caches and masks of a `CacheStore`.

    It reads and writes keys and values at `store.position`, which only launches of several steps advance. States are
    overwritten.

    Args:
        model: the model.
        not_fused: names in `KINDS` and `TOKEN_KINDS` of layers that run as the model has them.

    Attributes:
        operators: the fused operators, chosen with the store; fuses: False if nothing is to be fused.
        store: the store to decode from; None until a generation brings its cache.
        ids_name: name of the model's argument that holds a step's tokens.
        shortening: parts of the model that make the mask of an encoder's outputs from the longer one of its inputs.
    """

    writes_padding_rows = True  # to rows of the store that belong to no sequence

    def __init__(self, model: Any, *, not_fused: Collection[str] = ()) -> None:
        super().__init__(model)
        self.store: CacheStore | None = None
        self.operators = Operators()
        self._not_fused = frozenset(not_fused)
        self.fuses = bool({*KINDS, *TOKEN_KINDS} - self._not_fused)
        self.ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        self._masks = _masks_taken(model)
        self._unmasked = unmasked_parts(model)
        self._encodes = bool(model.config.is_encoder_decoder)
        self.shortening = [part for part in model.modules() if hasattr(part, SHORTEN_MASK)]

    def fused_layers(self) -> dict[nn.Module, Layer]:
        """Map the model's layers that run on fused operators to their descriptions."""
        return find_layers(self.model, self._not_fused, tokens=True)

    def forward(
        self,
        span: int,
        source: int,
        order: Tensor | None,
        carried: Mapping[str, Tensor],
        launch: Launch | None = None,
        rows: RowState | None = None,
        **inputs: Any,
    ) -> Tensor | Launched:
        """Compute the logits, (rows, 1, vocabulary), of one token per row; a launch goes on with the tokens it chooses.

        Args:
            span: positions of the cache to attend to.
            source: positions of the encoder's outputs; 0 without an encoder.
            order: (rows,), the row whose tokens and states each row goes on from; None if each goes on from its own.
            carried: the model's own arguments that keep their shape, (rows, ...), from step to step.
            launch: how to take several steps; None to take one.
            rows: the state of each row that a launch needs.
            **inputs: the others, except masks, cache and encoder outputs; (rows, 1), or (rows, kinds, 1) for positions
                of several kinds, which the model takes as (kinds, rows, 1).
        """
        store: Any = self.store
        store.ran = True

        def step(ids: Tensor) -> Tensor:
            logits = self._logits(span, source, order, carried, inputs | {self.ids_name: ids})
            store.position.add_(1)
            inputs.update({name: inputs[name] + 1 for name in POSITIONS if isinstance(inputs.get(name), Tensor)})
            return logits

        with override_forwards(fused_forwards(self.fused_layers(), self.operators)):
            if launch is None or rows is None:
                return self._logits(span, source, order, carried, inputs)
            return launch.run(step, inputs[self.ids_name], rows)

    def _logits(
        self, span: int, source: int, order: Tensor | None, carried: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Compute the logits of one token per row at `store.position`; see `forward`."""
        store: Any = self.store
        count = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor))
        view = store.view(count, span, source)
        if order is not None:
            store.reorder(count, span, order)
        if view.mask is not None:
            view = view._replace(mask=store.show_token(view.mask))
        inputs = {
            name: value.transpose(0, 1) if isinstance(value, Tensor) and value.dim() == 3 else value
            for name, value in inputs.items()
        }
        inputs |= {**carried, **{name: getattr(view, part) for name, part in self._masks.items()}}
        if view.hidden is not None:
            encoded = store.encoder_outputs(view)
            inputs |= {"encoder_outputs": encoded} if self._encodes else {"encoder_hidden_states": encoded[0]}
        forwards = masked_forwards(self._unmasked, store.position, span)
        short, length = dict.fromkeys(self.shortening, _same_mask), KnownLength(store.seen, 1, max(1, span - 1))
        attending = Operators() if ONE_QUERY in self._not_fused else self.operators
        with grouped_heads(attending), override_forwards(forwards), override_forwards(short, SHORTEN_MASK), length:
            outputs = self.run_model(**(inputs | {self.cache_name: view.cache, "return_dict": True}))
        store.check_states(view)
        logits: Tensor = outputs.logits
        return logits


def _same_mask(length: int, mask: Tensor, **_: Any) -> Tensor:
    """Return a mask that is short already."""
    return mask


def _masks_taken(model: Any) -> dict[str, str]:
    """Map the model's mask arguments to the attributes of a `CacheView` that they take."""
    if masks_source(model):
        return {"decoder_attention_mask": "mask", "attention_mask": "source_mask"}
    return {"decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask": "mask"}


def masks_source(model: Any) -> bool:
    """True if the model's cross-attention takes a mask, so that the encoder's outputs can be padded."""
    return bool(
        model.config.is_encoder_decoder
        and "encoder_attention_mask" in inspect.signature(model.get_decoder().forward).parameters
    )
