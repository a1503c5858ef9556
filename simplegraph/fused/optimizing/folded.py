"""Folded weights: computed from a layer and the norm after it, in separate memory, and again when those change."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from simplegraph.base.modes import outside_modes
from simplegraph.base.tensors import storage_key
from simplegraph.device.select import graph_device
from simplegraph.fused.choice import triton_runs
from simplegraph.fused.layers.layer import hooked, is_depthwise, methods
from simplegraph.fused.layers.provable import plain_class
from simplegraph.fused.optimizing.pairs import FOLDABLE, Pair, hindrance, is_changed, sources, watched
from simplegraph.fused.watched_steps import watch_steps
from simplegraph.guard.torch_state import GLOBAL_HOOKS, GLOBAL_PRE_HOOKS, transform_level

REGION = "_simplegraph_region"
_ALIGNMENT = 256  # bytes, as the allocator gives them: kernels read aligned weights faster
_version = operator.attrgetter("_version")


class LeftOut:
    """Base of attributes that copies and pickles of a module leave out: copies are plain modules.

    Has slots instead of a dict, so that no guard looks for tensors in it.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Weights(NamedTuple):
    """The weights of a folded layer.

    Attributes:
        weight: of the layer and the norm, in the layer's dtype; bias: as `weight`. None if the layer has its own.
        factor: (outputs,), multiplies the result of the layer's own weight, without a bias; shift: as `factor`, is
            added then. In float32, or the layer's dtype if that is wider.
    """

    weight: Tensor | None
    bias: Tensor | None
    factor: Tensor
    shift: Tensor

    def tensors(self) -> list[Tensor]:
        """List the tensors that are not None."""
        return [tensor for tensor in self if tensor is not None]


class _Source:
    """Remembers a tensor, its memory and its version."""

    def __init__(self, tensor: Tensor) -> None:
        # The alias keeps the memory, so that no other gets its address meanwhile.
        self.tensor, self._alias = tensor, tensor.detach()
        self._version, self._dtype = tensor._version, tensor.dtype

    def is_still(self, tensor: Tensor) -> bool:
        return (
            tensor is self.tensor
            and not tensor.is_inference()
            and tensor._version == self._version
            and tensor.data_ptr() == self._alias.data_ptr()
            and tensor.dtype is self._dtype
            and tensor.device == self._alias.device
        )


