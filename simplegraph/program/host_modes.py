"""Modes that follow the CPU tensors of a forward on another device: `HostWarmup` and `HostCapture`.

A capture records no copy from ordinary host memory, and a replay runs no CPU operator. Tensors that the forward makes
on the CPU from Python data alone are constants, like Python itself: a capture uses the device copies that a warmup
made, which are found by the bits of the value. CPU tensors from before the forward may change: guards compare their
values. A capture is refused if changes of such a tensor cannot be noticed, and if the forward draws random numbers or
writes to memory on the CPU.

Torch shows these uses of a CPU tensor from before the forward to no mode: `.tolist()` and `.numpy()` (`.item()` is
shown), its use as the split points of `torch.tensor_split` or in a list for `torch.tensor`, computations in NumPy, and
writes through NumPy. For a tensor above 64 bytes, a later write through `.data` that changes no sampled byte is missed,
too. A NumPy array that becomes a tensor in the forward counts as a tensor from before.

On the emulator, whose device is the CPU, all CPU tensors count as tensors of the device. There, a list of numbers is a
constant (`torch.tensor([0, 1])`, ``x[:, [0, 1]]``), and everything else is captured like work of the device. So the
emulator finds no stale CPU values, and no random numbers, writes and outputs on the CPU.

CPU tensors that the forward is passed are followed by name (`HostArguments`). If the forward moves such a tensor to the
device unchanged, it has a static input there, which a capture reads in its place.

This follows CPU tensors; for values that are read back from the device see `steady_reads`, for indices `index_ranges`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from simplegraph.base.constants import (
    LARGEST_BYTES,
    LARGEST_TOTAL_BYTES,
    SERVING,
    WATCHED_BYTES,
    content,
    is_watchable,
    span,
)
from simplegraph.base.errors import HostError
from simplegraph.base.nested import flatten
from simplegraph.base.operators import (
    OperatorMode,
    defined,
    facts_of,
    is_higher_order,
    strided_tensors,
    without_modes,
    written_args,
)
from simplegraph.base.tensors import storage_key
from simplegraph.program.breaks.marks import ACTIVE
from simplegraph.program.host_arguments import (
    COPY,
    MASKS,
    MOVES,
    PUT,
    TO_COPY,
    WHERE,
    HostArguments,
    target_device,
    used_on_cpu,
)
from simplegraph.program.steady_reads import SteadyReads

_aten: Any = torch.ops.aten
_LIFT = _aten.lift_fresh.default


# Operators that check on the host if every standard deviation is valid before they draw.
_CHECKED_DRAWS = {_aten.normal.Tensor_Tensor, _aten.normal.float_Tensor}


def _draw_unchecked(mean: Any, std: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw the same numbers as `torch.normal` without its check, by the operators that it consists of."""
    first = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(first.shape, std.shape)  # type: ignore[no-untyped-call]
    drawn = torch.empty(shape, dtype=first.dtype, device=first.device)
    return drawn.normal_(generator=generator).mul_(std).add_(mean)


