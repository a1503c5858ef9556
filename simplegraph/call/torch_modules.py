"""Facts about torch's own modules: batch dimensions of their arguments, and numbers that their forwards read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


@dataclasses.dataclass(frozen=True)
class KnownArguments:
    """Facts about a module's arguments that need no declaration.

    Attributes:
        dims: argument name -> number of dimensions -> batch dimension; other numbers of dimensions are not known.
        pads: argument name -> how padding rows are filled.
        compared: names of arguments that the forward compares by identity: it computes otherwise if two are one.
    """

    dims: Mapping[str, Mapping[int, int | None]] = dataclasses.field(default_factory=dict)
    pads: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compared: tuple[str, ...] = ()


NOTHING_KNOWN = KnownArguments()


def known_arguments(module: nn.Module) -> KnownArguments:
    """Return what is known of a module's arguments; nothing if its forward is not one of torch's own."""
    for kind, read in _MODULES.items():
        if isinstance(module, kind) and getattr(type(module), "forward", None) in _forwards(kind):
            return read(module)
    return NOTHING_KNOWN


def _forwards(kind: Any) -> list[Any]:
    """List the forwards of a class of torch's and of those derived from it there."""
    found = [kind, *(child for child in kind.__subclasses__() if child.__module__ == kind.__module__)]
    return [child.forward for child in found]


def _recurrent(module: Any) -> KnownArguments:
    """Know a layer's hidden states, too: (layers, batch, width), whatever `batch_first` says."""
    return KnownArguments({"input": {3: 0 if module.batch_first else 1}, "hx": {3: 1}})


def _cell(module: Any) -> KnownArguments:
    return KnownArguments({"input": {2: 0}, "hx": {2: 0}})


def _embedding_bag(module: Any) -> KnownArguments:
    """Take indices for the rows where offsets tell bags apart: bags are of the key, and have no padding.

    Padding indices would count in the last bag, but for `padding_idx`, and where their weights are zero. In a maximum
    they may count later only, when the weights have changed, so such calls run eagerly.
    """
    pads: dict[str, Any] = {"per_sample_weights": "zero"}
    if module.padding_idx is not None:
        pads["input"] = module.padding_idx
    rows: dict[int, int | None] = {1: 0, 2: 0}
    hidden = module.mode == "max" and module.padding_idx is None
    indices = {1: None, 2: 0} if hidden else rows
    return KnownArguments({"input": indices, "per_sample_weights": rows, "offsets": {1: None}}, pads)


def _attention(module: Any) -> KnownArguments:
    """Know sequences (three dimensions), masks of a batch's keys, and masks that all of a batch share."""
    first = next((child for child in module.modules() if isinstance(child, nn.MultiheadAttention)), None)
    if first is None:  # of layers that are not torch's
        return NOTHING_KNOWN
    sequences = ("query", "key", "value", "src", "tgt", "memory")
    shared = ("attn_mask", "mask", "src_mask", "tgt_mask", "memory_mask")
    padding = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
    dims: dict[str, Mapping[int, int | None]] = {name: {3: 0 if first.batch_first else 1} for name in sequences}
    dims |= {name: {2: None} for name in shared} | {name: {2: 0} for name in padding}
    return KnownArguments(dims, compared=("query", "key", "value") if first is module else ())


_MODULES: dict[type[nn.Module], Callable[[Any], KnownArguments]] = {
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
    nn.EmbeddingBag: _embedding_bag,
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _attention,
    nn.TransformerEncoder: _attention,
    nn.TransformerDecoderLayer: _attention,
    nn.TransformerDecoder: _attention,
    nn.Transformer: _attention,
}
