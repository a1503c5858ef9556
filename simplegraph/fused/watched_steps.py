"""Tells those who keep values computed from weights that a step wrote the weights: not every step raises versions."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from simplegraph.base.extras import harmless_step_hooks
from simplegraph.base.tensors import storage_key

_WATCHERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def watch_steps(watcher: Any) -> None:
    """Call a watcher's `note_written` with the storage keys of tensors that steps write, while the watcher lives."""
    _WATCHERS[id(watcher)] = watcher
    weakref.finalize(watcher, register_optimizer_step_post_hook(after_step).remove)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Tell watchers which parameters an optimizer writes; torch calls it after every step."""
    tell_written(parameter for group in optimizer.param_groups for parameter in group["params"])


harmless_step_hooks.add(after_step)


def tell_written(tensors: Iterable[Tensor]) -> None:
    """Tell watchers, if there are any, that these tensors hold other values."""
    if _WATCHERS:
        keys = {storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided}
        for watcher in list(_WATCHERS.values()):
            watcher.note_written(keys)