class _PythonReads(TorchFunctionMode):
    """Shows a `HostMode` the reads of a CPU tensor that need no operator."""

    READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__dlpack__)
    SPLITS = (torch.tensor_split, Tensor.tensor_split)  # functions that read split points
    LISTS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)  # functions that read numbers in lists

    def __init__(self, mode: HostMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read: Iterable[Any] = ()
        if func in self.READS:
            read = args[:1]
        elif func in self.SPLITS:
            read = (*args[1:], *kwargs.values())
        elif func in self.LISTS:
            read = flatten([value for value in (*args, *kwargs.values()) if not issubclass(type(value), Tensor)])[0]
        for tensor in read:
            if issubclass(type(tensor), Tensor):
                self._mode.read_by_python(tensor, func)
        return func(*args, **kwargs)


class HostMode(OperatorMode, abc.ABC):
    """Sees every operator while active, and follows the CPU tensors among its arguments and results.

    On the emulator, whose device is the CPU, only Python data in lists (`torch.tensor([0, 1])`) is known to come from
    the host.

    Args:
        device: the device of the forward.
        arguments: the CPU tensors that the forward is passed.
        steady: follows values that the forward reads back from the device; None if no value may be taken from a warmup.

    Attributes:
        shows_python: True to note reads of arguments without an operator, too.
        met_host: True once the run used a CPU tensor.
    """

    shows_python = True

    def __init__(
        self, device: torch.device, arguments: HostArguments | None = None, steady: SteadyReads | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met_host = False
        self.arguments, self.steady = arguments, steady
        self._emulated = device.type == "cpu"
        # CPU memory that the run made, by storage key; True if its values depend only on Python data and watched
        # values. Memory from before lives during the whole run, so a reused key belongs to the run's own memory.
        self._made: dict[int, bool] = {}
        self._recorder: Any = None

    @contextlib.contextmanager
    def following(self, observer: OperatorMode | None = None) -> Iterator[None]:
        """Follow the run in the block, except the code of breaks, which is not in the graph.

        Args:
            observer: another mode to enter for the block; it sees every operator before this mode.
        """
        self._recorder, lifts = ACTIVE.recorder, _get_lifting()
        _set_lifting(True)  # modes see ``torch.tensor(0.0, device=...)`` as a CPU tensor, which is then moved
        shown = self.shows_python and self.arguments is not None and self.arguments.shows_python
        reads = _PythonReads(self) if shown else contextlib.nullcontext()
        try:
            with self if observer is None else observer.before(self), reads:
                yield
        finally:
            _set_lifting(lifts)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on plain tensors, and follow its use of CPU tensors."""
        # In the code of a break, no recorder of breaks is active.
        if ACTIVE.recorder is not self._recorder:
            result = defined(func(*args, **kwargs))
            if self.steady is not None:
                self.steady.forget(result)
            return result
        if self.steady is None:
            return self._follow(func, args, kwargs)
        return self.steady.run(self._follow, func, args, kwargs)

    @contextlib.contextmanager
    def launching(self, tensors: Sequence[Tensor] | None) -> Iterator[None]:
        """Surround the launch of a Triton kernel that is passed these tensors."""
        with contextlib.nullcontext() if self.steady is None else self.steady.launching(tensors):
            yield

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and follow its use of CPU tensors."""
        if is_higher_order(func) or (self._emulated and func is not _LIFT):
            return defined(func(*args, **kwargs))
        if self._emulated:
            if args[0].dim() and args[0].numel():  # a kernel can be passed a single number by value
                self._copy(content(args[0]), args[0], args[0].clone)
            self.met_host = True
            return func(args[0])
        tensors = strided_tensors((*args, *kwargs.values()))
        host = [tensor for tensor in tensors if tensor.is_cpu]
        if tensors and not host:
            result = func(*args, **kwargs)
            self._note_made(result, constant=False)
            return defined(result)
        if host and facts_of(func).is_composite:  # inference_mode does not decompose it
            return self.take_apart(func, args, kwargs)
        on_host = len(host) == len(tensors)
        if host and self.arguments is not None:
            for tensor in self.arguments.note(func, args, kwargs, host):
                self._check_argument(tensor)
        self._check(func, args, kwargs, host, on_host=on_host)
        constant = func is _LIFT or all(map(self._is_constant, host))
        result = self._move(func, args, kwargs) if host and func in MOVES else func(*args, **kwargs)
        made = self._note_made(result, () if func is _LIFT else host, constant=constant)
        self.met_host = self.met_host or made or bool(host)
        for tensor in strided_tensors(tuple(written_args(func, args, kwargs))):
            key = storage_key(tensor)
            if key in self._made:
                self._made[key] = self._made[key] and constant and on_host
        return defined(result)

    def _note_made(self, result: Any, given: Sequence[Tensor] = (), *, constant: bool) -> bool:
        """Note the CPU memory that an operator made; True if it made some."""
        made = {storage_key(tensor) for tensor in strided_tensors((result,)) if tensor.is_cpu}
        made = made.difference(map(storage_key, given)) if made else made
        self._made.update(dict.fromkeys(made, constant))
        return bool(made)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that moves CPU tensors to the device; constants are read from device copies."""
        first = args[0]
        if func is TO_COPY:
            static = self._static(first)
            if static is not None and target_device(kwargs) != "cpu":
                return func(static, *args[1:], **kwargs)
            if target_device(kwargs) != "cpu" and first.is_cpu and self._is_constant(first):
                # The key includes the dtype, device and memory format of the copy.
                key = content(first), *sorted((name, value) for name, value in kwargs.items() if value is not None)
                # A clone, since the forward may write to the tensor, and every replay must start with the constant.
                return self._copy(key, first, functools.partial(func, *args, **kwargs)).clone()
        elif func is WHERE:
            like = next((tensor for tensor in args if not tensor.is_cpu), first)
            args = tuple(self._on_device(tensor, tensor.dtype, like.device) for tensor in args)
        elif first.is_cpu:
            pass
        elif func is COPY:
            args = (first, self._on_device(args[1], first.dtype, first.device), *args[2:])
        else:
            indices = self._indices(args[1], first.device)
            args = (first, indices, *args[2:])
            # With a mask on the device and a number on the CPU, torch runs masked_fill_, whose shapes are fixed.
            if func in PUT and not any(index.dtype in MASKS for index in strided_tensors(indices)):
                args = (first, indices, self._on_device(args[2], args[2].dtype, first.device), *args[3:])
        return func(*args, **kwargs)

    def _indices(self, indices: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
        """Return indices on the device; CPU masks are converted to indices, which a capture cannot do on the device."""
        on_device: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.is_cpu and index.dtype in MASKS and self._is_constant(index):
                with without_modes():
                    columns = index.nonzero().unbind(1)
                on_device += [self._device_copy(column, device, index) for column in columns]
            else:
                on_device.append(index if index is None else self._on_device(index, index.dtype, device))
        return on_device

    def _on_device(self, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        static = self._static(tensor)
        if static is not None:
            return static
        if device.type == "cpu" or not tensor.is_cpu or not self._is_constant(tensor):
            return tensor
        value = tensor
        if tensor.dtype is not dtype:  # converted on the CPU, as torch does
            with without_modes():
                value = tensor.to(dtype)
        return self._device_copy(value, device, tensor)

    def _device_copy(self, value: Tensor, device: torch.device, source: Tensor) -> Tensor:
        """Return the device tensor that an operator reads in place of `value`, which is made of a CPU tensor."""
        return self._copy((content(value), device), source, lambda: value.to(device))

    def _is_constant(self, tensor: Tensor) -> bool:
        """True if a tensor's value depends only on Python data, and on earlier values that guards can compare."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        if self._is_input(tensor):  # other memory at every call
            return False
        constant = self._made.get(storage_key(tensor))
        return is_watchable(tensor) if constant is None else constant

    def _is_input(self, tensor: Tensor) -> bool:
        """True for an argument's tensor that has a static input on the device."""
        return self.arguments is not None and storage_key(tensor) in self.arguments.static

    def _static(self, tensor: Tensor) -> Tensor | None:
        """Return the static input that a capture reads in place of an argument's tensor; None if there is none."""
        return None if self.arguments is None else self.arguments.on_device(tensor)

    def read_by_python(self, tensor: Tensor, func: Any) -> None:
        """Note a read of a CPU tensor that needs no operator, outside of breaks."""
        arguments = self.arguments
        if ACTIVE.recorder is self._recorder and arguments is not None and arguments.among((tensor,)):
            arguments.note_read(tensor, f"{'Tensor' if hasattr(Tensor, func.__name__) else 'torch'}.{func.__name__}")
            self._check_argument(tensor)

    # Overridden by warmups and captures.

    def _check_argument(self, tensor: Tensor) -> None:
        """Refuse the use of an argument's tensor on the CPU, if no graph can contain it."""

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: Sequence[Tensor], *, on_host: bool
    ) -> None:
        """Refuse an operator that no graph can contain, before it runs; `host` are its CPU tensors."""

    @abc.abstractmethod
    def _copy(self, key: Hashable, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the device copy that operators read in place of a CPU tensor.

        Args:
            key: the exact value of the tensor, and the layout of the copy.
            source: the CPU tensor.
            make: makes the copy.
        """


# Private to torch. Without them, a capture refuses a number that is made on the device, as it refuses a copy.
_get_lifting: Callable[[], bool] = getattr(torch._C, "_only_lift_cpu_tensors", lambda: False)
_set_lifting: Callable[[bool], object] = getattr(torch._C, "_set_only_lift_cpu_tensors", bool)


class HostWarmup(HostMode):  # type: ignore[no-untyped-call]
    """Follows a warmup, and keeps device copies of the tensors that it moves to the device; the run reads the copies.

    Args:
        device: where the forward runs.
        arguments: the CPU tensors that it is passed.
        steady: as for `HostMode`.

    Attributes:
        copies: device copies of moved tensors, by content.
        sources: moved CPU tensors from before the run.
    """

    def __init__(
        self, device: torch.device, arguments: HostArguments | None = None, steady: SteadyReads | None = None
    ) -> None:
        super().__init__(device, arguments, steady)
        self.copies: dict[Hashable, Tensor] = {}
        self.sources: list[Tensor] = []

    def _copy(self, key: Hashable, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        if key not in self.copies:
            # Not an inference tensor: captures in other modes read the copy, too.
            with without_modes(), torch.inference_mode(False), torch.no_grad():
                if not self._emulated and storage_key(source) not in self._made:
                    if sum(map(span, (*self.sources, source))) > LARGEST_TOTAL_BYTES:
                        return make()
                    self.sources.append(source)
                self.copies[key] = make()
        return self.copies[key]


class HostCapture(HostMode):  # type: ignore[no-untyped-call]
    """Follows a capture, takes its constants from device copies, and refuses operators that a replay would not repeat.

    Args:
        device: where the forward runs.
        copies: device copies that a warmup made, by content.
        name: returns the name of a CPU tensor for messages, such as that of its attribute.
        arguments: the CPU tensors that it is passed.
        steady: as for `HostMode`.

    Attributes:
        served: the copies that the graph reads, by id; the owner of the graph must keep them alive.
        reads: CPU tensors from before that the capture read, by their place in memory; replays are valid while their
            values stay the same.
    """

    # Under a torch function mode, attention loses its fast path, and the graph would differ from eager.
    shows_python = False

    def __init__(
        self,
        device: torch.device,
        copies: Mapping[Hashable, Tensor],
        name: Callable[[Tensor], str | None] = lambda _: None,
        arguments: HostArguments | None = None,
        steady: SteadyReads | None = None,
    ) -> None:
        super().__init__(device, arguments, steady)
        self._copies = copies
        self._name = name
        self._error: HostError | None = None
        static = {} if arguments is None else arguments.static
        self.served: dict[int, Tensor] = {id(memory): memory for memory in static.values() if memory is not None}
        self.reads: dict[tuple[Any, ...], Tensor] = {}

    @contextlib.contextmanager
    def following(self, observer: OperatorMode | None = None) -> Iterator[None]:
        """Follow the capture in the block, except the code of breaks; `observer` as for `HostMode`."""
        SERVING.active, before = True, SERVING.active
        try:
            with super().following(observer):
                yield
        except RuntimeError as error:
            if self._error is None or error is self._error or error.__cause__ is not None:
                raise
            raise error from self._error  # TorchScript hides the cause
        finally:
            SERVING.active = before

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on_device = self._emulated or not any(tensor.is_cpu for tensor in strided_tensors(args))
        if func in _CHECKED_DRAWS and on_device:
            return _draw_unchecked(*args, **kwargs)
        return super()._follow(func, args, kwargs)

    def check_refused(self) -> None:
        """Raise the refusal again, if the forward caught it and went on."""
        if self._error is not None:
            raise self._error

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: Sequence[Tensor], *, on_host: bool
    ) -> None:
        if on_host and _draws_on_cpu(func, kwargs):
            drawn = f"random numbers are drawn on the CPU ({func.overloadpacket}), and a replay would draw no others"
            self._refuse(drawn, "Draw them on the device.", breaks=True)
        if on_host and torch.Tag.inplace_view not in func.tags:
            for tensor in strided_tensors(tuple(written_args(func, args, kwargs))):
                if storage_key(tensor) not in self._made:
                    cause = f"{self._named(tensor)} is on the CPU and the forward writes to it ({func.overloadpacket})"
                    self._refuse(f"{cause}, which a replay would not do", "Keep state on the device.", breaks=True)
        if facts_of(func).reads_no_value:
            return
        for tensor in host:
            constant = self._made.get(storage_key(tensor))
            if constant is None:
                if not self._is_input(tensor):
                    self._note_read(tensor)
            elif on_host and not constant:
                cause = "Python read back the value of a tensor, which has none while it is captured"
                self._refuse(f"{cause} ({func.overloadpacket})", "Keep it on the device.", breaks=True)

    def _check_argument(self, tensor: Tensor) -> None:
        if self.arguments is not None and self._is_input(tensor):
            name, *_ = self.arguments.names[storage_key(tensor)]
            self._refuse(*used_on_cpu(name, self.arguments.read[name]))

    def _note_read(self, tensor: Tensor) -> None:
        if not is_watchable(tensor):
            cause = f"{self._named(tensor)} is on the CPU and has {span(tensor)} bytes"
            limit = "memory shared with NumPy, and an inference tensor, is compared at every call up to"
            cause += (
                f", of {LARGEST_BYTES} at most" if span(tensor) > LARGEST_BYTES else f"; {limit} {WATCHED_BYTES} bytes"
            )
            remedy = "Keep it on the device (register_buffer), so that the graph reads what it holds at each replay."
            self._refuse(cause, remedy, breaks=True)
        place = storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self.reads.setdefault(place, tensor)  # the tensor itself: a view made here would have its own version

    def _named(self, tensor: Tensor) -> str:
        return self._name(tensor) or f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"

    def _refuse(self, cause: str, remedy: str, *, breaks: bool = False) -> NoReturn:
        error = HostError(cause, remedy, breaks=breaks)
        self._error = self._error or error
        raise error

    def _copy(self, key: Hashable, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        copy = self._copies.get(key)
        if copy is None:
            made = self._emulated or storage_key(source) in self._made
            description = f"a {source.dtype} tensor of shape {tuple(source.shape)} that the forward makes on the CPU"
            self._refuse(
                f"{description if made else self._named(source)} has another value than in the warmup before",
                "Make it on the device, or pass its value as an argument; what Python computes is frozen in a graph.",
                breaks=True,
            )
        self.served[id(copy)] = copy
        return copy


def _draws_on_cpu(func: Any, kwargs: dict[str, Any]) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and target_device(kwargs) == "cpu"
