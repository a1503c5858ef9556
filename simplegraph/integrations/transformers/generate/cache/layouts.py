"""The properties of a generation's cache that its memory at fixed addresses depends on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from simplegraph.reasons import CannotBind, Reason


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """The properties that the memory of one layer's keys and values depends on.

    Attributes:
        key: heads, elements and dtype of keys; value: the same of values, whose dtype differs under autocast.
        window: tokens that the layer's attention reaches back; None if that is unlimited.
    """

    key: tuple[int, int, torch.dtype]
    value: tuple[int, int, torch.dtype]
    device: torch.device
    window: int | None = None

    @classmethod
    def of(cls, layer: Any) -> LayerLayout | None:
        """Derive it from a filled layer of a `DynamicCache`; None if the layer is empty.

        Raises:
            CannotBind: the layer is of another kind.
        """
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or getattr(layer, "record_past", False):
            raise CannotBind(Reason.CACHE_KIND, f"a {type(layer).__name__} in the cache")
        if not layer.is_initialized or layer.keys is None or not layer.keys.numel():
            return None
        key, value = ((part.shape[1], part.shape[3], part.dtype) for part in (layer.keys, layer.values))
        window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None
        return cls(key, value, layer.keys.device, window)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The caches that a `CacheStore` is made for.

    Attributes:
        layers, cross: layouts of the layers of self-attention and of cross-attention; None for an unused layer.
        hidden: elements and dtype of an encoder's hidden states; None without an encoder.
    """

    layers: tuple[LayerLayout | None, ...]
    cross: tuple[LayerLayout | None, ...] = ()
    hidden: tuple[int, torch.dtype] | None = None

    @classmethod
    def of(cls, own: Any, cross: Any, hidden: Tensor | None) -> CacheLayout:
        """Derive it from caches that a prefill filled; `cross` and `hidden` are None without an encoder.

        Raises:
            CannotBind: a layer is of another kind, or the lengths of cross-attention and `hidden` differ.
        """
        layers = tuple(map(LayerLayout.of, own.layers))
        if hidden is None:
            return cls(layers)
        crossed = tuple(map(LayerLayout.of, cross.layers))
        if any(
            used and layer.keys.shape[2] != hidden.shape[1] for used, layer in zip(crossed, cross.layers, strict=True)
        ):
            raise CannotBind(Reason.CACHE_KIND, "cross-attention keys differ in length from the encoder's outputs")
        return cls(layers, crossed, (hidden.shape[2], hidden.dtype))

    @property
    def first(self) -> int:
        """Index of the first used layer of self-attention."""
        return next(index for index, layer in enumerate(self.layers) if layer is not None)

    @property
    def first_layer(self) -> LayerLayout:
        """The layout of that layer."""
        return next(layer for layer in self.layers if layer is not None)
