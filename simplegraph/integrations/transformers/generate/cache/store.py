"""Holds the keys, values and states that captured decode steps read, in one allocation for all batch sizes and lengths.

A captured step reads fixed addresses, so its cache must not move. One cache serves the largest batch and the
longest sequence; a step of fewer rows or tokens reads its first rows and positions. Padding rows hold the tokens
of an earlier batch, which is harmless, since rows do not see each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from simplegraph.base.errors import StaleGraphError
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.integrations.transformers.generate.cache.layers import (
    KEYS_AND_VALUES,
    CacheLayout,
    FixedLayer,
    LayerLayout,
    Part,
    layer_with_states,
    set_state,
    state_tensors,
)


class CacheView(NamedTuple):
    """The views of a `CacheStore` that a step of some rows, positions and source positions reads.

    Attributes:
        cache: passed to the model as its cache.
        mask: (rows, span) int64, 1 for visible tokens; 0 from the next position on. None if all layers have states
            only, which hide the prompt's padding themselves.
        source_mask: (rows, source) int64; hidden: (rows, source, elements). None without an encoder.
    """

    cache: Any
    mask: Tensor | None
    source_mask: Tensor | None = None
    hidden: Tensor | None = None


_Memory = Sequence[Mapping[Part, Tensor]]  # of each layer: the tensors of `LayerLayout.parts`


class CacheStore:
    """Keys, values, states and masks at fixed addresses.

    Args:
        layout: the layers.
        rows: of the largest batch; length: tokens of the longest sequence.
        source_length: tokens of the encoder's longest sequence; 0 without an encoder.
        triton: True if steps may run Triton kernels; see `triton_runs`.

    Attributes:
        position: (1,) int64, the position of the next token; seen: the same number without a dimension.
        first: index of the layer of self-attention that shows the length to the model; None if all have states only.
        ran: set to True by a step's forward, which runs in every call that is not a replay.
    """

    def __init__(
        self, layout: CacheLayout, rows: int, length: int, source_length: int, *, triton: bool = False
    ) -> None:
        self.layout, self.triton, self.first = layout, triton, layout.first
        self.ran = False
        _, _, device = layout.kept
        # Not inference tensors: graphs write here inside and outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.position = torch.zeros(1, dtype=torch.int64, device=device)
            self.seen = self.position[0]
            self._self_attention = [_allocate(layer, rows, length) for layer in layout.layers]
            self._cross = [_allocate(layer, rows, source_length) for layer in layout.cross]
            self._mask = torch.zeros(rows, length, dtype=torch.int64, device=device)
            self._present = torch.ones(
                rows, 1, dtype=torch.int64, device=device
            )  # 0 for a row that hides the next token
            reach = layout.reach
            # For each token, the first position that cannot see it; None if a layer sees all tokens.
            self._left_at = None if reach is None else torch.arange(reach, reach + length, device=device)
            self._source_mask = torch.zeros(rows, source_length, dtype=torch.int64, device=device)
            elements, dtype, _ = layout.hidden or (0, torch.float32, None)
            self._hidden = torch.zeros(rows, source_length, elements, dtype=dtype, device=device)
        self._views: dict[tuple[int, int, int], CacheView] = {}
        # The keys whose length models read between steps; None if that layer has a window.
        self._first_keys: Tensor | None = None
        if self.first is not None and layout.layers[self.first].window is None:
            self._first_keys = self._self_attention[self.first][KEYS_AND_VALUES[0]]

    def view(self, rows: int, span: int, source: int) -> CacheView:
        """Return the views of a step: the first `rows` rows, `span` positions and `source` encoder positions."""
        view = self._views.get((rows, span, source))
        if view is None:
            with torch.inference_mode(False), torch.no_grad():
                view = self._views[rows, span, source] = self._view(rows, span, source)
        return view

    def _view(self, rows: int, span: int, source: int) -> CacheView:
        cache = self._cache(self._self_attention, self.layout.layers, rows, span, self.seen)
        mask = None if self.first is None else self._mask[:rows, :span]
        if not self.layout.cross:
            return CacheView(cache, mask)
        return CacheView(
            EncoderDecoderCache(cache, self._cache(self._cross, self.layout.cross, rows, source, source)),
            mask,
            self._source_mask[:rows, :source],
            self._hidden[:rows, :source],
        )

    def show_token(self, mask: Tensor) -> Tensor:
        """Write the token at `position` to a mask (rows, span); return the tokens that a step there sees.

        The step sees the tokens of the mask. If all layers have one window, tokens that have left the window are hidden
        as well: the model's own cache drops their keys, and some models rely on that.
        """
        mask.index_copy_(1, self.position, self._present[: mask.shape[0]])
        return mask if self._left_at is None else mask * (self._left_at[: mask.shape[1]] > self.position)

    def encoder_outputs(self, view: CacheView) -> Any:
        """Make outputs of the encoder's class from a view; they have a mask if that class does."""
        _, _, kind = self.layout.hidden or (0, None, BaseModelOutput)
        masked = any(field.name == "attention_mask" for field in dataclasses.fields(kind))
        return kind(last_hidden_state=view.hidden, **({"attention_mask": view.source_mask} if masked else {}))

    def _cache(
        self, memory: _Memory, layouts: Sequence[LayerLayout], rows: int, span: int, seen: Tensor | int
    ) -> Cache:
        layers = []
        for tensors, layout in zip(memory, layouts, strict=True):
            pair = [tensor[:rows, :, :span] for tensor in _pair(tensors)]
            keys, values = pair or (None, None)
            keyed = FixedLayer(
                keys,
                values,
                self.position,
                seen if pair else 0,
                is_sliding=layout.window is not None,
                triton=self.triton,
            )
            states = {part: tensor[:rows] for part, tensor in _states(tensors).items()}
            layers.append(layer_with_states(layout, states, keyed))
        return Cache(layers=layers)

    def check_states(self, view: CacheView) -> None:
        """Refuse a model whose last step on the view replaced a layer's states instead of writing to them.

        Raises:
            StaleGraphError: a state has another address.
        """
        self_attention = getattr(view.cache, "self_attention_cache", view.cache)
        for layer, part, tensor, state in self._states_beside(self_attention):
            if state is None or state.data_ptr() != tensor.data_ptr():
                raise StaleGraphError(
                    f"a step replaces {part[0]} of a {type(layer).__name__.removeprefix('Fixed')} instead of writing "
                    "to it, so that a replay would read the old one; expected states that keep their memory. Call "
                    "remove() on this model's graphs."
                )

    def reorder(self, rows: int, length: int, order: Tensor) -> None:
        """Give each of `rows` rows the states, and the tokens up to `length`, of the row that `order` names.

        An encoder's results stay: beams change places only within one source.
        """
        kept = [tensor[:rows, :, :length] for tensors in self._self_attention for tensor in _pair(tensors)]
        for tensor in kept + [
            tensor[:rows] for tensors in self._self_attention for tensor in _states(tensors).values()
        ]:
            tensor.copy_(tensor.index_select(0, order))

    # Copies from and to the generation's cache.

    def load(self, cache: Any, rows: int, length: int) -> None:
        """Copy the `length` tokens that a prefill left in `cache`.

        Later positions are zeroed: a value that is not finite would show even if it is masked. The cache's layers
        become views of this memory until `hand_back`, so that the prefill's own memory is freed.

        Raises:
            CannotBind: a state does not have the rows as its first dimension.
        """
        for _, _, tensor, state in self._states_beside(cache):
            if state.shape != (rows, *tensor.shape[1:]):
                raise CannotBind(Reason.GENERATION, f"a state of shape {tuple(state.shape)} for {rows} rows")
        for layer, part, tensor, state in self._states_beside(cache):
            tensor[:rows] = state
            set_state(layer, part, tensor[:rows])
        _copy(cache, self._self_attention, length)
        for tensors, layout, layer in zip(self._self_attention, self.layout.layers, cache.layers, strict=True):
            if layout.has_keys and layout.window is None:
                layer.keys, layer.values = (tensor[:rows, :, :length] for tensor in _pair(tensors))

    def load_source(self, cache: Any, hidden: Tensor) -> None:
        """Copy the encoder's `hidden` (rows, source, elements), and its keys and values."""
        rows, source = hidden.shape[:2]
        _copy(cache, self._cross, source)
        self._hidden[:rows, :source] = hidden
        self._hidden[:rows, source:] = 0

    def load_mask(self, mask: Tensor | None, rows: int, length: int) -> None:
        """Copy a mask (rows, >= length) of the first tokens, and of the one at position `length` if it has that.

        It is 0 for hidden tokens; None shows all.
        """
        self._mask[:rows, :length] = 1 if mask is None else mask[:, :length]
        self._mask[:rows, length:] = 0
        self._present[:rows] = 1 if mask is None or mask.shape[1] == length else mask[:, length : length + 1]

    def load_source_mask(self, mask: Tensor | None, rows: int, source: int) -> None:
        """Copy the mask (rows, source) of the encoder's outputs; None shows all."""
        self._source_mask[:rows, :source] = 1 if mask is None else mask
        self._source_mask[:rows, source:] = 0

    def show_length(self, cache: Any, rows: int, length: int) -> Any:
        """Make the first layer show the length, which models read between steps; returns its `shown` tensor."""
        if self._first_keys is not None:
            # Values keep the prefill's length until `hand_back`: models never read their length, and a view takes time.
            cache.layers[self.first].keys = self._first_keys[:rows].narrow(2, 0, length)
        elif self.first is not None:
            cache.layers[self.first].cumulative_length = length
        return self.shown(cache)

    def shown(self, cache: Any) -> Any:
        """Return a tensor of a generation's cache that is replaced if the cache is changed between steps."""
        return next(self._states_beside(cache))[3] if self.first is None else cache.layers[self.first].keys

    def hand_back(self, cache: Any, rows: int, length: int) -> None:
        """Fill `cache` with the tokens up to `length`, as if every step had used it."""
        for layer, part, tensor, _ in self._states_beside(cache):
            set_state(layer, part, tensor[:rows].clone())
        for tensors, layout, layer in zip(self._self_attention, self.layout.layers, cache.layers, strict=True):
            if not layout.has_keys:
                continue
            start = 0
            if layout.window is not None:
                start = max(0, length - layout.window + 1)
                layer.cumulative_length = length
            layer.keys, layer.values = (tensor[:rows, :, start:length].clone() for tensor in _pair(tensors))

    def _states_beside(self, cache: Any) -> Iterator[tuple[Any, Part, Tensor, Any]]:
        """Iterate over the states of a cache: its layer, place, this store's tensor, and its own one, None for none."""
        for layer, tensors in zip(cache.layers, self._self_attention, strict=True):
            states = _states(tensors)
            own_states = state_tensors(layer) if states else {}
            yield from ((layer, part, tensor, own_states.get(part)) for part, tensor in states.items())


