"""Layers of a cache at fixed addresses, as models see them, and the properties that their memory depends on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from simplegraph.base.reasons import CannotBind, Reason

# Layers of keys and values, and layers that also have states; older releases lack the latter.
PLAIN: tuple[Any, ...] = (DynamicLayer, DynamicSlidingWindowLayer)
_HYBRIDS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_KEYED = (*PLAIN, *(getattr(cache_utils, name) for name in _HYBRIDS if hasattr(cache_utils, name)))
_ANY_ELEMENTS = 64
# Attributes of layers that `FixedLayer` stands in for.
_NO_STATES = {"keys", "values", "cumulative_length", "is_initialized", "sliding_window", "_sliding_window_tensor"}

Part = tuple[str, Any]  # a layer's attribute, and the key of a tensor in it; None if it is the tensor
KEYS_AND_VALUES: tuple[Part, Part] = (("keys", None), ("values", None))


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """The tensors of one layer: keys and values, which grow, and states, which each step overwrites.

    Attributes:
        kind: the layer's class.
        parts: the tensors' places in the layer -> (shape of one row, dtype, device): keys and values first, if it is
            used, whose shape is (heads, None, elements), and whose dtypes differ under autocast; then its states.
        window: tokens that the layer's attention reaches back; None if that is unlimited.
        settings: all other attributes of a layer that can have states, as text, which is safe to compare.
        attributes: the attributes that `settings` shows as text, without the tensors.
    """

    kind: type
    parts: tuple[tuple[Part, tuple[tuple[int | None, ...], torch.dtype, torch.device]], ...]
    window: int | None = None
    settings: str = ""
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, layer: Any) -> LayerLayout:
        """Derive it from a layer that a prefill filled.

        Raises:
            CannotBind: the layer is of another kind.
        """
        keyed, window = not _has_states_only(layer), None
        if getattr(layer, "record_past", False) or (keyed and type(layer) not in _KEYED):
            raise CannotBind(Reason.GENERATION, f"a {type(layer).__name__} in the cache")
        parts: list[Any] = []
        if keyed and layer.is_initialized and layer.keys is not None and layer.keys.numel():
            parts = [
                (part, ((tensor.shape[1], None, tensor.shape[3]), tensor.dtype, tensor.device))
                for part, tensor in zip(KEYS_AND_VALUES, (layer.keys, layer.values), strict=True)
            ]
            window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None
        if type(layer) in PLAIN:
            return cls(type(layer), tuple(parts), window)
        tensors = state_tensors(layer)
        parts += [(part, (tuple(state.shape[1:]), state.dtype, state.device)) for part, state in tensors.items()]
        names = {name for name, _ in tensors}
        plain = {name: value for name, value in _own_attributes(layer).items() if name not in names}
        indexed = {name: dict.fromkeys(vars(layer)[name]) for name, key in tensors if key is not None}
        # Containers are copied from this generation's layer.
        copies = {name: dict(value) if isinstance(value, dict) else value for name, value in (plain | indexed).items()}
        return cls(type(layer), tuple(parts), window, repr(sorted(plain.items())), copies)

    @property
    def has_keys(self) -> bool:
        """True if the layer is used for keys and values."""
        return self.parts[:1] != () and self.parts[0][0] == KEYS_AND_VALUES[0]


def state_tensors(layer: Any) -> dict[Part, Tensor]:
    """Map places in a cache's layer to the tensors of its states, which keys and values do not count as."""
    states: dict[Part, Tensor] = {}
    for name, value in _own_attributes(layer).items():
        items = value.items() if isinstance(value, dict) else [(None, value)]
        states |= {(name, key): tensor for key, tensor in items if isinstance(tensor, Tensor)}
    return states


def set_state(layer: Any, part: Part, tensor: Tensor) -> None:
    """Put a tensor in a place of a cache's layer."""
    name, key = part
    if key is None:
        setattr(layer, name, tensor)
    else:
        vars(layer)[name][key] = tensor


def cached_length(cache: Any) -> int:
    """Return the number of tokens in a cache; 1 for a cache of states only, which have no length."""
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return int(cache.get_seq_length())
    return int(any(map(state_tensors, cache.layers)))


def _own_attributes(layer: Any) -> dict[str, Any]:
    """Return a layer's attributes, without the attributes that a `FixedLayer` has of its own."""
    taken = () if _has_states_only(layer) else _NO_STATES
    return {name: value for name, value in vars(layer).items() if name not in taken}


