"""Tell who keeps values computed from weights that a step wrote these: not every step raises their versions."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from simplegraph.base.tensors import storage_key


class StepWatcher(Protocol):
    """Keeps values that were computed from weights."""

    def note_written(self, keys: set[int]) -> None:
        """Note that memory, given by storage keys, holds other values."""


_WATCHERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_hook: Any = None  # torch's, as long as there are watchers


def watch_steps(watcher: StepWatcher) -> None:
    """Tell a watcher, as long as it lives, what the steps of all optimizers write."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(after_step)
    _WATCHERS[id(watcher)] = watcher
    weakref.finalize(watcher, _unhook)


def _unhook() -> None:
    global _hook
    if _hook is not None and not list(_WATCHERS.values()):  # which leaves out one that is dying
        _hook.remove()
        _hook = None


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Tell watchers what an optimizer writes; torch calls it after every step."""
    tell_written(parameter for group in optimizer.param_groups for parameter in group["params"])


def tell_written(tensors: Iterable[Tensor]) -> None:
    """Tell watchers, if there are any, that these tensors hold other values."""
    if _WATCHERS:
        keys = {storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided}
        for watcher in list(_WATCHERS.values()):
            watcher.note_written(keys)
