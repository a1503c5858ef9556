"""Makes a module's forward use folded weights or fused operators; calls that look inside or train run as written.

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
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from simplegraph.base.subclass import subclass
from simplegraph.fused.layers.written import methods
from simplegraph.fused.optimizing.folded import Fold, FoldedMemory, Weights
from simplegraph.fused.optimizing.joined import (
    JOINED,
    forward_attention,
    forward_projection,
    place_apart,
    place_together,
)
from simplegraph.guard.torch_state import GLOBAL_HOOKS, GLOBAL_PRE_HOOKS, transform_level

_REGION, _MEMORY, _FUSED = "_simplegraph_region", "_simplegraph_folded", "_simplegraph_fused"


class _Use:
    """A fold in one forward of its owner.

    Attributes:
        applied: True if the layer's last call used the folded weights, so that the norm has nothing left to do.
    """

    __slots__ = ("applied", "layer", "weights")

    def __init__(self, layer: nn.Module, weights: Weights) -> None:
        self.layer, self.weights, self.applied = layer, weights, False


class _Active(threading.local):
    """The folds of this thread's running forwards, by the ids of their layers and of their norms."""

    uses: Mapping[int, _Use] = MappingProxyType({})


_ACTIVE = _Active()


def _observed() -> bool:
    """True if somebody looks at, or changes, what runs inside a forward: it then runs as it was written."""
    changes = transform_level() is not None or forward_ad._current_level >= 0
    looks = is_compiling() or torch.jit.is_tracing() or GLOBAL_HOOKS or GLOBAL_PRE_HOOKS  # type: ignore[attr-defined,no-untyped-call]
    return bool(changes or looks)


class Region:
    """The folds of one owner.

    Args:
        owner: the module.
        folds: of layers that its forward runs.
        memory: of all folds.
        run: runs the owner, or returns NotImplemented; None if its own forward runs.
    """

    __slots__ = ("_methods", "folds", "memory", "run")

    def __init__(
        self, owner: nn.Module, folds: Sequence[Fold], memory: FoldedMemory, run: Callable[..., Any] | None
    ) -> None:
        self._methods, self.folds, self.memory, self.run = methods(owner), folds, memory, run

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and pickles are of the plain module

    def holds(self, owner: nn.Module) -> bool:
        """True if the owner's forward is the one for which the folds were found: nobody replaced it in the class."""
        return methods(owner) == self._methods

    def uses(self, owner: nn.Module) -> dict[int, _Use]:
        """Return the folds that serve a forward of the owner, by the ids of their layers and of their norms."""
        if _observed():
            return {}
        serving = [fold for fold in self.folds if fold.serves(owner)]
        if any(fold.is_stale() for fold in serving):
            self.memory.refresh()
        found: dict[int, _Use] = {}
        for fold in serving:
            weights = fold.weights_now()
            if weights is not None:
                found[id(fold.layer)] = found[id(fold.norm)] = _Use(fold.layer, weights)
        return found


def uses_of(module: nn.Module) -> Mapping[int, Any]:
    """Return the folds that serve a forward of a module, as `Region.uses` does."""
    region: Region | None = vars(module).get(_REGION)
    return {} if region is None else region.uses(module)


def _forward_owner(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        region: Region | None = vars(self).get(_REGION)
        if region is None or _observed() or not region.holds(self):
            return original(self, *args, **kwargs)
        before = _ACTIVE.uses
        _ACTIVE.uses = {**before, **region.uses(self)}
        try:
            result = NotImplemented if region.run is None else region.run(self, *args, **kwargs)
            return original(self, *args, **kwargs) if result is NotImplemented else result
        finally:
            _ACTIVE.uses = before

    return forward


def _forward_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, input: Tensor) -> Any:
        use = _ACTIVE.uses.get(id(self))
        if use is None:
            return original(self, input)
        weight, bias = use.weights[:2]
        # With another number of dimensions the norm takes another one for the channels.
        use.applied = weight is not None and input.dim() == use.weights.dims
        if weight is None or not use.applied:
            return original(self, input)
        if isinstance(self, nn.Linear):
            return nn.functional.linear(input, weight, bias)
        return self._conv_forward(input, weight, bias)

    return forward


