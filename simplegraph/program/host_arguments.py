"""The CPU tensors that a forward on another device is passed, and how a run uses each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.failures import current_user_location
from simplegraph.base.operators import argument, facts_of, strided_tensors
from simplegraph.base.tensors import storage_key

_aten: Any = torch.ops.aten
# Operators that may move CPU tensors to the device.
TO_COPY, COPY = _aten._to_copy.default, _aten.copy_.default
_INDEX = {_aten.index.Tensor, _aten._unsafe_index.Tensor}
PUT = {
    *(_aten.index_put.default, _aten.index_put_.default),
    *(_aten._index_put_impl_.default, _aten._unsafe_index_put.default),
}
WHERE = _aten.where.self
MOVES = {TO_COPY, COPY, WHERE, *_INDEX, *PUT}
MASKS = (torch.bool, torch.uint8)


class HostArguments:
    """The CPU tensors that a forward on another device is passed, and how a run uses each.

    Attributes:
        names: storage key -> names of the arguments in this memory.
        static: storage key -> the memory of the static input that a capture reads in place of the argument; None in a
            run on the caller's own tensors. Arguments that are compared by value have no entry.
        moved: names of the arguments that the run moved to the device unchanged; waited: names of those moved by a
            copy that waited, since it was not ``non_blocking``.
        read: name -> the operator, and the line, that used the argument on the CPU.
        shows_python: True to note reads without an operator, too, by a mode under which some layers lose their fast
            path.
    """

    def __init__(self, *, shows_python: bool = True) -> None:
        self.shows_python = shows_python
        self.names: dict[int, list[str]] = {}
        self.static: dict[int, Tensor | None] = {}
        self.moved: set[str] = set()
        self.waited: set[str] = set()
        self.read: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor, static: Tensor | None = None, *, by_value: bool = False) -> None:
        """Add an argument to follow."""
        self.names.setdefault(storage_key(tensor), []).append(name)
        if not by_value:
            self.static[storage_key(tensor)] = static

    def among(self, tensors: Iterable[Any]) -> list[Tensor]:
        """List the tensors that are in the memory of these arguments."""
        return [tensor for tensor in strided_tensors(tensors) if storage_key(tensor) in self.names]

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: Sequence[Tensor]) -> list[Tensor]:
        """Note how an operator uses CPU tensors that are arguments; return those that it uses on the CPU."""
        given = self.among(host)
        if not given or facts_of(func).reads_no_value:
            return []
        moved, waits = _moved(func, args, kwargs)
        used = []
        for tensor in given:
            names = self.names[storage_key(tensor)]
            if any(tensor is other for other in moved) and self._is_plain(tensor):
                self.moved.update(names)
                self.waited.update(names if waits else ())
            else:
                self.note_read(tensor, str(func.overloadpacket))
                used.append(tensor)
        return used

    def note_read(self, tensor: Tensor, operator: str) -> None:
        """Note that the forward used an argument's tensor on the CPU."""
        for name in self.names[storage_key(tensor)]:
            self.read.setdefault(name, f"{operator} at {current_user_location()}")

    def on_device(self, tensor: Tensor) -> Tensor | None:
        """View the static input that a capture reads in place of a CPU tensor; None if there is none."""
        memory = self.static.get(storage_key(tensor))
        if memory is None or not self._is_plain(tensor):
            return None
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _is_plain(self, tensor: Tensor) -> bool:
        """True if a tensor has the elements of an argument in the same dtype, not conjugated or negated."""
        memory = self.static.get(storage_key(tensor))
        return not (tensor.is_conj() or tensor.is_neg()) and (memory is None or tensor.dtype is memory.dtype)


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Tensor], bool]:
    """List the CPU tensors that an operator moves to the device unchanged, and True if the operator waits for that."""
    if func is TO_COPY:
        return (args[:1] if target_device(kwargs) != "cpu" else ()), not kwargs.get("non_blocking")
    if func not in MOVES or func is WHERE or args[0].is_cpu:
        return [], False
    if func is COPY:
        return [args[1]], not argument(args, kwargs, 2, "non_blocking")
    indices = [index for index in strided_tensors(args[1]) if index.dtype not in MASKS]
    return (*indices, *(args[2:3] if func in PUT else ())), True


def used_on_cpu(name: str, where: str) -> tuple[str, str]:
    """Return the cause and the remedy for an argument that a forward uses on the CPU."""
    cause = f"{name} is on the CPU, and the forward uses it there ({where})"
    move = f"as in {name} = {name}.to(device)" if name.isidentifier() else "by .to(device)"  # an item has no such name
    return cause, f"Move it first, {move}, or pass it on the device."


def target_device(kwargs: dict[str, Any]) -> str:
    """Return the type of the device that an operator's arguments name for its result; "cpu" if they name none."""
    device = kwargs.get("device")
    return "cpu" if device is None else torch.device(device).type
