"""Random generators and memory that a run may change, kept so that they can be put back."""

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
    """Return the generator that a device draws from if none is named."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def random_states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the states of generators."""
    return [generator.get_state() for generator in generators]


def put_random_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Put generators into states that `random_states` returned; those that are in them already are left alone.

    A capture of another thread refuses to have its generator set.
    """
    for generator, state in zip(generators, states, strict=True):
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)


def drew(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> bool:
    """True if a generator has drawn since it was in its state."""
    pairs = zip(random_states(generators), states, strict=True)
    return any(not torch.equal(now, before) for now, before in pairs)


class HostRandom:
    """Remembers the states of Python's random generator, and of NumPy's global one where NumPy is imported."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def drawn(self) -> set[str]:
        """Name the generators that are in other states by now."""
        python = {"Python's random generator"} if random.getstate() != self._python else set()
        numpy = {"NumPy's random generator"} if self._numpy is not None and _numpy_state() != self._numpy else set()
        return python | numpy

    def put_back(self) -> None:
        """Put them back into their states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(pickle.loads(self._numpy))


def is_global_generator(value: Any) -> bool:
    """True for the generators that `HostRandom` remembers."""
    numpy: Any = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    generators = random._inst, numpy, getattr(numpy, "_bit_generator", None)
    return value is not None and any(value is generator for generator in generators)


def _numpy_state() -> bytes | None:
    read: Any = getattr(sys.modules.get("numpy.random"), "get_state", None)
    return None if read is None else pickle.dumps(read(legacy=False))


_LIMIT_BYTES = 1 << 30  # of one copy, if a tenth of what is free is not less


def copy_limit(free: int) -> int:
    """Return the most bytes of memory that one copy may take where so many are free."""
    return min(_LIMIT_BYTES, free // 10)


class SavedMemory:
    """Memory that a run may change, by name, and copies of what it held at one moment and another.

    Tensors that share memory are copied once, with all that shares it.

    Args:
        written: what the graph itself was seen to write, with names; others: what it may write unseen.
        inputs: the caller's tensors that stand for static inputs of the graph, or are such.

    Attributes:
        keys: of the storages; nbytes: bytes that one copy takes.
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
        """Copy everything as it is now, or the memory of these storage keys; a run may have shortened it."""
        views = map(self._bytes.__getitem__, self.keys if keys is None else keys)
        with torch.inference_mode(False):
            return [view[: view.untyped_storage().nbytes()].clone() for view in views]

    def put(self, copies: Sequence[Tensor], keys: Collection[int] | None = None) -> None:
        """Restore everything, or the memory of these storage keys, from the copies."""
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
        """View `tensors`, or `inputs`, as they were when they were copied."""
        storages = dict(zip(self._bytes, (copy.untyped_storage() for copy in copies), strict=True))
        return [
            _view(storages[storage_key(it)], it.dtype, it.storage_offset(), it.shape, it.stride()) for _, it in tensors
        ]


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