def _forward_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, input: Tensor) -> Any:
        use = _ACTIVE.uses.get(id(self))
        folded = use is not None and use.applied
        return input if folded else original(self, input)

    return forward


class _FusedForward:
    """The forward of a recognized layer on fused operators."""

    __slots__ = ("methods", "module", "run")

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.methods, self.run = module, methods(module), run

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and pickles are of the plain module


def _wants_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    return torch.is_grad_enabled() and any(each.requires_grad for each in (*module.parameters(), *given))


def _forward_fused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        fused: _FusedForward | None = vars(self).get(_FUSED)
        if fused is None or self.training or _observed() or _wants_gradients(self, args, kwargs):
            return original(self, *args, **kwargs)
        if self is not fused.module or methods(self) != fused.methods:  # a replica, or somebody replaced one
            return original(self, *args, **kwargs)
        return fused.run(*args, **kwargs)

    return forward


@functools.cache
def _changed(original: Any, forward: Any) -> type[nn.Module]:
    """Make a subclass with another forward; copies and pickles of its instances are of the class as it was at first."""
    plain = vars(original).get("_simplegraph_plain", original)

    def reduce(self: Any, protocol: Any = None) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = plain.__reduce_ex__(self, max(protocol, 2))
        if hasattr(plain, "_simplegraph_original"):  # a wrapped module says itself what is to be wrapped again
            return reduced
        make, args, *state = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            return object.__new__, (plain,), *state
        return make, tuple(plain if each is type(self) else each for each in args), *state

    @functools.wraps(original.forward)
    def current(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original.forward(self, *args, **kwargs)  # which somebody may have replaced in the class since

    members = {"forward": forward(current), "__reduce_ex__": reduce, "_simplegraph_plain": plain}
    changed: type[nn.Module] = subclass(original, members)
    return changed


def _change(module: Any, forward: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    kind: Any = type(module)
    module.__class__ = _changed(kind, forward)  # which graphs notice


def install(
    owners: Sequence[tuple[nn.Module, Sequence[Fold]]], memory: FoldedMemory, runs: Mapping[nn.Module, Any]
) -> None:
    """Use folded weights in the forwards of these owners, some of which others run."""
    for owner, folds in owners:
        vars(owner)[_REGION] = Region(owner, folds, memory, runs.get(owner))
        if folds:
            vars(owner)[_MEMORY] = memory
        _change(owner, _forward_owner)
        for fold in folds:
            _change(fold.layer, _forward_layer)
            _change(fold.norm, _forward_norm)


def install_fused(forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Use these forwards for inference."""
    for module, forward in forwards.items():
        vars(module)[_FUSED] = _FusedForward(module, forward)
        _change(module, _forward_fused)


_forward_joined = functools.partial(forward_attention, plain=_observed)


def install_joined(attentions: Mapping[nn.Module, Sequence[str]]) -> None:
    """Run these projections of attentions as one product."""
    for attention, names in attentions.items():
        vars(attention)[JOINED] = place_together(attention, names)
        _change(attention, _forward_joined)
        for name in names:
            _change(attention._modules[name], forward_projection)


def is_installed(module: nn.Module) -> bool:
    """True if the module's forward, or that of a module in it, is not its class's."""
    return any(vars(each).get(name) is not None for each in module.modules() for name in (_REGION, _FUSED, JOINED))


def uninstall(root: nn.Module) -> None:
    """Give every module its own class again; where that was changed once more since, what is left does nothing."""
    place_apart(root)
    for module in root.modules():
        attributes = vars(module)
        for name in (_REGION, _MEMORY, _FUSED):
            attributes.pop(name, None)
        plain = vars(type(module)).get("_simplegraph_plain")
        if plain is not None:
            module.__class__ = plain
