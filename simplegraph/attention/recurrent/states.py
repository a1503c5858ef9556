"""Recurrent states in slots, and the slots and lengths of a step, at addresses that never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.metadata.step_arrays import Ints, check_counts, check_layer, int64s
from simplegraph.base.errors import CaptureSizeError, ConfigError, InputError


class StateShape(NamedTuple):
    """One state of one request in one layer."""

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32


class StateCache:
    """States of every recurrent layer, in slots that are assigned to requests.

    Slot 0 is for padding: it holds zeros, and no step writes to it. Requests own slots 1 to `num_slots`.

    Args:
        num_slots: requests whose states fit.
        states: name -> shape and dtype of one request's state in one layer.
        layers: indices of the recurrent layers in the model.
        device: of the states.

    Raises:
        ConfigError: a size is below 1, there is no state, or a layer is listed twice.
    """

    def __init__(
        self, num_slots: int, states: Mapping[str, StateShape], *, layers: Sequence[int], device: torch.device | str
    ) -> None:
        check_counts(num_slots=num_slots)
        if not states or not layers or len(set(layers)) < len(layers):
            raise ConfigError(f"states has {list(states)}, layers is {layers!r}; expected some, and no layer twice.")
        self.num_slots, self.layers, self.states = num_slots, list(layers), dict(states)
        index = {layer: number for number, layer in enumerate(self.layers)}
        # Not inference tensors, even if built in inference mode: those refuse writes outside of it.
        with torch.inference_mode(False):
            self.tensors = [
                torch.zeros(len(index), num_slots + 1, *state.shape, dtype=state.dtype, device=device)
                for state in states.values()
            ]
        self.device = self.tensors[0].device
        self._parts = {
            (layer, name): tensor[number]
            for name, tensor in zip(states, self.tensors, strict=True)
            for layer, number in index.items()
        }

    def state(self, layer: int, name: str) -> Tensor:
        """Return a layer's states of one name: (num_slots + 1, ...), by slot.

        Raises:
            InputError: the cache has no such layer.
        """
        check_layer(layer, self.layers)
        return self._parts[layer, name]

    @property
    def bytes(self) -> int:
        """Device memory of the cache, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


class StateMetadata(BatchMetadata):
    """Persistent buffers for the lengths and state slots of one step at a time; a slot is the page of a whole request.

    A request whose length is that of its tokens in the step begins: its slot is read as zeros, whatever it holds. Other
    requests go on from the state in their slot.

    Args:
        max_num_tokens: the most tokens a step can have, padding included.
        max_num_reqs: the most requests; no more than the cache has slots.
        max_model_len: the most tokens of a request.
        device: where the layers run.

    Attributes:
        num_slots: of the cache; set by the backend.

    Raises:
        ConfigError: a limit is below 1.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device | str,
    ) -> None:
        super().__init__(
            max_num_tokens=max_num_tokens,
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            page_size=max_model_len,
            device=device,
        )
        self.num_slots: int | None = None

    def set(  # type: ignore[override]
        self,
        query_lens: int | Ints,
        seq_lens: Ints,
        slots: Ints,
        *,
        num_tokens: int | None = None,
        num_reqs: int | None = None,
    ) -> CommonMetadata:
        """Write a step to the device, in the current stream's order; call before every step, outside the graph.

        Args:
            query_lens: (num_reqs,) integers, tokens of each request in this step, or one number for all.
            seq_lens: (num_reqs,) integers, tokens of each request so far, this step's included.
            slots: (num_reqs,) integers, the state slot of each request, from 1 on.
            num_tokens: rows of the graph that will run; by default the step's tokens.
            num_reqs: requests of the graph that will run; None if its descriptor has None.

        Returns:
            The buffers, viewed in the padded shape. Their block table holds each request's slot, 0 for padding.

        Raises:
            CaptureSizeError: there are more requests or tokens than the limits or the padded shape.
            InputError: a slot does not exist, two requests have the same, or the lengths do not match. After an error
                the previous step is still in place.
        """
        owned, lengths = int64s("slots", slots), int64s("seq_lens", seq_lens)
        self.check_slots(owned, len(lengths))
        return super().set(query_lens, lengths, owned[:, None], num_tokens=num_tokens, num_reqs=num_reqs)

    def bind(self, num_slots: int) -> None:
        """Take over the number of slots that a cache has; its backend calls this.

        Raises:
            ConfigError: a step could have more requests than that.
        """
        if num_slots < self.max_num_reqs:
            raise ConfigError(
                f"a step can have max_num_reqs={self.max_num_reqs} requests, the cache has {num_slots} state slots; "
                "expected a slot for each."
            )
        self.num_slots = min(num_slots, self.num_slots or num_slots)
        self.num_pages = self.num_slots + 1  # slot 0 is page 0

    def check_slots(self, slots: npt.NDArray[np.int64], num_reqs: int) -> None:
        """Refuse slots that do not exist or that two requests share.

        Raises:
            CaptureSizeError: there are more requests than the limit.
            InputError: a slot does not exist, or two requests have the same.
        """
        if len(slots) != num_reqs:
            raise InputError(f"slots has {len(slots)} entries, seq_lens {num_reqs}; expected one slot per request.")
        if num_reqs > self.max_num_reqs:
            raise CaptureSizeError(
                f"the step has {num_reqs} requests, but states for {self.max_num_reqs} at most; let the others wait, "
                "or build StateCache and StateMetadata for more."
            )
        most = self.num_slots or self.max_num_reqs
        ordered = np.sort(slots)
        if num_reqs and not (ordered[0] >= 1 and ordered[-1] <= most):
            row = int(np.argmax((slots < 1) | (slots > most)))
            raise InputError(f"slots[{row}] is {slots[row]}; expected 1 to {most}: slot 0 is for padding.")
        if (ordered[1:] == ordered[:-1]).any():
            slot = ordered[1:][ordered[1:] == ordered[:-1]][0]
            first, second = np.flatnonzero(slots == slot)[:2]
            raise InputError(f"requests {first} and {second} both have state slot {slot}; give each its own.")
