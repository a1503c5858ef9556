"""Classify what an eager break returns in a warmup, stand in for it in a capture, accept it at each replay.

A capture does not run breaks, since the values they would read do not exist yet. The warmup before it
showed what each of them returns. The capture goes on with stand-ins, and every replay puts the result
where its stand-in lies, or finds that it is there already.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.nested import ATOMS, Withheld, constant_key
from simplegraph.program.breaks.step import Accept, Cell, Place, Result

Entry = tuple[Any, Accept]  # what stands in for a result, and what takes it at a replay


class Bridge:
    """Memory where the next segment reads a tensor that the break made: each replay's is copied there."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._kind = (target.shape, target.dtype, target.device)

    def accept(self, leaf: Any) -> str | None:
        if not isinstance(leaf, Tensor) or (leaf.shape, leaf.dtype, leaf.device) != self._kind:
            return f"{shown(leaf)} in place of {shown(self.target)}"
        self.target.copy_(leaf.detach() if leaf.requires_grad else leaf)
        return None


def _bridge(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], place: Place
) -> Entry:
    """Copy each replay's tensor to memory of the capture."""
    with torch.inference_mode(False):  # not an inference tensor: replays in other modes write to it
        bridge = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return bridge, Bridge(place.keep(bridge)).accept


def _pass_back(index: int, place: Place) -> Entry:
    """Go on with an argument, given by its index among the leaves, which is where it should be already."""
    given, held = place.leaves[index], place.held[index]

    def accept_argument(leaf: Any) -> str | None:
        expected = held.value if isinstance(held, Cell) else held
        return None if leaf is expected else f"{shown(leaf)} in place of its own argument"

    return given, _same_memory(held) if isinstance(given, Tensor) else accept_argument


def _pass_view(index: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, place: Place) -> Entry:
    """Go on with a view of an argument; the offset is from where that begins."""
    both = place.leaves[index], place.held[index]
    given, held = (tensor.as_strided(shape, stride, tensor.storage_offset() + offset) for tensor in both)
    return given, _same_memory(held)


def _outside(tensor: Tensor, place: Place) -> Entry:
    """Go on with a tensor from before the forward: the graph reads it where it is, so it must stay there."""
    return tensor, _same_memory(tensor)


def _same_memory(tensor: Tensor) -> Accept:
    memory = _memory(tensor)

    def accept_in_place(leaf: Any) -> str | None:
        if leaf is tensor or (isinstance(leaf, Tensor) and _memory(leaf) == memory):
            return None
        return f"{shown(leaf)} at another address; it was in place at the warmup. Return a clone, or always that one"

    return accept_in_place


def _constant(value: Any, place: Place) -> Entry:
    """Go on with a plain value: the segments after it are captured with it, so it must stay."""

    def accept_constant(leaf: Any) -> str | None:
        if type(leaf) is type(value) and constant_key(leaf) == constant_key(value):
            return None
        return f"{shown(leaf)} in place of {shown(value)}, which the segments after it were captured with"

    return value, accept_constant


def hand_on(kind: type, place: Place) -> Entry:
    """Stand in for an object of a class, such as a handle to wait for: later breaks are passed each replay's own."""
    cell = Cell(Withheld(kind, "that an eager break returned"))
    place.cells[id(cell.value)] = cell
    return cell.value, functools.partial(setattr, cell, "value")


def classify_result(
    leaf: Any,
    before: Sequence[Any],
    arguments: Sequence[Any],
    made_here: Callable[[Tensor], bool],
    device: torch.device,
) -> Result | str:
    """Classify a result that a warmup saw; return what is wrong with it where no graph can go on with it.

    Args:
        leaf: one leaf of what the break returned.
        before: the leaves before it.
        arguments: the leaves of the break's arguments.
        made_here: returns True if the forward made a tensor's memory.
        device: where the graph is.
    """
    index = next((index for index, argument in enumerate(arguments) if argument is leaf), None)
    if isinstance(leaf, ATOMS):
        return Result(_constant, (leaf,), any_size=leaf is None)
    if index is not None:
        return Result(_pass_back, (index,), any_size=True)
    if not isinstance(leaf, Tensor):
        if isinstance(leaf, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
            return "returns a generator, whose body would run after it"
        return Result(hand_on, (type(leaf),))
    if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return f"returns a {type(leaf).__name__} of layout {leaf.layout}; return plain strided tensors"
    if leaf.device != device:
        return f"returns a tensor on {leaf.device}, which a graph on {device} cannot follow"
    shared = next((index for index, argument in enumerate(arguments) if _share_memory(argument, leaf)), None)
    if shared is not None:
        if arguments[shared].dtype is not leaf.dtype or leaf.is_conj() or leaf.is_neg():
            return "returns its argument seen as another dtype; return a clone"
        offset = int(leaf.storage_offset() - arguments[shared].storage_offset())
        return Result(_pass_view, (shared,), (tuple(leaf.shape), leaf.stride(), offset))
    if not made_here(leaf):
        return Result(_outside, (leaf,))
    if any(_share_memory(other, leaf) and _overlap(other, leaf) for other in before):
        return "returns tensors that overlap in memory; return clones"
    dense = torch.empty_like(leaf, device="meta")
    return Result(_bridge, (leaf.dtype, leaf.device), (tuple(dense.shape), dense.stride()))


def _share_memory(argument: Any, leaf: Tensor) -> bool:
    plain = isinstance(argument, Tensor) and argument.layout is torch.strided
    return plain and bool(argument.untyped_storage()._cdata == leaf.untyped_storage()._cdata)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one storage have an element in common."""
    if one.dtype is not other.dtype:
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.uint8, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(1)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def shown(leaf: Any) -> str:
    """Describe a result."""
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}, on {leaf.device}"
    return repr(leaf) if isinstance(leaf, ATOMS) else f"a {type(leaf).__name__}"
