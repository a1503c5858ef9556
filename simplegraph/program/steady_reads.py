"""Values that a forward reads back from memory that no run writes: a capture takes them from a warmup.

``if self.ready:``, ``int(self.stride)`` and ``bool(self.mask.all())`` wait for the device, which no capture can do. If
such a value is computed from tensors of the module alone, and no run writes to these, every call reads the same value.
So a warmup follows the forward's computations and remembers the values that it read. A capture that reads the result of
the same computation on the same memory uses the remembered value. The graph is valid while the versions of these
tensors stay the same.

Only a proof notices writes that raise no version: through ``.data``, or by a kernel that torch does not dispatch. Reads
without an operator (``tolist`` on a CPU) are not seen, and are refused.

This follows values that are read back from the device; for CPU tensors see `host_modes`, for indices `index_ranges`.
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


class _Computation(NamedTuple):
    """The computation of a tensor's values: its digest, and the keys of the storages that it reads."""

    digest: bytes
    roots: frozenset[int]


_NOT_MADE = _Computation(b"", frozenset())


class KnownTensors(NamedTuple):
    """Distinguishes the tensors of a module from tensors that its calls are passed.

    Attributes:
        held: lists the tensors of the module that share the memory of a tensor.
        inputs: storage keys of a run's arguments.
    """

    held: Callable[[Tensor], Sequence[Tensor]]
    inputs: Collection[int]

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor is the module's only tensor in its memory, so that a write there raises its version."""
        return {id(held) for held in self.held(tensor)} == {id(tensor)}


