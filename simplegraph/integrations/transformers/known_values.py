"""Device tensors that follow from Python numbers alone: their values, and reads of them in a capture."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.operators import (
    OperatorMode,
    defined,
    facts_of,
    innermost_mode,
    is_higher_order,
    strided_tensors,
    without_modes,
    written_args,
)
from simplegraph.base.tensors import storage_key
from simplegraph.program.breaks.marks import ACTIVE

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.item.default}
_FILLED = {"ones_like": 1, "new_ones": 1, "zeros_like": 0, "new_zeros": 0}  # of any tensor's shape
# Of integers these are exact, on every device.
_ARITHMETIC = {"arange", "add", "sub", "rsub", "mul", "neg", "cumsum", "sum"}
_EXACT = {"ones", "zeros", "full", "scalar_tensor", "eq", "ne", "lt", "le", "gt", "ge", "all", "any", "cat"}
_EXACT |= {"logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or", "clone", "_to_copy"}
_EXACT |= {"alias", "detach", "slice", "select", "unsqueeze", "squeeze", "expand", "view", "_unsafe_view", "permute"}
_EXACT |= {"transpose", "t", "repeat", "stack"}
_MOST_ELEMENTS = 1 << 16


class KnownValues(OperatorMode):  # type: ignore[no-untyped-call]
    """Computes on the CPU, too, what a run makes of Python numbers alone, and serves reads of it.

    In a capture no tensor has a value yet, but these have one: it depends on the shapes of the run, as its Python does,
    and on nothing that a replay may change. What eager breaks make may change at every replay, and is not known. What
    is written to is known no longer; a write that torch shows to no mode, such as a Triton kernel's, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage key and place in it, with the storage: while it is held, its key is no other's.
        self._known: dict[int, dict[Hashable, Tensor]] = {}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._recorder = ACTIVE.recorder
        self._follows = self._active = False

    @property
    def inside_break(self) -> bool:
        """True if an eager break is running, which no graph holds."""
        return ACTIVE.recorder is not self._recorder

    def knows(self, tensor: Tensor) -> bool:
        """True if reads of the tensor are served."""
        return type(tensor) is Tensor and tensor.layout is torch.strided and self._value(tensor) is not None

    def follow(self) -> None:
        """Follow the run from here on."""
        self._follows = self._active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Follow the run no further; nothing is known then. Call it again where the modes entered later have ended."""
        self._follows = False
        self._known.clear()
        self._held.clear()
        if self._active and innermost_mode() is self:
            self._active = False
            self.__exit__(None, None, None)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and compute it on the CPU if all that it is passed is known."""
        kind = _kind(func) if self._follows and not self.inside_break else None
        if is_higher_order(func) or (kind is None and not self._known):
            return defined(func(*args, **kwargs))
        tensors = strided_tensors((*args, *kwargs.values()))
        values = [value for value in map(self._value, tensors) if value is not None]
        if values and not self.inside_break:
            if func in _READS:
                return self._read(func, values[0])
            if facts_of(func).is_composite:  # under inference_mode it comes whole
                return self.take_apart(func, args, kwargs)
        self._forget(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        if kind is not None and isinstance(result, Tensor) and 0 < result.numel() <= _MOST_ELEMENTS:
            self._learn(kind, func, args, kwargs, result)
        return defined(result)

    def _read(self, func: Any, value: Tensor) -> Any:
        with without_modes():
            return func(value)

    def _value(self, tensor: Tensor) -> Tensor | None:
        known = self._known.get(storage_key(tensor))
        return None if known is None else known.get(_place(tensor))

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Forget what an operator writes to, or may, if it is not torch's own."""
        own = func.namespace in ("aten", "prims", "prim")
        for tensor in strided_tensors(tuple(written_args(func, args, kwargs))) if own else tensors:
            self._known.pop(storage_key(tensor), None)

    def _learn(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if kind in _ARITHMETIC and (result.is_floating_point() or result.is_complex()):
            return  # devices may round otherwise
        with without_modes():
            try:
                value = self._computed(kind, func, args, kwargs, result)
            except (KeyError, RuntimeError):  # not known, or no operator of the CPU's
                return
        if value.shape == result.shape and value.dtype is result.dtype:
            key = storage_key(result)
            self._known.setdefault(key, {})[_place(result)] = value
            self._held[key] = result.untyped_storage()

    def _computed(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
        if kind in _FILLED:
            return torch.full(result.shape, _FILLED[kind], dtype=result.dtype, device="cpu")
        named = {name: self._on_cpu(arg) for name, arg in kwargs.items() if name != "pin_memory"}
        named |= {"device": torch.device("cpu")} if "device" in named else {}
        value: Tensor = func(*map(self._on_cpu, args), **named)
        return value

    def _on_cpu(self, arg: Any) -> Any:
        """Return an argument with values for tensors.

        Raises:
            KeyError: a tensor is not known.
        """
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(self._on_cpu, arg))
        if not isinstance(arg, Tensor):
            return arg
        value = self._value(arg) if arg.layout is torch.strided else None
        if value is None:
            raise KeyError
        return value


def _place(tensor: Tensor) -> Hashable:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@functools.lru_cache(maxsize=4096)
def _kind(func: Any) -> str | None:
    """Return the name of an operator whose results follow from its arguments, to the bit on all devices."""
    name = facts_of(func).name
    known = name in _FILLED or name in _ARITHMETIC or name in _EXACT
    return name if known and not any(arg.is_out for arg in func._schema.arguments) else None