class Fold:
    """A layer and the norm after it, as one layer.

    Args:
        root: the module.
        pair: the names of both in it.
        channels_last: True stores the folded weight of a 2-d convolution in that format.

    Attributes:
        layer: a convolution or linear layer; norm: the batch norm.
        paths: the names that lead from the owner to the layer, and to the norm.
        keeps_weight: True if the layer runs on its own weight, and no other is computed.
    """

    def __init__(self, root: nn.Module, pair: Pair, channels_last: bool) -> None:
        self.layer: Any = root.get_submodule(pair.layer)
        self.norm: Any = root.get_submodule(pair.norm)
        start = len(pair.owner) + 1 if pair.owner else 0
        self.paths = pair.layer[start:].split("."), pair.norm[start:].split(".")
        self.dims = FOLDABLE[plain_class(self.layer)][1]
        self.channels_last, self.keeps_weight = channels_last and self.dims == 4, False
        self.weights: Weights | None = None
        self._before: list[_Source] = []
        self._eps: float | None = None

    def serves(self, owner: nn.Module) -> bool:
        """True if a forward of the owner may use the folded weights: for inference, as it was when they were folded."""
        layer, norm = self.layer, self.norm
        return (
            not (layer.training or norm.training or hooked(layer, norm))
            and is_changed(norm)  # else it would run what is folded into the layer once more
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources(layer, norm)))
            and all(_at(owner, path) is module for path, module in zip(self.paths, (layer, norm), strict=True))
        )

    def is_stale(self) -> bool:
        """True if a tensor that is folded was written, moved or replaced since, or the norm's `eps`."""
        now = watched(self.layer, self.norm)
        if len(now) != len(self._before) or self.norm.eps != self._eps:
            return True
        return not all(before.is_still(tensor) for before, tensor in zip(self._before, now, strict=True))

    def look(self) -> tuple[list[_Source], float] | None:
        """Return the tensors to fold and `eps`, as they are now; None if they cannot be folded.

        The fold is stale until they are noted.
        """
        self._before = []  # memory that weights were moved from is free from here on
        if hindrance(self.layer, self.norm):
            self.weights = None
            return None
        return [_Source(tensor) for tensor in watched(self.layer, self.norm)], self.norm.eps

    def note(self, seen: tuple[list[_Source], float] | None) -> None:
        """Remember the state of the folded tensors, as `look` returned it."""
        self._before, self._eps = ([], None) if seen is None else seen

    def compute(self) -> Weights:
        """Return the folded weights, computed in float64 and rounded once."""
        layer, norm = self.layer, self.norm
        with outside_modes():
            wide = torch.float32 if layer.weight.device.type == "mps" else torch.float64
            scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
            scale = scale if norm.weight is None else scale * norm.weight.to(wide)
            mean = norm.running_mean.to(wide)
            mean = mean if layer.bias is None else mean - layer.bias.to(wide)
            bias = (0.0 if norm.bias is None else norm.bias.to(wide)) - mean * scale
            dtype = layer.weight.dtype
            factor, shift = (value.to(torch.promote_types(dtype, torch.float32)) for value in (scale, bias))
            if self.keeps_weight:
                return Weights(None, None, factor, shift)
            weight = (layer.weight.to(wide) * scale.view(-1, *[1] * (layer.weight.dim() - 1))).to(dtype)
            return Weights(self._stored(weight), bias.to(dtype), factor, shift)

    def _stored(self, weight: Tensor) -> Tensor:
        """Return a weight with its elements in the order in which the layer's kernel reads them."""
        if self.channels_last and is_depthwise(self.layer) and triton_runs(weight.device):
            return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        return weight.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)

    def fold(self) -> bool:
        """Compute the folded weights again, in their memory; False if that has other shapes, dtypes or devices."""
        new, kept = self.compute(), self.weights
        if kept is None or list(map(_form, kept.tensors())) != list(map(_form, new.tensors())):
            return False
        torch._foreach_copy_(kept.tensors(), new.tensors())
        return True

    def in_channels_last(self) -> bool:
        """True if the weight that the layer runs on is stored in that format."""
        kept = not self.keeps_weight or self.layer.weight.is_contiguous(memory_format=torch.channels_last)
        return self.channels_last and kept


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _at(owner: nn.Module, path: Sequence[str]) -> nn.Module | None:
    module: nn.Module | None = owner
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module


