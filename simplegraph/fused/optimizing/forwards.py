"""Makes a module's forward use folded weights or fused operators; calls that observe it or train run the original code.

A pair is folded inside the forward of its owner, for which the pair was shown to hold. A call of the layer or the norm
from anywhere else, such as a feature extractor's, gets what the module computes without `optimize`.
"""

from __future__ import annotations

import copyreg
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.patches import subclass
from simplegraph.fused.layers.layer import methods
from simplegraph.fused.optimizing.folded import REGION, Fold, FoldedMemory, FoldUse, LeftOut, Region, observed

_MEMORY, _FUSED = "_simplegraph_folded", "_simplegraph_fused"


class _Active(threading.local):
    """The folds of this thread's running forwards, by the ids of their layers and of their norms."""

    uses: Mapping[int, FoldUse] = MappingProxyType({})


_ACTIVE = _Active()


def _run_owner(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    region: Region | None = vars(self).get(REGION)
    if region is None or observed() or not region.holds(self):
        return original(*args, **kwargs)
    before = _ACTIVE.uses
    _ACTIVE.uses = {**before, **region.uses(self)}
    try:
        return original(*args, **kwargs)
    finally:
        _ACTIVE.uses = before


def _run_layer(original: Callable[..., Any], self: Any, input: Tensor) -> Any:
    use = _ACTIVE.uses.get(id(self))
    if use is None:
        return original(input)
    weight, bias = use.weights[:2]
    # With another number of dimensions, the norm takes another dimension for the channels.
    use.applied = weight is not None and input.dim() == use.dims
    if weight is None or not use.applied:
        return original(input)
    if isinstance(self, nn.Linear):
        return nn.functional.linear(input, weight, bias)
    return self._conv_forward(input, weight, bias)


def _run_norm(original: Callable[..., Any], self: Any, input: Tensor) -> Any:
    use = _ACTIVE.uses.get(id(self))
    folded = use is not None and use.applied
    return input if folded else original(input)


class _FusedForward(LeftOut):
    """The forward of a recognized layer on fused operators."""

    __slots__ = ("methods", "module", "run")

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.methods, self.run = module, methods(module), run


def _wants_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*module.parameters(), *given))


def _run_fused(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    fused: _FusedForward | None = vars(self).get(_FUSED)
    if (
        fused is None
        or self.training
        or observed()
        or _wants_gradients(self, args, kwargs)
        or self is not fused.module  # but a replica
        or methods(self) != fused.methods  # somebody replaced one
    ):
        return original(*args, **kwargs)
    return fused.run(*args, **kwargs)


def _changed(original: Any, run: Callable[..., Any]) -> type[nn.Module]:
    """Make a subclass with another forward, which is passed the original one.

    Copies and pickles of its instances are of the class as it was at first.
    """
    plain = vars(original).get("_simplegraph_plain", original)

    def reduce(self: Any, protocol: Any = None) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = plain.__reduce_ex__(self, max(protocol, 2))
        if hasattr(plain, "_simplegraph_original"):  # a wrapped module tells itself what to wrap again
            return reduced
        make, args, *state = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            return object.__new__, (plain,), *state
        return make, tuple(plain if argument is type(self) else argument for argument in args), *state

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up now, since it may have been replaced in the class.
        return run(functools.partial(original.forward, self), self, *args, **kwargs)

    members = {"forward": forward, "__reduce_ex__": reduce, "_simplegraph_plain": plain, "_simplegraph_run": run}
    changed: type[nn.Module] = subclass(original, members, mark="_simplegraph_run")
    return changed


def _change(module: Any, run: Callable[..., Any]) -> None:
    kind: Any = type(module)
    module.__class__ = _changed(kind, run)  # which graphs notice


def install_folds(owners: Mapping[nn.Module, Sequence[Fold]], memory: FoldedMemory) -> None:
    """Use folded weights in the forwards of these owners."""
    for owner, folds in owners.items():
        vars(owner)[REGION], vars(owner)[_MEMORY] = Region(owner, folds, memory), memory
        _change(owner, _run_owner)
        for fold in folds:
            _change(fold.layer, _run_layer)
            _change(fold.norm, _run_norm)


def install_fused(forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Use these forwards for inference."""
    for module, forward in forwards.items():
        vars(module)[_FUSED] = _FusedForward(module, forward)
        _change(module, _run_fused)


def is_installed(module: nn.Module) -> bool:
    """True if the module's forward, or that of a module in it, is not its class's."""
    return any(vars(child).get(name) is not None for child in module.modules() for name in (REGION, _FUSED))


def uninstall(root: nn.Module) -> None:
    """Restore every module's class; if it was changed again since, the remaining forward does nothing of its own."""
    for module in root.modules():
        attributes = vars(module)
        for name in (REGION, _MEMORY, _FUSED):
            attributes.pop(name, None)
        plain = vars(type(module)).get("_simplegraph_plain")
        if plain is not None:
            module.__class__ = plain
