"""Remembers what a step changes in Python about its optimizers and gradient scaler, and puts it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, optim

from simplegraph.program.held import ABSENT

_SCALER_STATES = "_per_optimizer_states"
_OWN = frozenset({_SCALER_STATES, "_opt_called"})  # changed by every step, and of no consequence


class OptimizersPython:
    """Remembers the dicts of optimizers and of a gradient scaler.

    Args:
        optimizers, scaler: them.
    """

    def __init__(self, optimizers: Sequence[optim.Optimizer], scaler: Any) -> None:
        found = [entry for index, each in enumerate(optimizers) for entry in _dicts_of(f"optimizers.{index}", each)]
        if scaler is not None:
            found += [("scaler", vars(scaler)), *(("", held) for held in _dicts_inside(_states(scaler)))]
        self._dicts = [(name, held, dict(held)) for name, held in found]
        self._scaler, self._stages = scaler, _stages(scaler)

    def changed(self) -> list[str]:
        """Name what has changed; a replay would not change it."""
        names = []
        for name, held, before in self._dicts:
            keys = [key for key in {**before, **held} if not _same(before.get(key, ABSENT), held.get(key, ABSENT))]
            labels = ("a parameter" if isinstance(key, Tensor) else key for key in keys if name and key not in _OWN)
            names += [f"{name}.{label}" for label in labels]
        if _stages(self._scaler) != self._stages:
            names.append("scaler, whose update() is not called in the step,")
        return names

    def put_back(self) -> None:
        """Let everything hold what it held."""
        for _, held, before in self._dicts:
            held.clear()
            held.update(before)


def _dicts_of(name: str, owner: optim.Optimizer) -> Iterator[tuple[str, Any]]:
    yield name, vars(owner)
    yield f"{name}.state", owner.state
    for held, entries in (("state", owner.state.values()), ("param_groups", owner.param_groups)):
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                yield f"{name}.{held}.{index}", entry


def _dicts_inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _dicts_inside(item)


def _states(scaler: Any) -> dict[int, Any]:
    """Return what a scaler knows of each optimizer."""
    return getattr(scaler, _SCALER_STATES, {})


def _stages(scaler: Any) -> dict[int, Any]:
    """Return how far each optimizer's step has come, but for those that are ready for one."""
    stages = {key: state["stage"] for key, state in _states(scaler).items()}
    return {key: stage for key, stage in stages.items() if getattr(stage, "name", "") != "READY"}


def _same(before: Any, now: Any) -> bool:
    return before is now or (not isinstance(now, Tensor) and type(before) is type(now) and bool(before == now))
