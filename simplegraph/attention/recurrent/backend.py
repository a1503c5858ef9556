"""The base class of recurrent layers' backends, and the function by which a model's layers call them."""

from __future__ import annotations

import abc

from torch import Tensor

from simplegraph.attention.layers import LayerBackend, current_backend
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.metadata.step_arrays import check_layer
from simplegraph.attention.recurrent.states import StateCache, StateMetadata
from simplegraph.base.errors import ConfigError, InputError
from simplegraph.program.breaks.marks import eager_break


class RecurrentBackend(LayerBackend, abc.ABC):
    """Base class of layers that keep a state for each request, such as Mamba2 or gated delta nets.

    Add it to the manager as hooks, by itself or in a `BackendGroup` with attention's. The manager must be made for no
    more requests (`max_num_seqs`) than a step can have states for, so that no larger graph is captured.

    Args:
        cache: states of all layers.
        metadata: the persistent buffers of the step.

    Raises:
        ConfigError: devices differ, or a step can have more requests than the cache has slots.
    """

    metadata: StateMetadata

    def __init__(self, cache: StateCache, metadata: StateMetadata) -> None:
        if cache.device != metadata.device:
            raise ConfigError(f"the states are on {cache.device}, the metadata on {metadata.device}.")
        metadata.bind(cache.num_slots)
        super().__init__(metadata)
        self.cache, self.max_num_reqs = cache, metadata.max_num_reqs

    @abc.abstractmethod
    def run(self, layer: int, inputs: tuple[Tensor, ...], out: Tensor, metadata: CommonMetadata) -> None:
        """Advance the states of the step's requests by their tokens.

        The states of a request are those of ``metadata.block_table[:, 0]``. One whose `seq_lens` is its tokens in this
        step begins with zeros, whatever its slot holds. Slot 0 is not written: it stands for requests that are padding,
        which have no tokens, and for those of dummy steps, which have some.

        Args:
            layer: index of the layer.
            inputs: the arguments of the layer's `recur`, (T, ...) each: the requests' tokens one after the other, then
                padding.
            out: (T, ...), written; padding rows stay as they are.
            metadata: the step, padded to T tokens.
        """


def recur(layer: int, *inputs: Tensor, out: Tensor) -> Tensor:
    """Advance the states of one recurrent layer by the step's tokens; call it inside `attending`.

    In a PIECEWISE graph it is an eager break.

    Args:
        layer: index of the layer.
        inputs: (T, ...) each, as the layer's backend expects them.
        out: (T, ...), written. Padding rows keep their old contents: pass zeros, or a buffer that had zeros once.

    Returns:
        `out`.

    Raises:
        ReplayError: called outside `attending`, or no step was prepared.
        InputError: a tensor has other rows than the step, or the cache no such layer.
        ConfigError: no recurrent backend serves this layer.
    """
    backend: RecurrentBackend = current_backend("recur", layer, RecurrentBackend)
    rows = backend.live.num_tokens
    for name, tensor in (*((f"input {number}", tensor) for number, tensor in enumerate(inputs)), ("out", out)):
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; the step has {rows} rows.")
    check_layer(layer, backend.cache.layers)
    _run(backend, layer, inputs, out)
    return out


@eager_break(padded=True)
def _run(backend: RecurrentBackend, layer: int, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    # Every replay of the break runs this, so `live` is the metadata of that replay's step.
    backend.run(layer, inputs, out, backend.live)
