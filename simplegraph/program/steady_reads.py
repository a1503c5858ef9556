"""Values that a forward reads back from memory which no run writes: a capture takes them from a warmup.

``if self.ready:``, ``int(self.stride)`` and ``bool(self.mask.all())`` wait for the device, which no capture can. Where
such a value follows from tensors of the module alone, and no run writes to these, every call reads the same. So a
warmup follows what the forward computes, and remembers what it read; a capture that comes to the same computation of
the same memory goes on with that value. The graph holds while the versions of these tensors stay.

Only a proof notices a write that raises no version: through ``.data``, or by a kernel that torch does not dispatch.
What a CPU reads without an operator (``tolist``) is not seen, and refused.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from simplegraph.base.constants import WATCHED_BYTES, Answer, WatchedVersion, content, is_written_by_graphs, span
from simplegraph.base.operators import facts_of, is_higher_order, strided_tensors, written_args
from simplegraph.base.tensors import storage_key

_aten: Any = torch.ops.aten
_LIFT = _aten.lift_fresh.default
_READS = {
    *(_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default),
    *(_aten.equal.default, _aten.allclose.default),
}


class _Origin(NamedTuple):
    """Says what a tensor's values follow from: a digest of the computation, and the storages it begins at."""

    digest: bytes
    roots: frozenset[int]


