"""Folded weights: computed from a layer and the norm after it, in memory of their own, and again when those change."""

from __future__ import annotations

import collections
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.modes import outside_modes
from simplegraph.base.tensors import storage_key
from simplegraph.base.writes import watch_steps
from simplegraph.device.select import graph_device
from simplegraph.fused.choice import triton_runs
from simplegraph.fused.layers.classes import is_depthwise
from simplegraph.fused.layers.written import hooked, plain_class
from simplegraph.fused.optimizing.pairs import KINDS, hindrance, is_changed, sources, watched

_ALIGNMENT = 256  # bytes, as the allocator gives them: kernels read aligned weights faster
_version = operator.attrgetter("_version")


class Weights(NamedTuple):
    """The weights of a folded layer, and the dimensions of the batched input for which the norm is folded.

    Attributes:
        weight: of the layer and the norm, in the layer's dtype; bias: as `weight`. None if the layer has its own.
        factor: (outputs,), multiplies what the layer's own weight gives, without a bias; shift: as `factor`, is added
            then. In float32, or the layer's dtype if that is wider.
        dims: of the input.
    """

    weight: Tensor | None
    bias: Tensor | None
    factor: Tensor
    shift: Tensor
    dims: int

    def tensors(self) -> list[Tensor]:
        """List the tensors that there are."""
        return [each for each in self[:4] if each is not None]


