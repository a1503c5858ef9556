"""The state of torch around a call: settings that are constants in a graph, and modes under which calls run eagerly."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from simplegraph.base.reasons import Reason

num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
num_operator_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Private to torch. Without it, a transformed tensor has no address, and fails with torch's own message.
transform_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)
# Modes of autograd that observe or change the tensors that a backward gets. The last two are private to torch; without
# them, calls under such a mode are replayed.
anomaly_enabled: Callable[[], bool] = torch.is_anomaly_enabled
saved_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
saved_hooks_allowed: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
GLOBAL_HOOKS = _modules._global_forward_hooks
GLOBAL_PRE_HOOKS = _modules._global_forward_pre_hooks
GLOBAL_BACKWARD_HOOKS = _modules._global_backward_hooks
GLOBAL_BACKWARD_PRE_HOOKS = _modules._global_backward_pre_hooks

# Getters in torch._C of settings that determine the kernel of an operator, its rounding, or the results of factories.
# A release of torch without a getter has no such setting.
_GETTERS = (
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_blas_preferred_backend",
    "_get_linalg_preferred_backend",
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_depthwise_kernel",
    "_get_deterministic_algorithms",
    "_get_mkldnn_enabled",
    "_get_mkldnn_deterministic",
    "_get_flash_sdp_enabled",
    "_get_fa3_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_sdp_priority_order",
    "_get_math_sdp_allow_fp16_bf16_reduction",
)
# Precisions of float32 by backend and operator; torch resolves the settings that they inherit.
_PRECISIONS = tuple((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("matmul", "conv", "rnn"))
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_READ: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    **{name.removeprefix("_get_"): getattr(torch._C, name) for name in _GETTERS if hasattr(torch._C, name)},
    **{f"fp32_precision of {'.'.join(at)}": functools.partial(_precision, *at) for at in _PRECISIONS if _precision},
}
# Graphs on a GPU contain no mkldnn operators, whose settings take a fifth of the time to read. One of them is read all
# the same: only it distinguishes `set_float32_matmul_precision("medium")` from "high".
_OF_THE_CPU = {name for name in _READ if "mkldnn" in name} - {"fp32_precision of mkldnn.matmul"}
_READ_ON = {"cuda": {name: read for name, read in _READ.items() if name not in _OF_THE_CPU}}


@dataclasses.dataclass(frozen=True)
class TorchSettings:
    """The settings of the process that a graph depends on, as one value.

    Args:
        device_type: the type of device that the graph runs on.

    Attributes:
        values: the values of the getters; values with the same meaning for torch are equal.
    """

    device_type: str
    values: tuple[Any, ...] = dataclasses.field(init=False)
    _quick: tuple[Any, ...] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        getters = _READ_ON.get(self.device_type, _READ)
        # Enumerations of pybind11 compare slowly, so their numbers are compared.
        enumerations = tuple(read for name, read in getters.items() if name.endswith("_preferred_backend"))
        others = tuple(read for read in getters.values() if read not in enumerations)
        before = [read() for read in others], [read().value for read in enumerations]
        object.__setattr__(self, "_quick", (others, enumerations, *before))
        # Read last: a setting that another thread changes meanwhile then differs from the quick values.
        object.__setattr__(self, "values", tuple(_comparable(read()) for read in getters.values()))

    def hold(self) -> bool:
        """True if every setting still has its value. This runs at every call, and is fast."""
        others, enumerations, read_before, numbers_before = self._quick
        if [read() for read in others] == read_before and [read().value for read in enumerations] == numbers_before:
            return True
        return TorchSettings(self.device_type) == self

    def difference(self, other: TorchSettings | None = None) -> str:
        """Describe the settings that differ in `other`, or now, as "tf32 changed from True to False"; empty if none."""
        if other is None:
            if self.hold():
                return ""
            other = TorchSettings(self.device_type)
        if other.device_type != self.device_type:
            return f"the device changed from {self.device_type} to {other.device_type}"
        names = _READ_ON.get(self.device_type, _READ)
        triples = zip(names, self.values, other.values, strict=True)
        return ", ".join(f"{name} changed from {before} to {now}" for name, before, now in triples if before != now)


def _comparable(value: Any) -> Any:
    if value == "none":  # neither the setting nor one that it inherits was set
        return "ieee"
    return tuple(value) if isinstance(value, list) else value


def function_modes() -> tuple[Any, ...]:
    """Return the active torch function modes; for `torch.device` contexts their device."""
    modes = map(torch._C._get_function_stack_at, range(num_function_modes()))
    return tuple(mode.device if type(mode) is DeviceContext else mode for mode in modes)


def hindrance() -> tuple[Reason, str] | None:
    """Return why no replay can serve a call now: something observes or changes its operators. None if one can."""
    if torch.jit.is_tracing() or forward_ad._current_level >= 0 or transform_level() is not None:  # type: ignore[attr-defined,no-untyped-call]
        return Reason.TRANSFORMED, ""
    if num_operator_modes():
        return Reason.TRANSFORMED, "a TorchDispatchMode is active"
    foreign = [type(mode).__name__ for mode in function_modes() if not isinstance(mode, torch.device)]
    if foreign:
        return Reason.TRANSFORMED, f"{', '.join(foreign)} is active"
    if parametrize._cache_enabled:
        return Reason.TRANSFORMED, "inside torch.nn.utils.parametrize.cached()"
    if GLOBAL_HOOKS or GLOBAL_PRE_HOOKS:
        return Reason.HOOKS, "forward hooks on all modules"
    return None


def autograd_hindrance() -> tuple[Reason, str] | None:
    """Return why no replay can serve a call that computes gradients now; None if one can."""
    if anomaly_enabled():
        return Reason.TRANSFORMED, "torch.autograd.detect_anomaly is on"
    if saved_hooks(False) is not None:
        return Reason.HOOKS, "saved-tensor hooks around the call, as of save_on_cpu or activation checkpoints"
    if not saved_hooks_allowed():
        return Reason.HOOKS, "torch.autograd.graph.disable_saved_tensors_hooks around the call"
    return None
