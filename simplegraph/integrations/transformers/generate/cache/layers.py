"""Layers of a cache at fixed addresses, as models see them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from simplegraph.integrations.transformers.generate.cache.layouts import PLAIN, LayerLayout, Part, set_state


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a cache of fixed length, whose write position and current length are known only on the device.

    Layers with a window keep every position as well: the mask hides those out of reach, so that no step needs to
    know the current length in Python.

    Args:
        keys, values: (rows, heads, length, elements), or None for an unused layer.
        position: (1,) int64, the position of the next token.
        triton: True if a Triton kernel may write to the layer.
        seen: the result of `get_seq_length`: a zero-dimensional tensor on the device, or a number.
        is_sliding: True if the layer's masks are those of a window.
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
        """Write one token's keys and values, in the cache's dtype, and return those of all positions."""
        if self._triton and self._are_written_together(key_states, value_states):
            self._write_together(key_states, value_states)
        else:
            self.keys.index_copy_(2, self.position, key_states.to(self.keys.dtype))
            self.values.index_copy_(2, self.position, value_states.to(self.values.dtype))
        return self.keys, self.values

    def _are_written_together(self, key_states: Tensor, value_states: Tensor) -> bool:
        """True if one kernel can write both: one token per row, equal shapes and strides, and the cache's dtypes."""
        rows, heads, _, elements = self.keys.shape
        kept = (self.keys, self.values)
        return (
            key_states.shape == value_states.shape == (rows, heads, 1, elements)
            and self.keys.stride() == self.values.stride()
            and all(state.dtype is keep.dtype for state, keep in zip((key_states, value_states), kept, strict=True))
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
