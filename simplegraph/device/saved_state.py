"""Save and restore random generators and memory that a run may change."""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.tensors import storage_key


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def random_states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the states of generators."""
    return [generator.get_state() for generator in generators]


def put_random_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Set generators to states that `random_states` returned, if their states differ.

    Torch refuses to set a generator that another thread's capture uses.
    """
    for generator, state in zip(generators, states, strict=True):
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)


def drew(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> bool:
    """True if a generator has drawn since `random_states` returned these states."""
    pairs = zip(random_states(generators), states, strict=True)
    return any(not torch.equal(now, before) for now, before in pairs)


class HostRandom:
    """Saves the states of Python's random generator, and of NumPy's global generator if NumPy is imported."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def drawn(self) -> set[str]:
        """Return the names of generators whose states changed."""
        python = {"Python's random generator"} if random.getstate() != self._python else set()
        numpy = {"NumPy's random generator"} if self._numpy is not None and _numpy_state() != self._numpy else set()
        return python | numpy

    def put_back(self) -> None:
        """Restore the states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(pickle.loads(self._numpy))


def is_global_generator(value: Any) -> bool:
    """True for the generators that `HostRandom` saves."""
    numpy: Any = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    generators = random._inst, numpy, getattr(numpy, "_bit_generator", None)
    return value is not None and any(value is generator for generator in generators)


def _numpy_state() -> bytes | None:
    read: Any = getattr(sys.modules.get("numpy.random"), "get_state", None)
    return None if read is None else pickle.dumps(read(legacy=False))


_LIMIT_BYTES = 1 << 30  # the largest copy, unless a tenth of the free memory is less


def copy_limit(free: int) -> int:
    """Return the most bytes that one copy may take if `free` bytes are free."""
    return min(_LIMIT_BYTES, free // 10)


class SavedMemory:
    """Memory that a run may change, by name; copies and restores its contents.

    A storage that several tensors share is copied once, as a whole.

    Args:
        written: (name, tensor) of memory that observed runs wrote; others: of memory that may be written unobserved.
        inputs: (name, tensor) of the caller's inputs, which may be static inputs of the graph.

    Attributes:
        keys: storage keys of the memory; nbytes: the bytes that one copy takes.
    """

    def __init__(
        self,
        written: Sequence[tuple[str, Tensor]],
        others: Iterable[tuple[str, Tensor]] = (),
        inputs: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        self.tensors, self.inputs = [*written, *others], list(inputs)
        storages = {storage_key(tensor): tensor.untyped_storage() for _, tensor in (*self.tensors, *self.inputs)}
        self._bytes = {key: _view(it, torch.uint8, 0, (it.nbytes(),), (1,)) for key, it in storages.items()}
        self.keys, self.nbytes = self._bytes.keys(), sum(view.numel() for view in self._bytes.values())

    def copy(self, keys: Collection[int] | None = None) -> list[Tensor]:
        """Copy all memory, or the memory of these storage keys; a run may have made a storage smaller."""
        views = map(self._bytes.__getitem__, self.keys if keys is None else keys)
        with torch.inference_mode(False):
            return [view[: view.untyped_storage().nbytes()].clone() for view in views]

    def put(self, copies: Sequence[Tensor], keys: Collection[int] | None = None) -> None:
        """Restore all memory, or the memory of these storage keys, from copies."""
        for key, copy in zip(self.keys if keys is None else keys, copies, strict=True):
            storage = self._bytes[key].untyped_storage()
            if storage.nbytes() < len(copy):
                storage.resize_(len(copy))
            self._bytes[key][: len(copy)].copy_(copy)

    def copied(self, keys: Collection[int]) -> Callable[[], object]:
        """Copy the memory of these storage keys, for breaks, and return a function that restores it."""
        saved = [key for key in keys if key in self.keys]
        return functools.partial(self.put, self.copy(saved), saved)

    def seen_in(self, copies: Sequence[Tensor], tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return views of these tensors in the copies."""
        storages = dict(zip(self._bytes, (copy.untyped_storage() for copy in copies), strict=True))
        return [
            _view(storages[storage_key(it)], it.dtype, it.storage_offset(), it.shape, it.stride()) for _, it in tensors
        ]


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