def _pair(tensors: Mapping[Part, Tensor]) -> list[Tensor]:
    """List keys and values; nothing for a layer without."""
    return [tensors[part] for part in KEYS_AND_VALUES if part in tensors]


def _states(tensors: Mapping[Part, Tensor]) -> dict[Part, Tensor]:
    return {part: tensor for part, tensor in tensors.items() if part not in KEYS_AND_VALUES}


def _copy(cache: Any, memory: _Memory, length: int) -> None:
    """Copy a cache's tokens up to `length` and zero all other positions of its rows."""
    targets, sources, unused = [], [], []
    for tensors, layer in zip(memory, cache.layers, strict=True):
        pair = _pair(tensors)
        for tensor, source in zip(pair, (layer.keys, layer.values) if pair else (), strict=True):
            # A layer with a window has only the last tokens; earlier ones are out of its reach.
            rows, start = source.shape[0], length - source.shape[2]
            targets.append(tensor[:rows, :, start:length])
            sources.append(source)
            unused += [tensor[:rows, :, length:], tensor[:rows, :, :start]]
    unused = [tensor for tensor in unused if tensor.numel()]
    if unused:
        torch._foreach_zero_(unused)
    if targets:
        torch._foreach_copy_(targets, sources)


def _allocate(layer: LayerLayout, rows: int, length: int) -> dict[Part, Tensor]:
    return {
        part: torch.zeros(rows, *(length if size is None else size for size in shape), dtype=dtype, device=device)
        for part, (shape, dtype, device) in layer.parts
    }
