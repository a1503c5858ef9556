"""One decode step as a module that graphs can be captured from: tensors in, logits out, the cache at hand."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from simplegraph.config import BatchDim
from simplegraph.integrations.transformers.generate.store import Store
from simplegraph.integrations.transformers.kernels.grouped_heads import grouped_heads
from simplegraph.integrations.transformers.kernels.norms import fused, rms_norms
from simplegraph.integrations.transformers.kernels.rotary import rotary_attentions, rotated_together, rotation

# Arguments of a step that have one entry for every row; the batch is their first dimension.
ROW_INPUTS: Mapping[str, BatchDim] = dict.fromkeys(
    ("input_ids", "decoder_input_ids", "position_ids", "decoder_position_ids", "token_type_ids"), 0
)


class DecodeStep(nn.Module):
    """The model's forward for one token a row, on the caches and masks of a `Store`.

    It reads and writes the store at `store.position` and moves nothing on, so that running it again changes nothing.

    Args:
        model: the model.
        forward: its own forward, called with the model first.
        store: what it decodes from.
        fused_kernels: whether rotary embeddings and RMS norms are a kernel each.

    Attributes:
        ran: whether the forward ran, as it does in every call that is not a replay.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], store: Store, *, fused_kernels: bool) -> None:
        super().__init__()
        self.model = model
        self.store = store
        self.ran = False
        self._forward = functools.partial(forward, model)
        self._masks = masks_taken(model, forward)
        self._fused_kernels = fused_kernels
        self.training = False  # the model itself says whether it is

    def forward(self, span: int, source: int, **inputs: Any) -> Tensor:
        """Logits (rows, 1, vocabulary) of one token a row.

        Args:
            span: positions of the cache to attend to.
            source: positions of the encoder's outputs; 0 without an encoder.
            **inputs: the model's own arguments but for masks, cache and encoder outputs.
        """
        self.ran = True
        rows = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor))
        view = self.store.view(rows, span, source)
        view.mask.index_fill_(1, self.store.position, 1)
        inputs |= {name: getattr(view, part) for name, part in self._masks.items()}
        if view.hidden is not None:
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=view.hidden)
        with grouped_heads(), self._fewer_kernels():
            outputs = self._forward(past_key_values=view.cache, **(inputs | {"return_dict": True}))
        logits: Tensor = outputs.logits
        return logits

    @contextlib.contextmanager
    def _fewer_kernels(self) -> Iterator[None]:
        if not self._fused_kernels:
            yield
            return
        triton = self.store.triton
        embedded = rotated_together(rotary_attentions(self.model), rotation(triton=triton))
        with fused(rms_norms(self.model), triton=triton), embedded:
            yield


def masks_taken(model: Any, forward: Callable[..., Any]) -> dict[str, str]:
    """Which argument of the model takes which part of a `View` as its mask."""
    if not model.config.is_encoder_decoder:
        return {"attention_mask": "mask"}
    taken = {"decoder_attention_mask": "mask"}
    if masks_source(model):
        taken["attention_mask"] = "source_mask"
    return taken


def masks_source(model: Any) -> bool:
    """Whether cross-attention takes a mask, so that the encoder's outputs can be padded."""
    if not model.config.is_encoder_decoder:
        return False
    return "encoder_attention_mask" in inspect.signature(model.get_decoder().forward).parameters
