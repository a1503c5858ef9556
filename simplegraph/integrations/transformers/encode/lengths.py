"""Pads the inputs of an encoder's call to a captured length, and cuts its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.outputs import unreturnable
from simplegraph.integrations.lengths import cut_outputs, grown_dims
from simplegraph.manager.differences import first_difference

_SEQUENCES = ("input_ids", "inputs_embeds")  # the first of these that is given defines batch size and length
_NEVER_PADDED = ("labels", "past_key_values", "cache", "encoder_hidden_states", "encoder_attention_mask")


def read_call(given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], tuple[int, int]]:
    """Return the tensors of a call, its other arguments, and its rows and length in tokens.

    Raises:
        CannotBind: the call has no sequence, or an argument that cannot be padded with it.
    """
    sequence = next((given[name] for name in _SEQUENCES if given.get(name) is not None), None)
    if not isinstance(sequence, Tensor) or sequence.dim() < 2:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, "neither input_ids nor inputs_embeds")
    rows, length = sequence.shape[:2]
    inputs, flags = {}, {}
    for name, value in given.items():
        if value is None:
            continue
        if name in _NEVER_PADDED:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} was given")
        if not isinstance(value, Tensor):
            if type(value).__hash__ is None and not isinstance(value, (list, dict)):
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(value).__name__}")
            flags[name] = value
        elif value.shape[:2] == (rows, length) and value.dim() <= sequence.dim():
            inputs[name] = value
        else:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} of shape {tuple(value.shape)}")
    return inputs, flags, (rows, length)


def pad_inputs(inputs: dict[str, Tensor], rows: int, length: int, padded: int, pad_token: int) -> dict[str, Tensor]:
    """Pad inputs (rows, length, ...) on the right, and add a mask of the real tokens if none is given.

    Args:
        inputs: by name.
        rows: their rows.
        length: in tokens.
        padded: the length to pad to; nothing is done if it is the same.
        pad_token: what `input_ids` are padded with; other inputs get zeros.
    """
    if padded == length:
        return inputs
    first = next(iter(inputs.values()))
    if "attention_mask" not in inputs:
        inputs = inputs | {"attention_mask": torch.ones(rows, length, dtype=torch.int64, device=first.device)}
    return {
        name: F.pad(
            value, [0] * (2 * value.dim() - 3) + [padded - length], value=pad_token if name == "input_ids" else 0
        )
        for name, value in inputs.items()
    }


class LengthRule:
    """Cuts a model's padded outputs to a length, in the dimensions that grow with it.

    Args:
        grown: the dimensions that grow with the length, by output.
        refusal: what else padding changes, if anything: such calls cannot be padded.
        reason: of the refusal.
    """

    def __init__(self, grown: list[tuple[int, int]], refusal: str = "", reason: Reason = Reason.LENGTH_PADDING) -> None:
        self._grown = grown
        self._refusal, self._reason = refusal, reason
        self._refused: set[int] = set()  # lengths

    @classmethod
    def between(
        cls, outputs: Any, padded_outputs: Any, length: int, padded: int, visible: Tensor | None = None
    ) -> LengthRule:
        """Derive the rule from the outputs of one call, as it is and with other inputs that shall not change them.

        Args:
            outputs: as it is.
            padded_outputs: padded, or without its mask.
            length: of the first, in tokens.
            padded: of the others.
            visible: (rows, length), the caller's mask; nothing but the length follows from what it hides.
        """
        (leaves, spec), (padded_leaves, padded_spec) = flatten(outputs), flatten(padded_outputs)
        opaque = unreturnable(leaves)
        if opaque is not None:
            return cls([], opaque, Reason.UNSUPPORTED_OUTPUT)
        changed = f"from {length} to {padded} tokens" if padded > length else "without the mask"
        if spec != padded_spec:
            return cls([], f"{changed}, the structure of the outputs changes")
        pairs = zip(leaves, padded_leaves, strict=True)
        grown = [(index, dim) for index, pair in enumerate(pairs) for dim in grown_dims(*pair)]
        for index, dim in grown:
            leaf, other = leaves[index], padded_leaves[index]
            if (leaf.shape[dim], other.shape[dim]) != (length, padded):
                return cls([], f"{changed}, an output of shape {tuple(leaf.shape)} has shape {tuple(other.shape)}")
        cut = cut_outputs(padded_leaves, dict.fromkeys(grown, length))
        found = first_difference(_without_hidden(visible, cut, grown), _without_hidden(visible, leaves, grown))
        return cls(grown) if found is None else cls([], f"{changed}, {found}")

    @property
    def refuses(self) -> bool:
        """True if such calls cannot be padded."""
        return bool(self._refusal)

    def leaves_whole(self, length: int) -> bool:
        """True if a call of this length was refused because padding changes its outputs: it is served as it is."""
        return length in self._refused and self._reason is Reason.LENGTH_PADDING

    def check(self, length: int) -> None:
        """Refuse a call of this length if padding would change its outputs.

        Raises:
            CannotBind: padding changes them.
        """
        if self._refusal:
            self._refused.add(length)
            raise CannotBind(self._reason, self._refusal)

    def cut(self, outputs: Any, length: int) -> Any:
        """Cut the outputs to the real tokens."""
        leaves, spec = flatten(outputs)
        return spec.unflatten(cut_outputs(leaves, dict.fromkeys(self._grown, length)))


def _without_hidden(visible: Tensor | None, leaves: Sequence[Any], grown: Sequence[tuple[int, int]]) -> list[Any]:
    """Zero what outputs hold for tokens that the mask hides, in all dimensions that follow the length."""
    leaves = list(leaves)
    if visible is None:
        return leaves
    for index, dim in grown:
        leaf = leaves[index]
        if leaf.shape[0] == visible.shape[0]:
            shape = [size if at in (0, dim) else 1 for at, size in enumerate(leaf.shape)]
            leaves[index] = leaf.masked_fill(~visible.view(shape), 0)
    return leaves


def eighths(largest: int) -> list[int]:
    """List 16, 32 and so on up to `largest`, each at most an eighth of a power of two above the one before."""
    lengths, length = [], 16
    while length < largest:
        lengths.append(length)
        length += max(16, (1 << length.bit_length() - 1) // 8)
    return [*lengths, largest]
