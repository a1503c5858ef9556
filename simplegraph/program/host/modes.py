"""Modes that follow the CPU tensors of a forward: one for a warmup, and one for a capture.

A capture records no copy from ordinary host memory, and a replay runs no CPU operator. What the forward makes on the
CPU from Python data alone is as frozen as Python is, so a capture takes the device copies that a warmup made, found
by the bits of the value. CPU tensors that were there before are values that may change: they are noted, for whoever
watches them, and refused where writes to them would not show, as are random numbers drawn and memory written on the
CPU.

Not seen, because torch shows it to no mode: `.tolist()` and `.numpy()` of a CPU tensor from before (`.item()` is seen),
one that tells `torch.tensor_split` where to split, what NumPy computes, and writes to a CPU tensor through NumPy; of a
tensor above 64 bytes, also a later write through `.data` that leaves all sampled bytes as they were. A NumPy array that
becomes a tensor in the forward counts as a tensor from before. On the emulator, whose device is the CPU, all CPU
tensors are taken for the device's: there a list of numbers is a constant (`torch.tensor([0, 1])`, ``x[:, [0, 1]]``) and
everything else is captured like work of the device, so that it shows neither stale CPU values nor CPU random numbers,
writes and outputs.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.break_operators import ACTIVE
from simplegraph.base.constants import content, is_watchable
from simplegraph.base.operators import (
    OperatorMode,
    defined,
    is_composite,
    is_higher_order,
    strided_tensors,
    without_modes,
    written_args,
)
from simplegraph.base.tensors import storage_key

_aten: Any = torch.ops.aten
_LIFT = _aten.lift_fresh.default
_TO_COPY, _COPY = _aten._to_copy.default, _aten.copy_.default
_INDEX = {_aten.index.Tensor, _aten._unsafe_index.Tensor}
_PUT = {_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_PUT |= {_aten._unsafe_index_put.default}
_WHERE = _aten.where.self
_MOVES = {_TO_COPY, _COPY, _WHERE, *_INDEX, *_PUT}
_MASKS = (torch.bool, torch.uint8)


class HostMode(OperatorMode, abc.ABC):
    """Sees every operator while active, and follows the CPU tensors among its arguments and results.

    Where the graphs' device is the CPU, as the emulator's is, a CPU tensor says nothing: only Python data in lists
    (`torch.tensor([0, 1])`) is known to come from the host.

    Args:
        device: where the forward runs.

    Attributes:
        met_host: True once the run used a CPU tensor.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met_host = False
        self._emulated = device.type == "cpu"
        # CPU memory that the run made, by storage key; True if it follows from Python data and watched values. Keys
        # only: memory from before lives throughout, so a key that is used again is again the run's own.
        self._made: dict[int, bool] = {}
        self._recorder: Any = None

    @contextlib.contextmanager
    def following(self, observer: OperatorMode | None = None) -> Iterator[None]:
        """Follow the run in here, but for what runs inside of breaks: it is not in the graph.

        Args:
            observer: a mode that is entered in here, and sees every operator before this one.
        """
        self._recorder = ACTIVE.recorder
        with _lifting_visible(), self if observer is None else observer.before(self):
            yield

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on plain tensors, and follow what it does with those on the CPU."""
        # Inside a break, or for one, no recorder of breaks is active.
        if is_higher_order(func) or ACTIVE.recorder is not self._recorder or (self._emulated and func is not _LIFT):
            return defined(func(*args, **kwargs))
        if self._emulated:
            if is_list(args[0]):
                self._copy(content(args[0]), args[0], args[0].clone)
            self.met_host = True
            return func(args[0])
        tensors = strided_tensors((*args, *kwargs.values()))
        host = [tensor for tensor in tensors if tensor.is_cpu]
        if tensors and not host:
            result = func(*args, **kwargs)
            self._note_made(result, known=False)
            return defined(result)
        if host and is_composite(func):  # under inference_mode it comes whole
            return self.take_apart(func, args, kwargs)
        on_host = len(host) == len(tensors)
        self._check(func, args, kwargs, host, on_host=on_host)
        known = func is _LIFT or all(map(self._is_known, host))
        result = self._move(func, args, kwargs) if host and func in _MOVES else func(*args, **kwargs)
        made = self._note_made(result, () if func is _LIFT else host, known=known)
        self.met_host = self.met_host or made or bool(host)
        for tensor in strided_tensors(tuple(written_args(func, args, kwargs))):
            key = storage_key(tensor)
            if key in self._made:
                self._made[key] = self._made[key] and known and on_host
        return defined(result)

    def _note_made(self, result: Any, given: Sequence[Tensor] = (), *, known: bool) -> bool:
        """Note the CPU memory among an operator's results that it was not given; True if there is any."""
        made = {storage_key(tensor) for tensor in strided_tensors((result,)) if tensor.is_cpu}
        made = made.difference(map(storage_key, given)) if made else made
        self._made.update(dict.fromkeys(made, known))
        return bool(made)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; what it moves to the device is a constant, as far as it is known."""
        first = args[0]
        if func is _TO_COPY:
            if target_device(kwargs) != "cpu" and first.is_cpu and self._is_known(first):
                key = content(first), *target(kwargs)
                # The forward may write to what it gets, and every replay begins with the constant.
                return self._copy(key, first, functools.partial(func, *args, **kwargs)).clone()
        elif func is _WHERE:
            like = next((tensor for tensor in args if not tensor.is_cpu), first)
            args = tuple(self._on_device(tensor, tensor.dtype, like.device) for tensor in args)
        elif first.is_cpu:
            pass
        elif func is _COPY:
            args = (first, self._on_device(args[1], first.dtype, first.device), *args[2:])
        else:
            indices = self._indices(args[1], first.device)
            args = (first, indices, *args[2:])
            # With a mask on the device, a number on the CPU makes it masked_fill_, which needs no shapes.
            if func in _PUT and not any(index.dtype in _MASKS for index in strided_tensors(indices)):
                args = (first, indices, self._on_device(args[2], args[2].dtype, first.device), *args[3:])
        return func(*args, **kwargs)

    def _indices(self, indices: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
        """Return indices on the device; masks as the indices they stand for, which the device cannot count."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.is_cpu and index.dtype in _MASKS and self._is_known(index):
                with without_modes():
                    columns = index.nonzero().unbind(1)
                found += [self._copied(column, device, index) for column in columns]
            else:
                found.append(index if index is None else self._on_device(index, index.dtype, device))
        return found

    def _on_device(self, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu" or not tensor.is_cpu or not self._is_known(tensor):
            return tensor
        value = tensor
        if tensor.dtype is not dtype:  # converted on the CPU, as torch does
            with without_modes():
                value = tensor.to(dtype)
        return self._copied(value, device, tensor)

    def _copied(self, value: Tensor, device: torch.device, source: Tensor) -> Tensor:
        """Return what stands for a CPU tensor, of which `value` is made, in an operator on the device that reads it."""
        return self._copy((content(value), device), source, lambda: value.to(device))

    def _is_known(self, tensor: Tensor) -> bool:
        """True if a tensor's value follows from Python data and from values of before that can be watched."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        known = self._made.get(storage_key(tensor))
        return is_watchable(tensor) if known is None else known

    # What a warmup and a capture do differently.

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: Sequence[Tensor], *, on_host: bool
    ) -> None:
        """Refuse what a graph cannot hold, before it runs; `host` are its tensors on the CPU."""

    @abc.abstractmethod
    def _copy(self, key: Hashable, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the device copy that operators read in place of what `make` makes of a CPU tensor.

        Args:
            key: what the copy is of, to the bit, and how it looks.
            source: the CPU tensor.
            make: makes the copy.
        """


# Private to torch; where it is absent, a number that is made on the device is refused by the capture, as a copy is.
_get_lifting: Callable[[], bool] = getattr(torch._C, "_only_lift_cpu_tensors", lambda: False)
_set_lifting: Callable[[bool], object] = getattr(torch._C, "_set_only_lift_cpu_tensors", bool)


@contextlib.contextmanager
def _lifting_visible() -> Iterator[None]:
    """Let modes of this thread see ``torch.tensor(0.0, device=...)`` as a CPU tensor, which is then moved."""
    before = _get_lifting()
    _set_lifting(True)
    try:
        yield
    finally:
        _set_lifting(before)


def target(kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what decides how a copy looks: its dtype, device and memory format."""
    return tuple(
        sorted(((name, value) for name, value in kwargs.items() if value is not None), key=lambda pair: pair[0])
    )


def target_device(kwargs: dict[str, Any]) -> str:
    """Return the type of the device that an operator is told to put its result on, the CPU if none."""
    device = kwargs.get("device")
    return "cpu" if device is None else torch.device(device).type


def is_list(tensor: Tensor) -> bool:
    """True if Python data is more than a number, which an operator can take along by itself."""
    return tensor.dim() > 0 and tensor.numel() > 0
