"""A paged KV cache, and the one kernel that writes a step's keys and values to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from simplegraph.attention.metadata.step_arrays import check_counts
from simplegraph.base.errors import ConfigError, InputError
from simplegraph.fused.choice import chosen_operators, triton_runs


class PagedKVCache:
    """Keys and values of every layer, in pages that are assigned to requests.

    Args:
        num_layers, num_pages: layers of the model, and pages of each.
        page_size: tokens in a page.
        num_kv_heads, head_dim: shape of one token's key or value.
        dtype, device: of keys and values.
        layers: indices of the layers in the model, by which every method takes them; 0, 1, 2, ... by default. A model
            with several kinds of attention has one cache for the layers of each.
        layout: "NHD", a page is (page_size, num_kv_heads, head_dim); "HND", (num_kv_heads, page_size, head_dim).

    Raises:
        ConfigError: a size is below 1, the layout is neither, or `layers` are not `num_layers` different indices.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: Sequence[int] | None = None,
        layout: Literal["NHD", "HND"] = "NHD",
    ) -> None:
        check_counts(num_layers=num_layers, num_pages=num_pages, page_size=page_size)
        check_counts(num_kv_heads=num_kv_heads, head_dim=head_dim)
        if layout not in ("NHD", "HND"):
            raise ConfigError(f"layout is {layout!r}; expected 'NHD' or 'HND'.")
        self.layers: Sequence[int] = range(num_layers) if layers is None else list(layers)
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        if not len(self._index) == len(self.layers) == num_layers:
            raise ConfigError(f"layers is {layers!r}; expected the different indices of {num_layers} layers.")
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.dtype, self.layout = dtype, layout
        page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        # One page more than requests can own: operators that cannot skip rows write padding there.
        # Not an inference tensor, even if built in inference mode: those refuse writes outside of it.
        with torch.inference_mode(False):
            self._memory = torch.zeros(2, num_layers, num_pages + 1, *page, head_dim, dtype=dtype, device=device)
        self.device = self._memory.device
        self._operators = chosen_operators(triton=triton_runs(self.device))
        self._keys: dict[int, Tensor]
        self._values: dict[int, Tensor]
        self._keys, self._values = (
            {layer: part[index, :num_pages] for layer, index in self._index.items()} for part in self._memory
        )

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys: (num_pages, page_size, num_kv_heads, head_dim), with HND the middle two swapped."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """Return a layer's values, in the shape of `keys`."""
        return self._values[layer]

    @property
    def bytes(self) -> int:
        """Device memory of the cache, in bytes."""
        return self._memory.nbytes

    def zero_(self) -> None:
        """Fill all keys and values with zeros."""
        self._memory.zero_()

    @torch.no_grad()  # else keys that require a gradient would make the whole cache require one
    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write each token's key and value to its slot: one kernel on a GPU, graph-safe on every device.

        Args:
            layer: index of the layer.
            k: (T, num_kv_heads, head_dim), the cache's dtype.
            v: as `k`.
            slot_mapping: (T,) int64, page * page_size + offset; rows with -1 are skipped.

        Raises:
            InputError: a shape or dtype does not match the cache; nothing was written.
        """
        if slot_mapping.dtype is not torch.int64:
            raise InputError(f"slot_mapping is {slot_mapping.dtype}; expected torch.int64.")
        shape = (slot_mapping.shape[0], self.num_kv_heads, self.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape != shape or tensor.dtype is not self.dtype:
                raise InputError(
                    f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; the cache and {shape[0]} slots "
                    f"expect {shape} and {self.dtype}."
                )
        self._operators.write_pages(k, v, self.pages(layer), slot_mapping, self.layout)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values with the page for padding."""
        index = self._index[layer]
        return self._memory[0, index], self._memory[1, index]
