"""Compares an optimized module with itself as it was: both against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.context import eager
from simplegraph.base.errors import VerificationError
from simplegraph.base.nested import flatten

_MOST = 1.5  # times the error of the module as it was
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
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            self._kwargs = dict(inputs)
        else:
            self._args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

    def run(self) -> Any:
        """Run the module."""
        return self._run(self._module, torch.Tensor.clone)

    def reference(self) -> list[Tensor]:
        """Return what a copy of the module returns in float64.

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
        leaves, spec = flatten((self._args, self._kwargs))
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
    """Return the errors of the module as it was and of the optimized one: root mean squares, relative to the answer's.

    Args:
        reference: what the module returns in float64.
        before: what it returned as it was.
        after: what the optimized one returns.
        others: what the module as it was returns by other kernels of torch, whose error counts as its own.

    Raises:
        VerificationError: the optimized one's is above 1.5 times its own, and above two steps of the outputs' dtype.
    """
    runs = (before, after, *others)
    if any([out.shape for out in reference] != [out.shape for out in found] for found in runs):
        raise VerificationError("optimize: runs on the example inputs returned tensors of different shapes.")
    was, now, *more = (_error(reference, found) for found in runs)
    own = max([was, *more])
    floor = _FLOOR * max((torch.finfo(out.dtype).eps for out in before), default=0.0)
    if not now <= max(_MOST * own, floor):
        raise VerificationError(
            f"optimize: on the example inputs the optimized module's error against float64 is {now:.2e}, the module's "
            f"own {own:.2e}; expected at most {_MOST} times that. Nothing was changed. "
            "Leave a rewrite out (skip=...)."
        )
    return was, now


def _error(reference: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    total = sum(float((one.double() - other).square().sum()) for one, other in zip(found, reference, strict=True))
    scale = sum(float(out.square().sum()) for out in reference)
    return float((total / scale) ** 0.5) if scale else float(total**0.5)
