"""Remembers what a step changes in Python about its optimizers and gradient scaler, and puts it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, optim

_SCALER_STATES = "_per_optimizer_states"


class OptimizersPython:
    """Remembers the dicts of optimizers and of a gradient scaler.

    Args:
        optimizers, scaler: them.
    """

    def __init__(self, optimizers: Sequence[optim.Optimizer], scaler: Any) -> None:
        self._scaler = scaler
        self._dicts: list[tuple[str, Any, dict[Any, Any]]] = []
        self._own: list[tuple[Any, dict[Any, Any]]] = []  # a scaler's own, by optimizer
        for index, each in enumerate(optimizers):
            self._dicts += [(name, held, dict(held)) for name, held in _dicts_of(f"optimizers.{index}", each)]
        if scaler is not None:
            self._dicts.append(("scaler", vars(scaler), dict(vars(scaler))))
            self._own = [(held, dict(held)) for held in _dicts_inside(getattr(scaler, _SCALER_STATES, None))]
            self._stages = _stages(scaler)

    def changed(self) -> list[str]:
        """Name what has changed; a replay would not change it."""
        names = []
        for name, held, before in self._dicts:
            for key in [*before, *(key for key in held if key not in before)]:
                label = f"{name}.{_label(key)}"
                if key == _SCALER_STATES or label.endswith("_opt_called"):
                    continue
                if key not in before or key not in held or not _same(before[key], held[key]):
                    names.append(label)
        if self._scaler is not None and _stages(self._scaler) != self._stages:
            names.append("scaler, whose update() is not called in the step,")
        return names

    def put_back(self) -> None:
        """Let everything hold what it held."""
        for held, before in (*((held, before) for _, held, before in self._dicts), *self._own):
            held.clear()
            held.update(before)


def _dicts_of(name: str, owner: optim.Optimizer) -> Iterator[tuple[str, Any]]:
    yield name, vars(owner)
    yield f"{name}.state", owner.state
    for index, entry in enumerate(owner.state.values()):
        if isinstance(entry, dict):
            yield f"{name}.state.{index}", entry
    for index, group in enumerate(owner.param_groups):
        yield f"{name}.param_groups.{index}", group


def _dicts_inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _dicts_inside(item)


def _stages(scaler: Any) -> dict[int, Any]:
    """Return how far each optimizer's step has come, but for those that are ready for one."""
    states = getattr(scaler, _SCALER_STATES, {})
    return {key: state["stage"] for key, state in states.items() if getattr(state["stage"], "name", "") != "READY"}


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    return not isinstance(now, Tensor) and type(before) is type(now) and bool(before == now)


def _label(key: Any) -> str:
    return "a parameter" if isinstance(key, Tensor) else str(key)
