"""Runs a module on example inputs: to compare it before and after, both against float64, and to observe it.

An observed run shows which norm got exactly a layer's output, and whether that was used elsewhere.
"""

from __future__ import annotations

import collections
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.context import eager
from simplegraph.base.errors import VerificationError
from simplegraph.base.nested import flatten
from simplegraph.base.operators import OperatorMode
from simplegraph.base.tensors import storage_key
from simplegraph.fused.layers.provable import plain_class
from simplegraph.fused.optimizing.pairs import FOLDABLE, NORMS, Pair

_MOST = 1.5  # times the error of the module as it was
_NOWHERE = -1  # the storage key of a tensor without other holders
_FLOOR = 2  # steps of the outputs' dtype: with a few outputs, smaller errors differ by chance


class Examples:
    """Example inputs, and runs of a module on them: eager, without gradients, and with the same random numbers.

    Args:
        module: the module.
        plain: the same module without graphs of its own, to be copied.
        inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
    """

    def __init__(self, module: nn.Module, plain: nn.Module, inputs: Any) -> None:
        self._module, self._plain = module, plain
        self._given: tuple[tuple[Any, ...], dict[str, Any]]
        if isinstance(inputs, Mapping):
            self._given = (), dict(inputs)
        else:
            self._given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}

    def run(self) -> Any:
        """Run the module."""
        return self._run(self._module, torch.Tensor.clone)

    def reference(self) -> list[Tensor]:
        """Run a copy of the module in float64; return its outputs.

        Raises:
            VerificationError: the module cannot be copied, or does not run in float64.
        """
        try:
            wide = copy.deepcopy(self._plain).double()
            with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
                return numbers(self._run(wide, _wide))
        except Exception as error:
            raise VerificationError(
                f"optimize could not run {type(self._module).__name__} in float64 on the example inputs "
                f"({type(error).__name__}: {error}), so there is nothing to compare with; nothing was changed. Without "
                "example_inputs only what follows from known classes is done."
            ) from error

    def _run(self, module: Any, copied: Callable[[Tensor], Tensor]) -> Any:
        """Run a module on copies of the inputs, which a forward may write to."""
        leaves, spec = flatten(self._given)
        args, kwargs = spec.unflatten([copied(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        devices = {tensor.device for tensor in module.parameters() if tensor.device.type == "cuda"}
        with eager(), torch.no_grad(), torch.random.fork_rng(list(devices)):
            return module(*args, **kwargs)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def numbers(result: Any) -> list[Tensor]:
    """List copies of the floating-point tensors in a result."""
    return [leaf.clone() for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def compare(
    reference: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor], *others: Sequence[Tensor]
) -> tuple[float, float]:
    """Return the errors of the unchanged and the optimized module: root mean squares, relative to the reference's.

    Args:
        reference: the module's outputs in float64.
        before: the outputs of the unchanged module.
        after: the outputs of the optimized module.
        others: outputs of the unchanged module by other kernels of torch, whose errors count as its own.

    Raises:
        VerificationError: the optimized module's error is above 1.5 times the unchanged module's, and above two steps
            of the outputs' dtype.
    """
    runs = (before, after, *others)
    if any([out.shape for out in reference] != [out.shape for out in run] for run in runs):
        raise VerificationError("optimize: runs on the example inputs returned tensors of different shapes.")
    was, now, *more = (_error(reference, run) for run in runs)
    own = max([was, *more])
    floor = _FLOOR * max((torch.finfo(out.dtype).eps for out in before), default=0.0)
    if not now <= max(_MOST * own, floor):
        raise VerificationError(
            f"optimize: on the example inputs the optimized module's error against float64 is {now:.2e}, the module's "
            f"own {own:.2e}; expected at most {_MOST} times that. Nothing was changed. "
            "Leave a rewrite out (skip=...)."
        )
    return was, now


def _error(reference: Sequence[Tensor], run: Sequence[Tensor]) -> float:
    total = sum(float((one.double() - other).square().sum()) for one, other in zip(run, reference, strict=True))
    scale = sum(float(out.square().sum()) for out in reference)
    return float((total / scale) ** 0.5) if scale else float(total**0.5)


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
        """Note the tensors that an operator reads, and run it."""
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
            if plain_class(module) in FOLDABLE:
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
        self._uses.made[_NOWHERE] = self._root, torch.empty(0)
        counts = [(layer, sys.getrefcount(tensor)) for layer, tensor in self._uses.made.values()]
        _, alone = counts[-1]
        # The others are still held: they are results, or lie in attributes.
        self._uses.used |= {layer for layer, count in counts if count > alone}
        self._uses.made.clear()
        return result

    def _after_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._unread[layer] += 1
        if isinstance(output, Tensor) and output.layout is torch.strided:
            self._uses.made[storage_key(output)] = layer, output

    def _before_norm(self, norm: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        readable = isinstance(given, Tensor) and given.layout is torch.strided
        layer, output = self._uses.made.get(storage_key(given), (None, None)) if readable else (None, None)  # type: ignore[arg-type]
        layer = layer if output is given else None
        self._fed[norm].add(layer)
        self._uses.reading.append(norm if layer is None else layer)
        if layer is not None:
            self._unread[layer] -= 1

    def _after_norm(self, norm: nn.Module, args: Any, output: Any) -> None:
        self._uses.reading.pop()

    def contradicts(self, pair: Pair) -> bool:
        """True if the layer ran otherwise than as the layer of this pair."""
        layer, norm = map(self._root.get_submodule, (pair.layer, pair.norm))
        return layer in self._unread and not self._confirms(layer, norm)

    def _confirms(self, layer: nn.Module, norm: nn.Module) -> bool:
        feeds = [other for other, layers in self._fed.items() if layer in layers]
        alone = feeds == [norm] and self._fed[norm] == {layer}
        return alone and not self._unread[layer] and layer not in self._uses.used

    def pairs(self) -> list[Pair]:
        """List the layers whose outputs went into one norm, and nowhere else."""
        names = {module: name for name, module in self._root.named_modules()}
        pairs = []
        for norm, layers in self._fed.items():
            layer = next(iter(layers))
            if layer is not None and self._confirms(layer, norm):
                pairs.append(Pair(_common(names[layer], names[norm]), names[layer], names[norm]))
        return pairs


def _common(first: str, second: str) -> str:
    """Return the name of the module that contains both."""
    owner = []
    for one, other in zip(first.split(".")[:-1], second.split(".")[:-1], strict=False):
        if one != other:
            break
        owner.append(one)
    return ".".join(owner)
