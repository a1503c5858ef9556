"""The properties of a generation's cache that its memory at fixed addresses depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from simplegraph.base.reasons import CannotBind, Reason

# Layers of keys and values, and those that have states beside them; older releases lack the latter.
_HYBRIDS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_KEYED: tuple[Any, ...] = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *(getattr(cache_utils, name) for name in _HYBRIDS if hasattr(cache_utils, name)),
)
_ANY_ELEMENTS = 64
# Attributes of layers that `FixedLayer` stands in for.
_NO_STATES = {"keys", "values", "cumulative_length", "is_initialized", "sliding_window", "_sliding_window_tensor"}


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
        """Derive it from a filled layer of a `DynamicCache`; None if the layer is empty, or has states only.

        Raises:
            CannotBind: the layer is of another kind.
        """
        if getattr(layer, "record_past", False) or not (_has_states_only(layer) or type(layer) in _KEYED):
            raise CannotBind(Reason.GENERATION, f"a {type(layer).__name__} in the cache")
        if _has_states_only(layer) or not layer.is_initialized or layer.keys is None or not layer.keys.numel():
            return None
        key, value = ((part.shape[1], part.shape[3], part.dtype) for part in (layer.keys, layer.values))
        window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None
        return cls(key, value, layer.keys.device, window)


Part = tuple[str, Any]  # a layer's attribute, and the key of a tensor in it; None if it is the tensor


@dataclasses.dataclass(frozen=True)
class StatesLayout:
    """The states of one layer: tensors that do not grow, which each step overwrites, as state space models have them.

    Attributes:
        kind: the layer's class.
        parts: the tensors' places in the layer -> (shape of one row, dtype, device).
        settings: all other attributes of the layer, as text.
        attributes: those attributes, without the tensors.
    """

    kind: type
    parts: tuple[tuple[Part, tuple[tuple[int, ...], torch.dtype, torch.device]], ...]
    settings: str
    attributes: Mapping[str, Any] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, layer: Any) -> StatesLayout | None:
        """Derive it from a layer that a prefill filled; None if layers of this kind have keys and values only."""
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            return None
        tensors = state_tensors(layer)
        parts = tuple((part, (tuple(state.shape[1:]), state.dtype, state.device)) for part, state in tensors.items())
        names = {name for name, _ in tensors}
        plain = {name: value for name, value in _own_attributes(layer).items() if name not in names}
        rest = {name: dict.fromkeys(vars(layer)[name]) for name, key in tensors if key is not None}
        # Containers are those of this generation's layer.
        copies = {name: dict(value) if isinstance(value, dict) else value for name, value in (plain | rest).items()}
        return cls(type(layer), parts, repr(sorted(plain.items())), copies)


def state_tensors(layer: Any) -> dict[Part, Tensor]:
    """Map places in a cache's layer to the tensors of its states; keys and values are none of them."""
    found: dict[Part, Tensor] = {}
    for name, value in _own_attributes(layer).items():
        items = value.items() if isinstance(value, dict) else [(None, value)]
        found |= {(name, key): tensor for key, tensor in items if isinstance(tensor, Tensor)}
    return found


def set_state(layer: Any, part: Part, tensor: Tensor) -> None:
    """Put a tensor in a place of a cache's layer."""
    name, key = part
    if key is None:
        setattr(layer, name, tensor)
    else:
        vars(layer)[name][key] = tensor


def cached_length(cache: Any) -> int:
    """Return the number of tokens in a cache; 1 for one that was filled with states only, which have no length."""
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return int(cache.get_seq_length())
    return int(any(map(state_tensors, cache.layers)))


def _own_attributes(layer: Any) -> dict[str, Any]:
    """Return a layer's attributes without those that a `FixedLayer` has in its place."""
    taken = () if _has_states_only(layer) else _NO_STATES
    return {name: value for name, value in vars(layer).items() if name not in taken}


def _has_states_only(layer: Any) -> bool:
    return not isinstance(layer, CacheLayerMixin)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The caches that a `CacheStore` is made for.

    Attributes:
        layers, cross: layouts of the layers of self-attention and of cross-attention; None for an unused layer.
        states: layouts of the states in the layers of self-attention; None for a layer without.
        hidden: elements and dtype of an encoder's hidden states, and the class of its outputs; None without an encoder.
    """

    layers: tuple[LayerLayout | None, ...]
    states: tuple[StatesLayout | None, ...]
    cross: tuple[LayerLayout | None, ...] = ()
    hidden: tuple[int, torch.dtype, type] | None = None

    @classmethod
    def of(cls, own: Any, cross: Any, hidden: Tensor | None, outputs: type) -> CacheLayout:
        """Derive it from caches that a prefill filled; `cross` and `hidden` are None without an encoder.

        Raises:
            CannotBind: a layer is of another kind, or the lengths of cross-attention and `hidden` differ.
        """
        layers, states = tuple(map(LayerLayout.of, own.layers)), tuple(map(StatesLayout.of, own.layers))
        if hidden is None:
            return cls(layers, states)
        crossed = tuple(map(LayerLayout.of, cross.layers))
        if any(
            used and layer.keys.shape[2] != hidden.shape[1] for used, layer in zip(crossed, cross.layers, strict=True)
        ):
            raise CannotBind(Reason.GENERATION, "cross-attention keys differ in length from the encoder's outputs")
        return cls(layers, states, crossed, (hidden.shape[2], hidden.dtype, outputs))

    @property
    def first(self) -> int | None:
        """Index of the first layer of self-attention with keys and values; None if all have states only."""
        return next((index for index, layer in enumerate(self.layers) if layer is not None), None)

    @property
    def kept(self) -> tuple[int, torch.dtype, torch.device]:
        """Elements of a head of the first used layer, its dtype and device; of any width if it has states only.

        Raises:
            CannotBind: the cache is empty.
        """
        for layer, states in zip(self.layers, self.states, strict=True):
            if layer is not None:
                return layer.key[1], layer.key[2], layer.device
            if states is not None and states.parts:
                _, dtype, device = states.parts[0][1]
                return _ANY_ELEMENTS, dtype, device
        raise CannotBind(Reason.GENERATION, "an empty cache: the model keeps what it remembers elsewhere")
