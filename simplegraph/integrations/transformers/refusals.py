"""Refuses calls that graphs cannot serve, by properties of the model that may change from call to call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch.nn.modules import module as torch_module
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from simplegraph.base.reasons import CannotBind, Reason

# Other implementations read the lengths of rows back to the host, or compile themselves.
CAPTURABLE_ATTENTION = ("sdpa", "eager")
_HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
# transformers leaves these hooks in place once hidden states were requested; they do nothing until the next request.
_HARMLESS_HOOKS = ("transformers.utils.output_capturing",)


def check_model(model: Any) -> None:
    """Refuse a model whose current state graphs cannot serve.

    Raises:
        CannotBind: the reason.
    """
    if model.training:
        raise CannotBind(Reason.TRAINING, "")
    _check_modules(model)
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation not in CAPTURABLE_ATTENTION:
        raise CannotBind(Reason.ATTENTION, str(implementation))


def choices(model: Any) -> Hashable:
    """Return the model's settings that are fixed in captured graphs.

    These are the implementations of attention and experts, the windows of attention, and the adapters in use.
    """
    config = model.config.get_text_config(decoder=True)
    adapters = [
        (str(getattr(child, "active_adapters", None)), bool(child.disable_adapters))
        for child in model.modules()
        # Of models it is a method.
        if "disable_adapters" in vars(child) or not callable(getattr(type(child), "disable_adapters", callable))
    ]
    names = ("_experts_implementation", "sliding_window", "attention_chunk_size", "layer_types")
    return config._attn_implementation, *(str(getattr(config, name, None)) for name in names), tuple(adapters)


def edits_steps(model: Any) -> str:
    """Name a method that may change a step's arguments in its own way; "" if transformers does that alone."""
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        method = getattr(model, name)
        while method is not None:
            if not getattr(method, "__globals__", {}).get("__name__", "").startswith("transformers."):
                return name
            method = getattr(method, "__wrapped__", None)
    if "forward" in vars(model):
        return "forward"
    return "a forward hook" if model._forward_pre_hooks else ""


def check_generation(config: Any, kwargs: Mapping[str, Any], cache_name: str) -> None:
    """Refuse a call of `_sample` that graphs cannot serve, by its generation config and other arguments.

    Args:
        config: the generation config.
        kwargs: keyword arguments of `_sample`.
        cache_name: name of the argument that holds the cache.

    Raises:
        CannotBind: the reason.
    """
    if kwargs.get("synced_gpus"):
        raise CannotBind(Reason.WRONG_DEVICE, "synced_gpus")
    if getattr(config, "is_assistant", False):
        raise CannotBind(Reason.GENERATION, "this model assists another")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise CannotBind(Reason.UNSUPPORTED_OUTPUT, name)
    _check_cache(kwargs.get(cache_name), wanted=bool(kwargs.get("use_cache", True)))


def _check_modules(model: Any) -> None:
    """Refuse hooks of submodules, and models on several devices; the model's own hooks run around every step."""
    spread = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(spread) > 1:
        raise CannotBind(Reason.WRONG_DEVICE, f"device_map over {', '.join(sorted(map(str, spread)))}")
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise CannotBind(Reason.WRONG_DEVICE, "tensor parallel")
    if any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS):
        raise CannotBind(Reason.HOOKS, "hooks for all modules")
    devices = set()
    for name, child in model.named_modules():
        attributes = vars(child)
        if "_hf_hook" in attributes:  # accelerate replaces the forward of modules that it offloads
            raise CannotBind(Reason.WRONG_DEVICE, f"an accelerate hook at {name or 'the model'}")
        hooks = [hook for kind in _HOOK_DICTS for hook in attributes[kind].values()]
        if child is not model and any(getattr(hook, "__module__", None) not in _HARMLESS_HOOKS for hook in hooks):
            raise CannotBind(Reason.HOOKS, name)
        devices |= {parameter.device for parameter in child._parameters.values() if parameter is not None}
    if len(devices) > 1:
        raise CannotBind(Reason.WRONG_DEVICE, f"parameters on {', '.join(sorted(map(str, devices)))}")
    for device in devices:
        if device.type not in ("cuda", "cpu"):
            raise CannotBind(Reason.WRONG_DEVICE, f"the model is on {device}")


def _check_cache(cache: Any, *, wanted: bool) -> None:
    if cache is None:
        no_cache = "generate gives this model none: it keeps its states in itself, or in a cache or argument of its own"
        raise CannotBind(
            Reason.GENERATION, no_cache if wanted else "use_cache=False: a step without a cache has all tokens"
        )
    parts = (
        (cache.self_attention_cache, cache.cross_attention_cache) if type(cache) is EncoderDecoderCache else (cache,)
    )
    for part in parts:
        if type(part) is not DynamicCache:
            raise CannotBind(Reason.GENERATION, f"a {type(part).__name__}")
        if part.offloading:
            raise CannotBind(Reason.GENERATION, "an offloaded cache")
