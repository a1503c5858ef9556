"""The state of torch around a call: settings that a graph freezes, and modes that no replay can stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from simplegraph.graph import patches
from simplegraph.reasons import Reason

num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
num_operator_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Private to torch; where it is absent, a transformed tensor has no address and fails with torch's own message.
transform_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)
GLOBAL_HOOKS = _modules._global_forward_hooks
GLOBAL_PRE_HOOKS = _modules._global_forward_pre_hooks
GLOBAL_BACKWARD_HOOKS = _modules._global_backward_hooks
GLOBAL_BACKWARD_PRE_HOOKS = _modules._global_backward_pre_hooks

# What decides which kernel an operator runs, what it may round, or what a factory makes: in torch._C, by the names
# of its getter and setter. A release that lacks one lacks the setting.
_SETTINGS = {
    "_get_cublas_allow_tf32": "_set_cublas_allow_tf32",
    "_get_cudnn_allow_tf32": "_set_cudnn_allow_tf32",
    "_get_onednn_allow_tf32": "_set_onednn_allow_tf32",
    "_get_float32_matmul_precision": "_set_float32_matmul_precision",
    "_get_cublas_allow_fp16_accumulation": "_set_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction": "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction": "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_get_blas_preferred_backend": "_set_blas_preferred_backend",
    "_get_linalg_preferred_backend": "_set_linalg_preferred_backend",
    "_get_cudnn_enabled": "_set_cudnn_enabled",
    "_get_cudnn_benchmark": "_set_cudnn_benchmark",
    "_get_cudnn_deterministic": "_set_cudnn_deterministic",
    "_get_cudnn_depthwise_kernel": "_set_cudnn_depthwise_kernel",
    "_get_deterministic_algorithms": "_set_deterministic_algorithms",
    "_get_mkldnn_enabled": "_set_mkldnn_enabled",
    "_get_mkldnn_deterministic": "_set_mkldnn_deterministic",
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_fa3_sdp_enabled": "_set_sdp_use_fa3",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
    "_get_sdp_priority_order": "_set_sdp_priority_order",
    "_get_math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
}
# The newer way to set precisions, by backend and operator.
_PRECISIONS = [
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
]
_OTHER_SETTERS = ("_set_fp32_precision_setter", "_set_default_dtype", "_set_default_tensor_type")


class TorchSettings:
    """The settings of the whole process, as one value: the very same object as long as no setting differs.

    Reading two dozen settings costs as much as a replay, so whoever sets one says so, and a call compares one object.

    Attributes:
        current: the settings; None where they have to be read.
    """

    current: ClassVar[tuple[Any, ...] | None] = None
    _known: ClassVar[dict[tuple[Any, ...], tuple[Any, ...]]] = {}
    _watched: ClassVar[bool] = False
    _change: ClassVar[object] = None

    @classmethod
    def read(cls) -> tuple[Any, ...]:
        """Read the settings."""
        change = cls._change
        precision = getattr(torch._C, "_get_fp32_precision_getter", None)
        found = (
            torch.get_default_dtype(),
            *(_value(getattr(torch._C, name, None)) for name in _SETTINGS),
            *(_value(precision, *names) for names in _PRECISIONS),
        )
        found = cls._known.setdefault(found, found)
        if cls._watched and change is cls._change:  # not set by another thread meanwhile
            cls.current = found
        return found

    @classmethod
    def changed(cls) -> None:
        """Read the settings again at the next call."""
        cls._change = object()
        cls.current = None

    @classmethod
    def unwatch(cls) -> None:
        """Read the settings at every call, since nothing tells any more when they change."""
        cls._watched = False
        cls.changed()


def _value(getter: Callable[..., Any] | None, *names: str) -> Any:
    try:
        value = None if getter is None else getter(*names)
    except RuntimeError:  # set in the old way and in the new, which torch refuses to tell apart
        return "mixed"
    if value == "none":  # neither it was set, nor anything that it follows
        return "ieee"
    return tuple(value) if isinstance(value, list) else value


@patches.installer
def watch_settings() -> None:
    """Notice every change of the settings, from the first capture of the process on."""
    TorchSettings._watched = True
    patches.record("simplegraph.module.torch_state", TorchSettings.unwatch)
    for name in (*_SETTINGS.values(), *_OTHER_SETTERS):
        if hasattr(torch._C, name):
            patches.replace(torch._C, name, _noticed(getattr(torch._C, name)))
    attribute: Any = torch.backends.ContextProp  # holds setters of its own
    patches.replace(attribute, "__set__", _noticed(attribute.__set__))


def _noticed(setter: Callable[..., Any]) -> Callable[..., Any]:
    def noticed(*args: Any, **kwargs: Any) -> Any:
        try:
            return setter(*args, **kwargs)
        finally:
            TorchSettings.changed()

    return noticed


def function_modes() -> tuple[Any, ...]:
    """Return what functions of torch are under: the default devices, and other modes themselves."""
    modes = map(torch._C._get_function_stack_at, range(num_function_modes()))
    return tuple(mode.device if type(mode) is DeviceContext else mode for mode in modes)


def hindrance() -> tuple[Reason, str] | None:
    """Return why no replay can stand for a call now, if so: somebody looks at, or changes, what runs inside."""
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
