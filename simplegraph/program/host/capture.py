"""The mode of a capture: serves constants, and refuses what a replay would not do on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from simplegraph.base.constants import LARGEST_BYTES, SERVING, WATCHED_BYTES, is_watchable, span
from simplegraph.base.errors import HostError
from simplegraph.base.failures import BREAK
from simplegraph.base.operators import OperatorMode, is_higher_order, reads_no_value, strided_tensors, written_args
from simplegraph.base.tensors import storage_key
from simplegraph.program.host.modes import HostMode, target_device


class HostCapture(HostMode):  # type: ignore[no-untyped-call]
    """Follows a capture, serves its constants from device copies, and refuses what a replay would not do.

    Args:
        device: where the forward runs.
        copies: device copies that a warmup made, by content.
        name: names a CPU tensor for messages, such as by the attribute that holds it.

    Attributes:
        served: the copies that the graph reads; whoever replays it must own them.
        reads: CPU tensors from before that the capture read, by their place: a replay is right while they hold what
            they held.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Mapping[Hashable, Tensor],
        name: Callable[[Tensor], str | None] = lambda _: None,
    ) -> None:
        super().__init__(device)
        self._copies = copies
        self._name = name
        self._error: HostError | None = None
        self._served: dict[int, Tensor] = {}
        self.reads: dict[tuple[Any, ...], Tensor] = {}

    @property
    def served(self) -> list[Tensor]:
        return list(self._served.values())

    @contextlib.contextmanager
    def following(self, observer: OperatorMode | None = None) -> Iterator[None]:
        """Follow the capture in here, but for what is done for breaks; `observer` as for `HostMode`."""
        SERVING.active, before = True, SERVING.active
        try:
            with super().following(observer):
                yield
        except RuntimeError as error:
            if self._error is None or error is self._error or error.__cause__ is not None:
                raise
            raise error from self._error  # which TorchScript conceals
        finally:
            SERVING.active = before

    def check_refused(self) -> None:
        """Raise what was refused, even if the forward swallowed it and went on."""
        if self._error is not None:
            raise self._error

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: Sequence[Tensor], *, on_host: bool
    ) -> None:
        if on_host and _draws_on_cpu(func, kwargs):
            drawn = f"random numbers are drawn on the CPU ({func.overloadpacket}), and a replay would draw no others"
            self._refuse(drawn, f"Draw them on the device, or {BREAK}.")
        if on_host and torch.Tag.inplace_view not in func.tags:
            for tensor in strided_tensors(tuple(written_args(func, args, kwargs))):
                if storage_key(tensor) not in self._made:
                    found = f"{self._named(tensor)} is on the CPU and the forward writes to it ({func.overloadpacket})"
                    remedy = f"Keep state on the device, or {BREAK}."
                    self._refuse(f"{found}, which a replay would not do", remedy)
        if reads_no_value(func):
            return
        for tensor in host:
            known = self._made.get(storage_key(tensor))
            if known is None:
                self._note_read(tensor)
            elif on_host and not known:
                found = f"a tensor was read back to Python while its value does not exist yet ({func.overloadpacket})"
                self._refuse(found, f"Keep it on the device, or {BREAK}.")

    def _note_read(self, tensor: Tensor) -> None:
        if not is_watchable(tensor):
            found = f"{self._named(tensor)} is on the CPU and has {span(tensor)} bytes"
            limit = "memory shared with NumPy, and an inference tensor, is compared at every call up to"
            found += (
                f", of {LARGEST_BYTES} at most" if span(tensor) > LARGEST_BYTES else f"; {limit} {WATCHED_BYTES} bytes"
            )
            remedy = "Keep it on the device (register_buffer), so that the graph reads what it holds at each replay."
            self._refuse(found, remedy)
        place = storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self.reads.setdefault(place, tensor)  # itself: made here, a view of it would have a version of its own

    def _named(self, tensor: Tensor) -> str:
        return self._name(tensor) or f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"

    def _refuse(self, cause: str, remedy: str) -> NoReturn:
        error = HostError(cause, remedy)
        self._error = self._error or error
        raise error

    def _copy(self, key: Hashable, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        copy = self._copies.get(key)
        if copy is None:
            made = self._emulated or storage_key(source) in self._made
            what = f"a {source.dtype} tensor of shape {tuple(source.shape)} that the forward makes on the CPU"
            self._refuse(
                f"{what if made else self._named(source)} has another value than in the warmup before",
                "Make it on the device, or pass its value as an argument; what Python computes is frozen in a graph.",
            )
        self._served[id(copy)] = copy
        return copy


def _draws_on_cpu(func: Any, kwargs: dict[str, Any]) -> bool:
    return (
        not is_higher_order(func) and torch.Tag.nondeterministic_seeded in func.tags and target_device(kwargs) == "cpu"
    )
