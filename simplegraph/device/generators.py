"""Random generators, and the states that they are put back into."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that a device draws from if none is named."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def random_states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the states of generators."""
    return [generator.get_state() for generator in generators]


def put_random_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Put generators into states that `random_states` gave, but for those that are in them already.

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
    return value is not None and any(
        value is it for it in (random._inst, numpy, getattr(numpy, "_bit_generator", None))
    )


def _numpy_state() -> bytes | None:
    read: Any = getattr(sys.modules.get("numpy.random"), "get_state", None)
    return None if read is None else pickle.dumps(read(legacy=False))