class _Source:
    """Remembers a tensor, its memory and its version."""

    __slots__ = ("_alias", "_dtype", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # The alias keeps the memory: no other can come to lie at its address meanwhile.
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
        layer: a convolution or linear layer.
        norm: the batch norm.
        paths: the names that lead from the owner to the layer, and to the norm.
        channels_last: True stores the folded weight of a 2-d convolution in that format.

    Attributes:
        keeps_weight: True if the layer runs on its own weight, and no other is computed.
    """

    __slots__ = (
        *("_before", "_eps", "_placed", "channels_last", "dims"),
        *("keeps_weight", "layer", "norm", "paths", "weights"),
    )

    def __init__(self, layer: Any, norm: Any, paths: tuple[Sequence[str], Sequence[str]], channels_last: bool) -> None:
        self.layer, self.norm, self.paths = layer, norm, paths
        self.dims = KINDS[plain_class(layer)][1]
        self.channels_last, self.keeps_weight = channels_last and self.dims == 4, False
        self.weights: Weights | None = None
        self._before: list[_Source] = []
        self._placed: Any = None
        self._eps: float | None = None

    def serves(self, owner: nn.Module) -> bool:
        """True if a forward of the owner may use the folded weights: for inference, as it was when they were folded."""
        layer, norm = self.layer, self.norm
        if layer.training or norm.training or hooked(layer, norm):
            return False
        if not is_changed(norm):  # it would run what is folded into the layer once more
            return False
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources(layer, norm)):
            return False
        return all(_at(owner, path) is module for path, module in zip(self.paths, (layer, norm), strict=True))

    def is_stale(self) -> bool:
        """True if a tensor that is folded was written, moved or replaced since, or the norm's `eps`."""
        now = watched(self.layer, self.norm)
        if len(now) != len(self._before) or self.norm.eps != self._eps:
            return True
        return not all(before.is_still(tensor) for before, tensor in zip(self._before, now, strict=True))

    def look(self) -> tuple[list[_Source], float] | None:
        """Return the tensors to be folded and `eps`, as they are now; None if they cannot be, and then nothing is.

        It is stale until they are noted.
        """
        self._before = []  # memory that weights were moved out of is free from here on
        if hindrance(self.layer, self.norm):
            self.weights = None
            return None
        return [_Source(tensor) for tensor in watched(self.layer, self.norm)], self.norm.eps

    def note(self, seen: tuple[list[_Source], float] | None) -> None:
        """Remember what was folded: what `look` returned."""
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
            factor, shift = (each.to(_wider(dtype)) for each in (scale, bias))
            if self.keeps_weight:
                return Weights(None, None, factor, shift, self.dims)
            weight = (layer.weight.to(wide) * scale.view(-1, *[1] * (layer.weight.dim() - 1))).to(dtype)
            format = torch.channels_last if self.channels_last else torch.contiguous_format
            return Weights(weight.contiguous(memory_format=format), bias.to(dtype), factor, shift, self.dims)

    def place(self, memory: Tensor, at: int) -> int:
        """Take the part of a flat tensor from byte `at` on for its weights; return where it ends."""
        found, parts = [], self._parts()
        for shape, dtype in parts:
            size = shape.numel() * dtype.itemsize
            found.append(self._shaped(memory[at : at + size].view(dtype), shape))
            at += _aligned(size)
        *folded, (factor, shift) = found
        weight, bias = folded or (None, None)
        self.weights, self._placed = Weights(weight, bias, factor, shift, self.dims), (memory.device, parts)
        return at

    def _shaped(self, flat: Tensor, shape: torch.Size) -> Tensor:
        if not self.channels_last or len(shape) != 4:
            return flat.view(shape)
        out, channels, height, width = shape
        if is_depthwise(self.layer) and triton_runs(flat.device):
            return flat.view(height, width, channels, out).permute(3, 2, 0, 1)  # as its kernel reads it
        return flat.view(out, height, width, channels).permute(0, 3, 1, 2)

    def nbytes(self) -> int:
        """Return the memory that its weights take."""
        return sum(_aligned(shape.numel() * dtype.itemsize) for shape, dtype in self._parts())

    def fits(self) -> bool:
        """True if the memory of its weights has the shapes, dtypes and device that the layer asks for."""
        return self.weights is not None and self._placed == (self.layer.weight.device, self._parts())

    def _parts(self) -> list[tuple[torch.Size, torch.dtype]]:
        """List the parts of its memory: weight and bias, if it has them, then factor and shift as one."""
        shape, dtype = self.layer.weight.shape, self.layer.weight.dtype
        both = torch.Size((2, shape[0])), _wider(dtype)
        return [both] if self.keeps_weight else [(shape, dtype), (shape[:1], dtype), both]

    def in_channels_last(self) -> bool:
        """True if the weight that the layer runs on is stored in that format."""
        kept = not self.keeps_weight or self.layer.weight.is_contiguous(memory_format=torch.channels_last)
        return self.channels_last and kept

    def weights_now(self) -> Weights | None:
        """Return the weights to use in a forward; None if the norm cannot be folded any more.

        Weights are still stale only in a capture, which then records the folding: each replay folds.
        """
        if self.weights is None or not self.is_stale():
            return self.weights
        return None if hindrance(self.layer, self.norm) else self.compute()


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _at(owner: nn.Module, path: Sequence[str]) -> nn.Module | None:
    module: nn.Module | None = owner
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module


class FoldedMemory(dict[str, Tensor]):
    """The memory of all folded weights of a module, by device: one flat tensor each.

    Reading a tensor of it brings the weights up to date. It lies among the attributes of the modules whose forwards use
    it, so the check for moved weights reads it before every replay: a weight that was written in place is folded again,
    into the same memory, which graphs then read.
    """

    __slots__ = ("__weakref__", "_folds", "_lock", "_seen", "_sources")

    def __init__(self, folds: Sequence[Fold]) -> None:
        super().__init__()
        self._folds, self._lock = list(folds), threading.RLock()
        self._sources: list[Tensor] = []
        self._seen = -1
        self.refresh()
        watch_steps(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and pickles are of the plain module

    def __getitem__(self, key: str) -> Tensor:
        try:
            if sum(map(_version, self._sources)) != self._seen:
                self.refresh()
        except RuntimeError:  # an inference tensor has no version
            self.refresh()
        return super().__getitem__(key)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return sum(tensor.nbytes for tensor in self.values())

    def note_written(self, keys: set[int]) -> None:
        """Take note of a step, which need not raise versions; what is folded of its memory is stale from now on."""
        if any(storage_key(tensor) in keys for tensor in self._sources):
            for fold in self._folds:
                fold.note(None)
            self._seen = -1

    def refresh(self, *, everything: bool = False) -> None:
        """Fold again what changed, or everything; a capture, which would record that, leaves it as it is."""
        with self._lock:
            stale = [fold for fold in self._folds if everything or fold.is_stale()]
            if stale and not _is_capturing(self._folds):
                self._fold(stale)

    def _fold(self, stale: Sequence[Fold]) -> None:
        # Noted when all is done: until then other threads see that it is stale, and wait. After an error it is so, too.
        seen = {fold: fold.look() for fold in self._folds}
        usable = [fold for fold in self._folds if seen[fold] is not None]
        if not all(fold.fits() for fold in usable):
            self._allocate(usable)
            stale = usable
        with outside_modes():
            for fold in stale:
                if fold.weights is not None:
                    for kept, new in zip(fold.weights.tensors(), fold.compute().tensors(), strict=True):
                        kept.copy_(new)
        for fold in self._folds:
            fold.note(seen[fold])
        sources = [source for known in seen.values() if known is not None for source in known[0]]
        self._sources, self._seen = [each.tensor for each in sources], sum(map(_version, sources))

    def _allocate(self, folds: Sequence[Fold]) -> None:
        self.clear()
        groups = collections.defaultdict(list)
        for fold in folds:
            groups[fold.layer.weight.device].append(fold)
        with outside_modes():
            for device, group in groups.items():
                size, at = sum(fold.nbytes() for fold in group), 0
                memory = self[str(device)] = torch.zeros(size, dtype=torch.uint8, device=device)
                for fold in group:
                    at = fold.place(memory, at)


def _is_capturing(folds: Sequence[Fold]) -> bool:
    devices = {fold.layer.weight.device for fold in folds if fold.layer.weight is not None}
    return any(graph_device(device).is_capturing() for device in devices if device.type in ("cpu", "cuda"))
