"""Observes one eager run: which norm got exactly a layer's output, and whether anybody else used that."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.nested import flatten
from simplegraph.base.operators import OperatorMode
from simplegraph.base.tensors import storage_key
from simplegraph.fused.layers.written import plain_class
from simplegraph.fused.optimizing.pairs import KINDS, NORMS, Pair


class _Uses(OperatorMode):
    """Notes operators that read a layer's output outside of the norm that got it.

    Attributes:
        made: the layer of each output, and the output, by its memory's key.
        reading: the layers whose outputs a running norm got.
        used: the layers whose outputs others used.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[nn.Module, Tensor]] = {}
        self.reading: list[nn.Module] = []
        self.used: set[nn.Module] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what an operator reads, and run it."""
        for leaf in flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                layer, _ = self.made.get(storage_key(leaf), (None, None))
                if layer is not None and layer not in self.reading:
                    self.used.add(layer)
        return super().run(func, args, kwargs)


class ObservedRun:
    """Finds the pairs of layers and norms that one run of a module shows. All outputs of layers live until it ends.

    Args:
        root: the module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._uses = _Uses()
        self._fed: dict[nn.Module, set[nn.Module | None]] = collections.defaultdict(set)  # norm -> layers before it
        self._unread: collections.Counter[nn.Module] = collections.Counter()  # layer -> outputs that no norm got

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call of the module, and return its result."""
        hooks = []
        for module in self._root.modules():
            if plain_class(module) in KINDS:
                hooks.append(module.register_forward_hook(self._after_layer))
            elif plain_class(module) in NORMS:
                hooks += [
                    module.register_forward_pre_hook(self._before_norm, with_kwargs=True),
                    module.register_forward_hook(self._after_norm, always_call=True),
                ]
        try:
            with self._uses:
                result = call()
        finally:
            for hook in hooks:
                hook.remove()
        alone = sys.getrefcount(_Kept(torch.empty(0)).tensor)
        for layer, tensor in self._uses.made.values():
            if sys.getrefcount(_Kept(tensor).tensor) > alone + 2:  # the pair in `made`, and `tensor`
                self._uses.used.add(layer)  # somebody kept it: it is a result, or lies in an attribute
        self._uses.made.clear()
        return result

    def _after_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._unread[layer] += 1
        if isinstance(output, Tensor) and output.layout is torch.strided:
            self._uses.made[storage_key(output)] = layer, output

    def _before_norm(self, norm: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        known = isinstance(given, Tensor) and given.layout is torch.strided
        layer, output = self._uses.made.get(storage_key(given), (None, None)) if known else (None, None)  # type: ignore[arg-type]
        layer = layer if output is given else None
        self._fed[norm].add(layer)
        self._uses.reading.append(norm if layer is None else layer)
        if layer is not None:
            self._unread[layer] -= 1

    def _after_norm(self, norm: nn.Module, args: Any, output: Any) -> None:
        self._uses.reading.pop()

    def contradicts(self, pair: Pair) -> bool:
        """True if the layer ran, and not as the layer of this pair."""
        layer, norm = map(self._root.get_submodule, (pair.layer, pair.norm))
        return layer in self._unread and not self._confirms(layer, norm)

    def _confirms(self, layer: nn.Module, norm: nn.Module) -> bool:
        feeds = [other for other, layers in self._fed.items() if layer in layers]
        alone = feeds == [norm] and self._fed[norm] == {layer}
        return alone and not self._unread[layer] and layer not in self._uses.used

    def pairs(self) -> list[Pair]:
        """List the layers whose outputs went into one norm, and nowhere else."""
        names = {module: name for name, module in self._root.named_modules()}
        found = []
        for norm, layers in self._fed.items():
            layer = next(iter(layers))
            if layer is not None and self._confirms(layer, norm):
                found.append(Pair(_common(names[layer], names[norm]), names[layer], names[norm]))
        return found


class _Kept:
    """Holds a tensor, so that references are counted alike for all."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _common(first: str, second: str) -> str:
    """Return the name of the module that contains both."""
    owner = []
    for one, other in zip(first.split(".")[:-1], second.split(".")[:-1], strict=False):
        if one != other:
            break
        owner.append(one)
    return ".".join(owner)
