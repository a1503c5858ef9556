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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from simplegraph.base.constants import WATCHED_BYTES, Answer, WatchedVersion, content, is_written_by_graphs, span
from simplegraph.base.operators import facts_of, is_higher_order, strided_tensors, written_args
from simplegraph.base.tensors import storage_key

_aten: Any = torch.ops.aten
_LIFT, _COPY = _aten.lift_fresh.default, _aten.copy_.default
_READS = {
    *(_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default),
    *(_aten.equal.default, _aten.allclose.default),
}


class _Origin(NamedTuple):
    """Says what a tensor's values follow from: a digest of the computation, and the storages it begins at."""

    digest: bytes
    roots: frozenset[int]


_NOT_MADE = _Origin(b"", frozenset())


class KnownTensors(NamedTuple):
    """Tells the tensors of a module from those that its calls are passed.

    Attributes:
        held: lists the tensors of the module that lie in the memory of a tensor.
        inputs: storage keys of what a run is passed.
    """

    held: Callable[[Tensor], Sequence[Tensor]]
    inputs: Collection[int]

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor is the module's, which has no other in its memory: a write there may raise its version."""
        return {id(held) for held in self.held(tensor)} == {id(tensor)}


class SteadyReads:
    """Follows what a run computes, and knows the values that follow from memory of before which nothing writes.

    Args:
        device: what the run computes on. A CPU tensor beside a GPU is followed elsewhere.
        tensors: which are the module's.
        answers: of a capture, what warmups read, by computation; None in a warmup.

    Attributes:
        used: what answers of this capture follow from; answered: True if there were any.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: KnownTensors,
        answers: Mapping[bytes, Answer] | None = None,
    ) -> None:
        self._device, self._tensors, self._answers = device, tensors, answers
        # By storage key, of what is made and passed; None for what follows from data.
        self._made: dict[int, _Origin | None] = dict.fromkeys(tensors.inputs)
        self._outside: dict[int, tuple[Tensor, int]] = {}  # tensors from before as they were met first, and versions
        self._written: set[int] = set()
        self._blank: set[int] = set()  # storage keys of what is made and not written yet
        self._read: dict[bytes, tuple[Any, frozenset[int]]] = {}
        self._sees_all = True
        self.used: list[WatchedVersion] = []
        self.answered = False

    def learnt(self) -> dict[bytes, Answer]:
        """Return what this run read of memory that it did not write; call at its end."""
        if not self._sees_all:
            return {}
        watched: dict[int, WatchedVersion] = {}
        for key in set[int]().union(*(roots for _, roots in self._read.values())):
            tensor, version = self._outside[key]
            if key not in self._written and tensor._version == version and self._tensors.holds(tensor):
                watched[key] = WatchedVersion(tensor)
        return {
            digest: Answer(value, tuple(watched[key] for key in sorted(roots)))
            for digest, (value, roots) in self._read.items()
            if roots <= watched.keys()
        }

    def run(self, proceed: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, or answer in its place."""
        given = {storage_key(tensor): tensor for tensor in strided_tensors((*args, *kwargs.values()))}
        is_known = not is_higher_order(func) and func.namespace in ("aten", "prims")
        origin = self._origin(func, args, kwargs, given) if is_known else None
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
        origin = self._copied(args) if func is _COPY and origin is None else origin
        written = strided_tensors(written_args(func, args, kwargs)) if is_known else given.values()
        for tensor in written:
            self._note_written(tensor, origin)
        for index, tensor in enumerate(strided_tensors((result,))):
            key = storage_key(tensor)
            if key not in given:  # its key may have been another's before
                self._outside.pop(key, None)
                self._made[key] = origin and _Origin(b"%d %b" % (index, origin.digest), origin.roots)
                (self._blank.add if is_known and facts_of(func).is_uninitialised else self._blank.discard)(key)
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
            and all(map(self._tensors.holds, tensors))
        )

    def forget(self, result: Any) -> None:
        """Count what an eager break made as data."""
        self._made.update(dict.fromkeys(map(storage_key, strided_tensors((result,)))))

    def _origin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Iterable[int]) -> _Origin | None:
        """Say what the results of an operator follow from, which is given memory of these keys; None if from data."""
        facts = facts_of(func)
        if func is _LIFT:  # before others: its memory may have been another tensor's, which this run let go
            self._made[storage_key(args[0])] = _origin_of_data(args[0])
        reads_values = not (facts.name.endswith("_like") or facts.name.startswith("new_"))
        follows_data = reads_values and any(self._made.get(key, _NOT_MADE) is None for key in given)
        if follows_data or facts.may_draw or facts.is_uninitialised:
            return None
        roots: set[int] = set()
        described = _described((args, kwargs), self._followed if reads_values else _layout, roots)
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
            and not tensor.is_inference()  # which has no version
            and not is_written_by_graphs(tensor)
        )
        if is_steady:
            self._outside[key] = tensor, tensor._version
        return is_steady

    def _copied(self, args: Sequence[Any]) -> _Origin | None:
        """Return what a copy into new memory follows from, as its source does; None if they differ in form."""
        given = strided_tensors(args[:2])
        if len(given) < 2 or storage_key(given[0]) not in self._blank:
            return None
        forms = [(_layout(tensor, set()), tensor.untyped_storage().nbytes()) for tensor in given]
        is_same = forms[0] == forms[1] and not (given[1].is_conj() or given[1].is_neg())
        return self._made.get(storage_key(given[1])) if is_same else None

    def _note_written(self, tensor: Tensor, origin: _Origin | None) -> None:
        key = storage_key(tensor)
        self._blank.discard(key)
        if key in self._made:
            self._made[key] = origin
        else:
            self._written.add(key)


def _origin_of_data(tensor: Tensor) -> _Origin | None:
    """Say what a tensor of Python data follows from, which became one before any operator saw it."""
    is_small = tensor.is_cpu and span(tensor) <= WATCHED_BYTES
    return _Origin(repr(content(tensor)).encode(), frozenset()) if is_small else None


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