class FoldedMemory(LeftOut, dict[str, Tensor]):
    """The memory of all folded weights of a module, by device: one flat tensor each.

    Reading a tensor of it brings the weights up to date. It lies among the attributes of the modules whose forwards use
    it, so the check for moved weights reads it before every replay: a weight that was written in place is folded again,
    into the same memory, which graphs then read.
    """

    def __init__(self, folds: Sequence[Fold]) -> None:
        super().__init__()
        self._folds, self._lock = list(folds), threading.RLock()
        self._sources: list[Tensor] = []
        self._seen = -1
        self.refresh()
        watch_steps(self)

    def __getitem__(self, key: str) -> Tensor:
        try:
            if sum(map(_version, self._sources)) != self._seen:
                self.refresh()
        except RuntimeError:  # an inference tensor has no version
            self.refresh()
        return super().__getitem__(key)

    def note_written(self, keys: set[int]) -> None:
        """Mark folds of memory that a step wrote as stale; a step need not raise versions."""
        if any(storage_key(tensor) in keys for tensor in self._sources):
            for fold in self._folds:
                fold.note(None)
            self._seen = -1

    def refresh(self, *, everything: bool = False) -> None:
        """Fold the changed weights again, or all; does nothing in a capture, which would record it."""
        with self._lock:
            stale = [fold for fold in self._folds if everything or fold.is_stale()]
            if stale and not _is_capturing(self._folds):
                self._fold(stale)

    def _fold(self, stale: Sequence[Fold]) -> None:
        # Noted at the end: until then, and after an error, other threads see that it is stale, and wait.
        seen = {fold: fold.look() for fold in self._folds}
        usable = [fold for fold in self._folds if seen[fold] is not None]
        with outside_modes():
            if not all(fold.fold() for fold in usable if fold in stale or fold.weights is None):
                self._place({fold: fold.compute() for fold in usable})
        for fold in self._folds:
            fold.note(seen[fold])
        sources = [source for look in seen.values() if look is not None for source in look[0]]
        self._sources, self._seen = [source.tensor for source in sources], sum(map(_version, sources))

    def _place(self, computed: Mapping[Fold, Weights]) -> None:
        """Copy folded weights to one new memory for each device."""
        self.clear()
        for device in {weights.factor.device for weights in computed.values()}:
            weights_of = {fold: weights for fold, weights in computed.items() if weights.factor.device == device}
            tensors = [tensor for weights in weights_of.values() for tensor in weights.tensors()]
            sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]  # rounded up
            memory = self[str(device)] = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
            pairs = zip(torch.split(memory, sizes), tensors, strict=True)
            placed = [part[: new.nbytes].view(new.dtype).as_strided(new.shape, new.stride()) for part, new in pairs]
            torch._foreach_copy_(placed, tensors)
            rest = iter(placed)
            for fold, weights in weights_of.items():
                own: dict[str, Any] = {
                    name: next(rest) for name in Weights._fields if getattr(weights, name) is not None
                }
                fold.weights = weights._replace(**own)


def _is_capturing(folds: Sequence[Fold]) -> bool:
    devices = {fold.layer.weight.device for fold in folds if fold.layer.weight is not None}
    return any(graph_device(device).is_capturing() for device in devices if device.type in ("cpu", "cuda"))


def observed() -> bool:
    """True if a mode, transform or hook observes or changes operators; forwards then run their original code."""
    changes = transform_level() is not None or forward_ad._current_level >= 0
    looks = is_compiling() or torch.jit.is_tracing() or GLOBAL_HOOKS or GLOBAL_PRE_HOOKS  # type: ignore[attr-defined,no-untyped-call]
    return bool(changes or looks)


class FoldUse:
    """A fold in one forward of its owner.

    Attributes:
        applied: True if the layer's last call used the folded weights, so that the norm has nothing left to do.
    """

    def __init__(self, fold: Fold, weights: Weights) -> None:
        self.layer, self.dims, self.weights, self.applied = fold.layer, fold.dims, weights, False


class Region(LeftOut):
    """The folds of one owner.

    Args:
        owner: the module.
        folds: of layers that its forward runs.
        memory: of all folds.
    """

    __slots__ = ("_methods", "folds", "memory")

    def __init__(self, owner: nn.Module, folds: Sequence[Fold], memory: FoldedMemory) -> None:
        self._methods, self.folds, self.memory = methods(owner), folds, memory

    def holds(self, owner: nn.Module) -> bool:
        """True if the owner's forward is the one for which the folds were found: nobody replaced it in the class."""
        return methods(owner) == self._methods

    def uses(self, owner: nn.Module) -> dict[int, FoldUse]:
        """Return the folds that serve a forward of the owner, by the ids of their layers and of their norms."""
        if observed():
            return {}
        serving = [fold for fold in self.folds if fold.serves(owner)]
        if any(fold.is_stale() for fold in serving):
            self.memory.refresh()
        uses: dict[int, FoldUse] = {}
        for fold in serving:
            if fold.weights is not None and not fold.is_stale():  # a capture does not fold: it runs layer and norm
                uses[id(fold.layer)] = uses[id(fold.norm)] = FoldUse(fold, fold.weights)
        return uses


def uses_of(module: nn.Module) -> Mapping[int, Any]:
    """Return the folds that serve a forward of a module, as `Region.uses` does."""
    region: Region | None = vars(module).get(REGION)
    return {} if region is None else region.uses(module)