class SteadyReads:
    """Follows what a run computes, and knows the values that follow from memory of before which nothing writes.

    Args:
        device: what the run computes on. A CPU tensor beside a GPU is followed elsewhere.
        answers: of a capture, what warmups read, by computation.
        held: of a capture, lists the tensors of the module that lie in the memory of a tensor.
        inputs: of a warmup, storage keys of its inputs.

    Attributes:
        used: what answers of this capture follow from; answered: True if there were any.
    """

    def __init__(
        self,
        device: torch.device,
        answers: Mapping[bytes, Answer] | None = None,
        held: Callable[[Tensor], Sequence[Tensor]] = lambda _: (),
        inputs: Collection[int] = (),
    ) -> None:
        self._device, self._answers, self._held, self._inputs = device, answers, held, inputs
        self._made: dict[int, _Origin | None] = {}  # by storage key; None for what follows from data
        self._outside: dict[int, tuple[Tensor, int]] = {}  # tensors from before as they were met first, and versions
        self._written: set[int] = set()
        self._read: dict[bytes, tuple[Any, frozenset[int]]] = {}
        self._sees_all = True
        self.used: list[WatchedVersion] = []
        self.answered = False

    def learnt(self) -> dict[bytes, Answer]:
        """Return what this run read of memory that it did not write; call at its end."""
        watched: dict[int, WatchedVersion] = {}
        for key, (tensor, version) in self._outside.items():
            if key not in self._written and tensor._version == version:
                watched[key] = WatchedVersion(tensor)
        return {
            digest: Answer(value, tuple(watched[key] for key in sorted(roots)))
            for digest, (value, roots) in self._read.items()
            if self._sees_all and roots <= watched.keys()
        }

    def run(self, proceed: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, or answer in its place."""
        origin = self._origin(func, args, kwargs)
        if func in _READS and origin is not None:
            if self._answers is None:
                value = proceed(func, args, kwargs)
                self._read[origin.digest] = value, origin.roots
                return value
            answer = self._answers.get(origin.digest)
            if answer is not None and self._holds(answer, origin.roots):
                self.used += answer.roots
                self.answered = True
                return answer.value
        result = proceed(func, args, kwargs)
        self._note(func, args, kwargs, result, origin)
        return result

    @contextlib.contextmanager
    def launching(self, tensors: Sequence[Tensor] | None) -> Iterator[None]:
        """Surround a launch by Triton of a kernel, which may write to what it is passed."""
        if tensors is None:
            self._sees_all = False
        for tensor in strided_tensors(tensors or ()):
            self._note_written(tensor, None)
        yield

    def _holds(self, answer: Answer, roots: frozenset[int]) -> bool:
        """True if a value is what the run would read now."""
        tensors = [self._outside[key][0] for key in sorted(roots)]
        return (
            self._sees_all
            and roots.isdisjoint(self._written)
            and all(map(WatchedVersion.is_same, answer.roots))
            and [id(root.tensor) for root in answer.roots] == list(map(id, tensors))
            # Writes to another view of the memory may raise a version of its own.
            and all(set(map(id, self._held(tensor))) == {id(tensor)} for tensor in tensors)
        )

    def forget(self, result: Any) -> None:
        """Count what an eager break made as data."""
        self._made.update(dict.fromkeys(map(storage_key, strided_tensors((result,)))))

    def _origin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Origin | None:
        """Say what the results of an operator follow from; None if from data, or if nobody knows."""
        facts = None if is_higher_order(func) else facts_of(func)
        if facts is None or func.namespace not in ("aten", "prims") or facts.may_draw or facts.is_uninitialised:
            return None
        if func is _LIFT:  # Python data, which became a tensor before any operator saw it
            tensor = args[0]
            is_small = tensor.is_cpu and span(tensor) <= WATCHED_BYTES
            self._made[storage_key(tensor)] = _Origin(repr(content(tensor)).encode(), frozenset()) if is_small else None
        roots: set[int] = set()
        tell = _layout if facts.name.endswith("_like") or facts.name.startswith("new_") else self._followed
        described = _described((args, kwargs), tell, roots)
        if described is None:
            return None
        text = f"{func} {described}".encode()
        return _Origin(hashlib.blake2b(text, digest_size=16).digest(), frozenset(roots))

    def _followed(self, tensor: Tensor, roots: set[int]) -> str | None:
        """Describe a tensor by what it follows from; None if from data. Adds its roots."""
        layout = _layout(tensor, roots)
        if layout is None or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None
        key = storage_key(tensor)
        if key in self._made:
            origin = self._made[key]
        else:
            origin = _Origin(str(key).encode(), frozenset({key})) if self._meet(key, tensor) else None
        if origin is None:
            return None
        roots |= origin.roots
        at = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        return f"{origin.digest!r} {at} {layout}"

    def _meet(self, key: int, tensor: Tensor) -> bool:
        """Meet a tensor that a run did not make; True if it may hold the same at every call, as far as is known."""
        if key in self._outside or key in self._made:
            return key not in self._written
        is_steady = (
            tensor.device.type == self._device.type
            and key not in self._written
            and key not in self._inputs
            and not tensor.is_inference()  # which has no version
            and not is_written_by_graphs(tensor)
        )
        if is_steady:
            self._outside[key] = tensor, tensor._version
        return is_steady

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, origin: _Origin | None
    ) -> None:
        """Note what an operator wrote and made."""
        given = strided_tensors((*args, *kwargs.values()))
        is_known = not is_higher_order(func) and func.namespace in ("aten", "prims")
        for tensor in strided_tensors(written_args(func, args, kwargs)) if is_known else given:
            self._note_written(tensor, origin if is_known else None)
        passed = {storage_key(tensor) for tensor in given}
        for index, tensor in enumerate(strided_tensors((result,))):
            key = storage_key(tensor)
            if key not in passed:
                self._outside.pop(key, None)
                self._made[key] = origin and _Origin(b"%d %b" % (index, origin.digest), origin.roots)

    def _note_written(self, tensor: Tensor, origin: _Origin | None) -> None:
        key = storage_key(tensor)
        if key in self._made:
            self._made[key] = origin
        else:
            self._written.add(key)


def _layout(tensor: Tensor, _: set[int]) -> str | None:
    if tensor.is_nested or is_lazy(tensor):
        return None
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"


def _described(value: Any, tell: Callable[[Tensor, set[int]], str | None], roots: set[int]) -> str | None:
    """Describe an argument of an operator, tensors as one is told; None if one is not, or for what has no value."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return tell(value, roots) if value.layout is torch.strided else None
    if issubclass(kind, (list, tuple)):
        parts = [_described(item, tell, roots) for item in value]
    elif issubclass(kind, dict):
        parts = [_described(item, tell, roots) for entry in sorted(value.items()) for item in entry]
    else:
        unknown = torch.Generator, torch.UntypedStorage  # the repr of a storage lists all of its bytes
        return None if issubclass(kind, unknown) else f"{kind.__name__}:{value!r}"
    return None if None in parts else f"{kind.__name__}({', '.join(filter(None, parts))})"