def _has_states_only(layer: Any) -> bool:
    return not isinstance(layer, CacheLayerMixin)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The caches that a `CacheStore` is made for.

    Attributes:
        layers, cross: layouts of the layers of self-attention and of cross-attention.
        hidden: elements and dtype of an encoder's hidden states, and the class of its outputs; None without an encoder.
    """

    layers: tuple[LayerLayout, ...]
    cross: tuple[LayerLayout, ...] = ()
    hidden: tuple[int, torch.dtype, type] | None = None

    @classmethod
    def of(cls, self_attention: Any, cross: Any, hidden: Tensor | None, outputs: type) -> CacheLayout:
        """Derive it from caches that a prefill filled; `cross` and `hidden` are None without an encoder.

        Raises:
            CannotBind: a layer is of another kind, or the lengths of cross-attention and `hidden` differ.
        """
        layers = tuple(map(LayerLayout.of, self_attention.layers))
        if hidden is None:
            return cls(layers)
        crossed = tuple(map(LayerLayout.of, cross.layers))
        pairs = zip(crossed, cross.layers, strict=True)
        if any(layout.has_keys and layer.keys.shape[2] != hidden.shape[1] for layout, layer in pairs):
            raise CannotBind(Reason.GENERATION, "cross-attention keys differ in length from the encoder's outputs")
        return cls(layers, crossed, (hidden.shape[2], hidden.dtype, outputs))

    @property
    def first(self) -> int | None:
        """Index of the first layer of self-attention with keys and values; None if all have states only."""
        return next((index for index, layer in enumerate(self.layers) if layer.has_keys), None)

    @functools.cached_property
    def windows(self) -> list[int]:
        """The windows of self-attention, without duplicates, the smallest first."""
        return sorted({layer.window for layer in self.layers if layer.window is not None})

    @property
    def reach(self) -> int | None:
        """The window that all layers with keys have; None if one has none, or another one."""
        windows = {layer.window for layer in self.layers if layer.has_keys}
        return windows.pop() if len(windows) == 1 else None

    @property
    def has_states(self) -> bool:
        """True if layers can have states."""
        return any(layer.kind not in PLAIN for layer in self.layers)

    @property
    def kept(self) -> tuple[int, torch.dtype, torch.device]:
        """Elements of a head of the first used layer, its dtype and device; of any width if it has states only.

        Raises:
            CannotBind: the cache is empty.
        """
        for layer in self.layers:
            if layer.parts:
                shape, dtype, device = layer.parts[0][1]
                return shape[-1] if layer.has_keys and shape[-1] else _ANY_ELEMENTS, dtype, device
        raise CannotBind(Reason.GENERATION, "an empty cache: the model keeps what it remembers elsewhere")


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a cache of fixed length, whose write position and current length are known only on the device.

    Layers with a window keep every position as well: the mask hides positions out of reach, so that no step needs
    to know the current length in Python. For models that rely on their cache to drop these positions,
    `CacheStore.show_token` hides them.

    Args:
        keys, values: (rows, heads, length, elements), or None for an unused layer.
        position: (1,) int64, the position of the next token.
        triton: True if a Triton kernel may write to the layer.
        seen: the result of `get_seq_length`: a zero-dimensional tensor on the device, or a number.
        is_sliding: True if the layer has a window, and masks to match.
    """

    is_compileable = True

    def __init__(
        self,
        keys: Tensor | None,
        values: Tensor | None,
        position: Tensor,
        seen: Tensor | int,
        *,
        is_sliding: bool = False,
        triton: bool = False,
    ) -> None:
        super().__init__()
        self.keys: Any = keys
        self.values: Any = values
        self.position, self.seen = position, seen
        self.is_sliding = is_sliding
        self._triton = triton
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory is already allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values, in the cache's dtype; return the keys and values of all positions."""
        if self._triton and self._are_written_together(key_states, value_states):
            self._write_together(key_states, value_states)
        else:
            self.keys.index_copy_(2, self.position, key_states.to(self.keys.dtype))
            self.values.index_copy_(2, self.position, value_states.to(self.values.dtype))
        return self.keys, self.values

    def _are_written_together(self, key_states: Tensor, value_states: Tensor) -> bool:
        """True if one kernel can write both: one token per row, equal shapes and strides, and the cache's dtypes."""
        rows, heads, _, elements = self.keys.shape
        return (
            key_states.shape == value_states.shape == (rows, heads, 1, elements)
            and self.keys.stride() == self.values.stride()
            and key_states.dtype is self.keys.dtype
            and value_states.dtype is self.values.dtype
        )

    def _write_together(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write by one kernel, for which all heads of all rows are heads of one token and the layer is one page."""
        from simplegraph.fused.cache_kernels import write_pages

        k, v = (state.flatten(0, 2).unsqueeze(0) for state in (key_states, value_states))
        keys, values = (kept.flatten(0, 1).unsqueeze(0) for kept in (self.keys, self.values))
        write_pages(k, v, keys, values, self.position, self.keys.shape[2], "HND")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (0 if self.keys is None else self.keys.shape[2]), 0

    def get_seq_length(self) -> Any:
        return self.seen

    def get_max_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])


def layer_with_states(layout: LayerLayout, states: Mapping[Part, Tensor], keyed: FixedLayer) -> Any:
    """Make a layer of the layout's class with these states, and with the keys and values of `keyed`."""
    if layout.kind in PLAIN:
        return keyed
    layer: Any = object.__new__(_class_with_states(layout.kind))
    copies = {name: dict(value) if isinstance(value, dict) else value for name, value in layout.attributes.items()}
    keys_and_values = vars(keyed) if isinstance(layer, FixedLayer) else {}
    vars(layer).update({**keys_and_values, **copies})
    for part, tensor in states.items():
        set_state(layer, part, tensor)
    return layer


@functools.cache
def _class_with_states(kind: type) -> type:
    """Return the class itself, or one whose keys and values are a `FixedLayer`'s if it has any."""
    if not issubclass(kind, CacheLayerMixin):
        return kind
    states = tuple(base for base in kind.__bases__ if not issubclass(base, CacheLayerMixin))
    return type(f"Fixed{kind.__name__}", (FixedLayer, *states), {})
