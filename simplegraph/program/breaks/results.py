"""Classify what an eager break returns in a warmup, stand in for it in a capture, accept it at each replay.

A capture does not run breaks, since the values they would read do not exist yet. The warmup before it
showed what each of them returns. The capture goes on with stand-ins, and every replay puts the result
where its stand-in lies, or finds that it is there already.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.errors import BreakError
from simplegraph.base.nested import ATOMS, ById, constant_key
from simplegraph.program.breaks.step import Accept, Cell, Place, Result

Entry = tuple[Any, Accept]  # what stands in for a result, and what takes it at a replay


class Bridge:
    """Memory where the next segment reads a tensor that the break made: each replay's is copied there."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.source: Any = None
        self._kind = (target.shape, target.dtype, target.device)

    def accept(self, leaf: Any) -> str | None:
        if not isinstance(leaf, Tensor) or (leaf.shape, leaf.dtype, leaf.device) != self._kind:
            return f"{shown(leaf)} in place of {shown(self.target)}"
        self.target.copy_(leaf.detach() if leaf.requires_grad else leaf)
        self.source = _memory(leaf)
        return None


def _bridge(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], place: Place
) -> Entry:
    """Copy each replay's tensor to memory of the capture."""
    with torch.inference_mode(False):  # not an inference tensor: replays in other modes write to it
        bridge = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return bridge, Bridge(place.keep(bridge)).accept


def _repeat(index: int, place: Place) -> Entry:
    """Let the stand-in of an earlier result be this one's, too: the break returned one tensor twice."""
    value, accept = place.entered[index]
    bridge: Bridge = accept.__self__  # type: ignore[attr-defined]

    def accept_again(leaf: Any) -> str | None:
        same = isinstance(leaf, Tensor) and _memory(leaf) == bridge.source
        return None if same else f"{shown(leaf)} where it returned one tensor twice before"

    return value, accept_again


def _pass_back(index: int, geometry: tuple[Any, Any, int] | None, place: Place) -> Entry:
    """Go on with an argument, which is where it should be already.

    Args:
        index: which leaf of the arguments.
        geometry: of a view, its shape, strides and offset from the argument's; None for the argument itself.
        place: where it enters the capture.
    """
    given, held = place.leaves[index], place.held[index]
    if isinstance(given, Tensor):
        if geometry is not None:
            shape, stride, offset = geometry
            given, held = (t.as_strided(shape, stride, t.storage_offset() + offset) for t in (given, held))
        return given, _same_memory(held)

    def accept_argument(leaf: Any) -> str | None:
        expected = held.value if isinstance(held, Cell) else held
        return None if leaf is expected else f"{shown(leaf)} in place of its own argument"

    return given, accept_argument


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


def _hand_on(value: Any, place: Place) -> Entry:
    """Go on with another object, such as a handle to wait for: later breaks are passed each replay's own."""
    cell = Cell(value)
    place.watch(cell)
    return value, partial(setattr, cell, "value")


def _refusal(why: str) -> Result:
    def enter(place: Place) -> Entry:
        raise BreakError(why)

    return Result(enter)


def classify_result(
    leaf: Any,
    before: Sequence[Any],
    arguments: Sequence[Any],
    made_here: Callable[[Tensor], bool],
    device: torch.device,
) -> Result:
    """Classify a result that a warmup saw.

    Args:
        leaf: one leaf of what the break returned.
        before: the leaves before it.
        arguments: the leaves of the break's arguments.
        made_here: returns True if the forward made a tensor's memory.
        device: where the graph is.
    """
    index = next((index for index, argument in enumerate(arguments) if argument is leaf), None)
    if isinstance(leaf, ATOMS):
        known = _result(_constant, leaf, same=(type(leaf), constant_key(leaf)))
        return known._replace(any_size=leaf is None)
    if index is not None:
        return Result(partial(_pass_back, index, None), any_size=True)
    if not isinstance(leaf, Tensor):
        late = isinstance(leaf, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType))
        if late:
            return _refusal("returns a generator, whose body would run after it")
        kind: Any = type(leaf)
        return _result(_hand_on, leaf, same=kind)
    if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return _refusal(f"returns a {type(leaf).__name__} of layout {leaf.layout}; return plain strided tensors")
    if leaf.device != device:
        return _refusal(f"returns a tensor on {leaf.device}, which a graph on {device} cannot follow")
    shared = next((index for index, argument in enumerate(arguments) if _share_memory(argument, leaf)), None)
    if shared is not None:
        if arguments[shared].dtype is not leaf.dtype or leaf.is_conj() or leaf.is_neg():
            return _refusal("returns its argument seen as another dtype; return a clone")
        offset = int(leaf.storage_offset() - arguments[shared].storage_offset())
        view = tuple(leaf.shape), tuple(leaf.stride()), offset
        return _result(_pass_back, shared, same=shared, geometry=(view,))
    if not made_here(leaf):
        return _result(_outside, leaf, same=ById(leaf))
    sharing = [index for index, other in enumerate(before) if _share_memory(other, leaf)]
    twice = next((index for index in sharing if _memory(before[index]) == _memory(leaf)), None)
    if twice is not None:
        return _result(_repeat, twice, same=twice)
    if any(_overlap(before[index], leaf) for index in sharing):
        return _refusal("returns tensors that overlap in memory; return clones")
    dense = torch.empty_like(leaf, device="meta")
    geometry = tuple(dense.shape), tuple(dense.stride())
    return _result(_bridge, leaf.dtype, leaf.device, same=(leaf.dtype, leaf.device), geometry=geometry)


def _result(enter: Callable[..., Entry], *fixed: Any, same: Hashable, geometry: tuple[Any, ...] = ()) -> Result:
    """Make a result of an `enter` that takes `fixed` arguments and a geometry.

    At other batch sizes it is known if `same` is the same there, and the numbers of the geometry follow the size.
    """
    form = frozenset({same}), geometry
    return Result(partial(enter, *fixed, *geometry), form=form, of_form=lambda form: partial(enter, *fixed, *form[1]))


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
