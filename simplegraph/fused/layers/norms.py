"""Norms: RMS norms that are written as seven or more operators, and torch's own norms behind a sum."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.classes import runs_as_written
from simplegraph.fused.layers.layer import AsWritten, Layer
from simplegraph.fused.layers.texts import known_name, recognize
from simplegraph.fused.torch_operators import KernelTrial, Operators

_NORMED = "_simplegraph_normed"  # a sum's norm, among the sum's attributes


class Norm(NamedTuple):
    """The parameters of a norm.

    Attributes:
        eps: name of the attribute that is added to the variance; offset: number that is added to the weights.
        centered: True for a layer norm.
    """

    eps: str = "variance_epsilon"
    offset: float = 0.0
    centered: bool = False

    def normalize(self, operators: Operators, module: Any, x: Tensor) -> Tensor:
        """Run the norm."""
        return operators.rms_norm(x, module.weight, getattr(module, self.eps), self.offset)

    def normalize_sum(self, operators: Operators, module: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Run the norm on a sum; return both."""
        weight, eps = module.weight, getattr(module, self.eps)
        if self.centered:
            return operators.add_layer_norm(x, residual, weight, module.bias, eps)
        return operators.add_rms_norm(x, residual, weight, eps, self.offset)

    def trial(self, module: Any, *, added: bool) -> KernelTrial:
        """Return the trial of its kernel."""
        if self.centered:
            return KernelTrial("add_layer_norm", (len(module.weight), int(module.bias is not None)))
        return KernelTrial("add_rms_norm" if added else "rms_norm", (len(module.weight), int(self.offset)))


_RMS_NORMS = {
    "LlamaRMSNorm.forward": Norm(),
    "Olmo2RMSNorm.forward": Norm(),
    "T5LayerNorm.forward": Norm(),
    "GemmaRMSNorm.forward": Norm("eps", 1.0),
}
_LAYER_NORMS = {"LayerNorm.forward": Norm("eps", centered=True)}  # timm's
_OWN = {nn.LayerNorm: Norm("eps", centered=True), nn.RMSNorm: Norm("eps")}


def rms_norms(model: nn.Module) -> dict[nn.Module, Norm]:
    """Map the norms of a model that one kernel can replace to their parameters."""
    return {module: norm for module, norm in recognize(model, _RMS_NORMS).items() if _is_whole(module, norm)}


def sum_norms(model: nn.Module) -> dict[nn.Module, Norm]:
    """Map the norms of a model that one kernel can compute together with a sum to their parameters."""
    own = {each: _OWN[type(each)] for each in model.modules() if type(each) in _OWN and runs_as_written(each)}
    own |= {module: norm for module, norm in recognize(model, _LAYER_NORMS).items() if not module._fast_norm}
    return {module: norm for module, norm in own.items() if _has_one_dimension(module)} | rms_norms(model)


def _is_whole(module: nn.Module, norm: Norm) -> bool:
    """True if the part of its text that is a method is known, too, and no instance's own."""
    if norm.offset and known_name(getattr(type(module), "_norm", None)) != "GemmaRMSNorm._norm":
        return False
    return "_norm" not in vars(module)


def _has_one_dimension(module: Any) -> bool:
    return len(module.normalized_shape) == 1 and module.weight is not None and module.eps is not None


def norm_layer(module: Any, norm: Norm, *, alone: bool) -> Layer:
    """Return the layer of a norm, which hands out what a sum computed; `alone` if it runs by operators otherwise."""
    kind, trials = ("rms_norm", (norm.trial(module, added=False),)) if alone else ("residual", ())
    return Layer(kind, trials, functools.partial(_normalize, module, norm, alone))


def _normalize(module: Any, norm: Norm, alone: bool, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1:
        raise AsWritten
    normed = _take(args[0], module)
    if normed is None and alone and _fits(args[0], module.weight):
        normed = norm.normalize(operators, module, args[0])
    if normed is None:
        raise AsWritten
    return normed


def add(operators: Operators, norms: dict[nn.Module, Norm], residual: Tensor, x: Tensor, module: Any) -> Tensor:
    """Return ``residual + x``; if that goes into a known norm, computes it, too, and keeps it for the module's call."""
    norm = norms.get(module)
    if norm is None or not _fits_sum(residual, x, module):
        return residual + x
    # An inference tensor does not count writes to it.
    with torch.inference_mode(False), torch.no_grad():
        normed, total = norm.normalize_sum(operators, module, x, residual)
    vars(total)[_NORMED] = module, normed, total._version
    return total


def _take(x: Any, module: nn.Module) -> Tensor | None:
    """Return the norm that was computed with a sum, if it is this module's and nobody wrote to the sum since."""
    kept = vars(x).pop(_NORMED, None) if type(x) is Tensor else None
    if kept is None or kept[0] is not module or kept[2] != x._version:
        return None
    return kept[1]  # type: ignore[no-any-return]


def _fits(x: Any, weight: Any) -> bool:
    """True if one kernel gives the same result as the original operators.

    Autocast, or a weight of another dtype, would change the dtype; the original computes in float32 even for float64.
    A tensor subclass, such as DTensor, may not support the kernel.
    """
    if type(x) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False
    alike = (x.dtype, x.device) == (weight.dtype, weight.device) and x.shape[-1:] == weight.shape
    return alike and x.dtype is not torch.float64 and not torch.is_autocast_enabled(x.device.type)


def _fits_sum(residual: Any, x: Any, module: Any) -> bool:
    """True if the sum is of equal tensors without gradients, and its norm can be computed now."""
    if not _fits(x, module.weight) or type(residual) is not Tensor:
        return False
    if (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        return False
    tensors = (residual, x, module.weight, getattr(module, "bias", None))
    return not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors if each is not None)