class SteadyReads:
    """Follows the computations of a run, to find values that are computed from memory that no run writes.

    Args:
        device: the device of the run. CPU tensors of a run on a GPU are followed by `HostMode`.
        tensors: tells which tensors are the module's.
        answers: in a capture, the values that warmups read, by computation; None in a warmup.

    Attributes:
        used: the tensors from which used answers were computed; answered: True if an answer was used.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: KnownTensors,
        answers: Mapping[bytes, Answer] | None = None,
    ) -> None:
        self._device, self._tensors, self._answers = device, tensors, answers
        # By storage key, for memory that is made and passed: its computation; None for values that depend on data.
        self._made: dict[int, _Computation | None] = dict.fromkeys(tensors.inputs)
        self._outside: dict[int, tuple[Tensor, int]] = {}  # tensors from before the run, and their first versions
        self._written: set[int] = set()
        self._blank: set[int] = set()  # storage keys of memory that is made and not written yet
        self._read: dict[bytes, tuple[Any, frozenset[int]]] = {}
        self._sees_all = True
        self.used: list[WatchedVersion] = []
        self.answered = False

    def collect_answers(self) -> dict[bytes, Answer]:
        """Return the values that this run read from memory that it did not write; call it at the end of the run."""
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
        """Run an operator, or return the answer in its place."""
        given = {storage_key(tensor): tensor for tensor in strided_tensors((*args, *kwargs.values()))}
        is_known = not is_higher_order(func) and func.namespace in ("aten", "prims")
        computation = self._computation(func, args, kwargs, given) if is_known else None
        if func in _READS and computation is not None:
            if self._answers is None:
                value = proceed(func, args, kwargs)
                self._read[computation.digest] = value, computation.roots
                return value
            answer = self._answers.get(computation.digest)
            if answer is not None and self._holds(answer, computation.roots):
                self.used += answer.roots
                self.answered = True
                return answer.value
        result = proceed(func, args, kwargs)
        computation = self._computation_of_copy(args) if func is _COPY and computation is None else computation
        written = strided_tensors(written_args(func, args, kwargs)) if is_known else given.values()
        for tensor in written:
            self._note_written(tensor, computation)
        for index, tensor in enumerate(strided_tensors((result,))):
            key = storage_key(tensor)
            if key not in given:  # freed memory may have had the same key
                self._outside.pop(key, None)
                self._made[key] = computation and _Computation(
                    b"%d %b" % (index, computation.digest), computation.roots
                )
                (self._blank.add if is_known and facts_of(func).is_uninitialised else self._blank.discard)(key)
        return result

    @contextlib.contextmanager
    def launching(self, tensors: Sequence[Tensor] | None) -> Iterator[None]:
        """Surround the launch of a Triton kernel, which may write to these tensors."""
        if tensors is None:
            self._sees_all = False
        for tensor in strided_tensors(tensors or ()):
            self._note_written(tensor, None)
        yield

    def _holds(self, answer: Answer, roots: frozenset[int]) -> bool:
        """True if the run would read the answer's value now."""
        tensors = [self._outside[key][0] for key in sorted(roots)]
        return (
            self._sees_all
            and roots.isdisjoint(self._written)
            and all(map(WatchedVersion.is_same, answer.roots))
            and [id(root.tensor) for root in answer.roots] == list(map(id, tensors))
            and all(map(self._tensors.holds, tensors))
        )

    def forget(self, result: Any) -> None:
        """Count memory that an eager break made as data."""
        self._made.update(dict.fromkeys(map(storage_key, strided_tensors((result,)))))

    def _computation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Iterable[int]
    ) -> _Computation | None:
        """Return the computation of an operator's results; None if they depend on data.

        `given` are the storage keys of its arguments.
        """
        facts = facts_of(func)
        if func is _LIFT:  # first: a tensor that this run freed may have had the same key
            self._made[storage_key(args[0])] = _computation_of_data(args[0])
        reads_values = not (facts.name.endswith("_like") or facts.name.startswith("new_"))
        follows_data = reads_values and any(self._made.get(key, _NOT_MADE) is None for key in given)
        if follows_data or facts.may_draw or facts.is_uninitialised:
            return None
        roots: set[int] = set()
        described = _described((args, kwargs), self._followed if reads_values else _layout, roots)
        if described is None:
            return None
        text = f"{func} {described}".encode()
        return _Computation(hashlib.blake2b(text, digest_size=16).digest(), frozenset(roots))

    def _followed(self, tensor: Tensor, roots: set[int]) -> str | None:
        """Describe a tensor by its computation, and add the roots of that; None if the tensor depends on data."""
        layout = _layout(tensor, roots)
        if layout is None or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None
        key = storage_key(tensor)
        if key in self._made:
            computation = self._made[key]
        else:
            computation = _Computation(str(key).encode(), frozenset({key})) if self._meet(key, tensor) else None
        if computation is None:
            return None
        roots |= computation.roots
        at = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        return f"{computation.digest!r} {at} {layout}"

    def _meet(self, key: int, tensor: Tensor) -> bool:
        """Note a tensor that the run did not make; False if it is known to hold other values at other calls."""
        if key in self._outside or key in self._made:
            return key not in self._written
        is_steady = (
            tensor.device.type == self._device.type
            and key not in self._written
            and not tensor.is_inference()  # inference tensors have no version
            and not is_written_by_graphs(tensor)
        )
        if is_steady:
            self._outside[key] = tensor, tensor._version
        return is_steady

    def _computation_of_copy(self, args: Sequence[Any]) -> _Computation | None:
        """Return the computation of a copy into new memory, which is its source's; None if their layouts differ."""
        given = strided_tensors(args[:2])
        if len(given) < 2 or storage_key(given[0]) not in self._blank:
            return None
        forms = [(_layout(tensor, set()), tensor.untyped_storage().nbytes()) for tensor in given]
        is_same = forms[0] == forms[1] and not (given[1].is_conj() or given[1].is_neg())
        return self._made.get(storage_key(given[1])) if is_same else None

    def _note_written(self, tensor: Tensor, computation: _Computation | None) -> None:
        key = storage_key(tensor)
        self._blank.discard(key)
        if key in self._made:
            self._made[key] = computation
        else:
            self._written.add(key)


def _computation_of_data(tensor: Tensor) -> _Computation | None:
    """Return the computation of a tensor that was made from Python data; None if it is large."""
    is_small = tensor.is_cpu and span(tensor) <= WATCHED_BYTES
    return _Computation(repr(content(tensor)).encode(), frozenset()) if is_small else None


def _layout(tensor: Tensor, _: set[int]) -> str | None:
    if tensor.is_nested or is_lazy(tensor):
        return None
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"


def _described(value: Any, tell: Callable[[Tensor, set[int]], str | None], roots: set[int]) -> str | None:
    """Describe an argument of an operator by its value, and tensors by `tell`; None if a part cannot be described."""
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
