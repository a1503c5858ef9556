"""What an eager break returns: learnt from a warmup, stood in for during capture, accepted at replay.

A capture does not run breaks, since the values they would read do not exist yet. The warmup before it
told what each of them returns; the capture goes on with stand-ins, and every replay puts the result
where its stand-in lies, or finds that it is there already.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.errors import BreakError
from simplegraph.graph.breaks.step import Accept, Cell, Place, Result
from simplegraph.nested import ATOMS, constant_key

Geometry = tuple[torch.Size, tuple[int, ...], int]


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A tensor that the break made: copied to where the next segment reads it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    any_size = False

    def enter(self, place: Place) -> tuple[Any, Accept]:
        with torch.inference_mode(False):  # not an inference tensor: replays in other modes write to it
            bridge = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return bridge, Bridge(place.keep(bridge)).accept


class Bridge:
    """Where the next segment reads a break's result."""

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


@dataclasses.dataclass(frozen=True)
class Again:
    """A tensor that the break returned before in the same result: one stand-in is both."""

    index: int
    any_size = False

    def enter(self, place: Place) -> tuple[Any, Accept]:
        value, accept = place.entered[self.index]
        bridge: Bridge = accept.__self__  # type: ignore[attr-defined]

        def accept_again(leaf: Any) -> str | None:
            same = isinstance(leaf, Tensor) and _memory(leaf) == bridge.source
            return None if same else f"{shown(leaf)} where it returned one tensor twice before"

        return value, accept_again


@dataclasses.dataclass(frozen=True)
class PassedBack:
    """An argument handed back, as it is or as a view: it is where it should be already.

    Attributes:
        index: which leaf of the arguments.
        geometry: of a view, with the offset counted from the argument's; None for the argument itself.
    """

    index: int
    geometry: Geometry | None = None

    @property
    def any_size(self) -> bool:
        return self.geometry is None

    def enter(self, place: Place) -> tuple[Any, Accept]:
        given, held = place.leaves[self.index], place.held[self.index]
        if not isinstance(given, Tensor):
            return given, _Same(held).accept
        if self.geometry is None:
            return given, _SameMemory(held).accept
        shape, stride, offset = self.geometry
        view, kept = (t.as_strided(shape, stride, t.storage_offset() + offset) for t in (given, held))
        return view, _SameMemory(kept).accept


@dataclasses.dataclass(frozen=True)
class Outside:
    """A tensor from before the forward: the graph reads it where it is, so it must stay there."""

    tensor: Tensor
    any_size = False

    def enter(self, place: Place) -> tuple[Any, Accept]:
        return self.tensor, _SameMemory(self.tensor).accept


class _SameMemory:
    """Accepts the same memory, seen the same way."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._kind = _memory(tensor)

    def accept(self, leaf: Any) -> str | None:
        if leaf is self._tensor or (isinstance(leaf, Tensor) and _memory(leaf) == self._kind):
            return None
        return f"{shown(leaf)} at another address; it was in place at the warmup. Return a clone, or always that one"


class _Same:
    """Accepts the very object that was passed."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def accept(self, leaf: Any) -> str | None:
        expected = self._held.value if isinstance(self._held, Cell) else self._held
        return None if leaf is expected else f"{shown(leaf)} in place of its own argument"


@dataclasses.dataclass(frozen=True)
class Constant:
    """A plain value: the segments after it were captured with it, so it must stay."""

    value: Any

    @property
    def any_size(self) -> bool:
        return self.value is None

    def enter(self, place: Place) -> tuple[Any, Accept]:
        return self.value, self.accept

    def accept(self, leaf: Any) -> str | None:
        if type(leaf) is type(self.value) and constant_key(leaf) == constant_key(self.value):
            return None
        return f"{shown(leaf)} in place of {shown(self.value)}, which the segments after it were captured with"


@dataclasses.dataclass(frozen=True)
class Handle:
    """Another object, such as a handle to wait for: handed to the breaks after it, each replay's own."""

    value: Any
    any_size = False

    def enter(self, place: Place) -> tuple[Any, Accept]:
        cell = Cell(self.value)
        place.watch(cell)

        def accept(leaf: Any) -> None:
            cell.value = leaf

        return self.value, accept


@dataclasses.dataclass(frozen=True)
class Refused:
    """Something that no replay can hand on."""

    why: str
    any_size = False

    def enter(self, place: Place) -> tuple[Any, Accept]:
        raise BreakError(self.why)


def classify_result(
    leaf: Any,
    before: Sequence[Any],
    arguments: Sequence[Any],
    made_here: Callable[[Tensor], bool],
    device: torch.device,
) -> Result:
    """What kind of result a warmup saw.

    Args:
        leaf: one leaf of what the break returned.
        before: the leaves before it.
        arguments: the leaves of the break's arguments.
        made_here: whether the forward made a tensor's memory.
        device: where the graph is.
    """
    index = next((index for index, argument in enumerate(arguments) if argument is leaf), None)
    if isinstance(leaf, ATOMS):
        return Constant(leaf)
    if index is not None:
        return PassedBack(index)
    if not isinstance(leaf, Tensor):
        late = isinstance(leaf, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType))
        return Refused("returns a generator, whose body would run after it") if late else Handle(leaf)
    if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return Refused(f"returns a {type(leaf).__name__} of layout {leaf.layout}; return plain strided tensors")
    if leaf.device != device:
        return Refused(f"returns a tensor on {leaf.device}, which a graph on {device} cannot follow")
    shared = next((index for index, argument in enumerate(arguments) if _share_memory(argument, leaf)), None)
    if shared is not None:
        if arguments[shared].dtype is not leaf.dtype or leaf.is_conj() or leaf.is_neg():
            return Refused("returns its argument seen as another dtype; return a clone")
        offset = int(leaf.storage_offset() - arguments[shared].storage_offset())
        return PassedBack(shared, (leaf.shape, leaf.stride(), offset))
    if not made_here(leaf):
        return Outside(leaf)
    sharing = [index for index, other in enumerate(before) if _share_memory(other, leaf)]
    twice = next((index for index in sharing if _memory(before[index]) == _memory(leaf)), None)
    if twice is not None:
        return Again(twice)
    if any(_overlap(before[index], leaf) for index in sharing):
        return Refused("returns tensors that overlap in memory; return clones")
    return Fresh(leaf.shape, torch.empty_like(leaf, device="meta").stride(), leaf.dtype, leaf.device)


def _share_memory(argument: Any, leaf: Tensor) -> bool:
    plain = isinstance(argument, Tensor) and argument.layout is torch.strided
    return plain and bool(argument.untyped_storage()._cdata == leaf.untyped_storage()._cdata)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if one.dtype is not other.dtype:
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.uint8, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(1)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def shown(leaf: Any) -> str:
    """A result in words."""
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}, on {leaf.device}"
    return repr(leaf) if isinstance(leaf, ATOMS) else f"a {type(leaf).__name__}"
