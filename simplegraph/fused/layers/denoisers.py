"""Layers of diffusers' transformers: adaptive norms, gated layers, timesteps; its attention, and torch's own."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simplegraph.fused.layers.layer import AsWritten, Layer, arguments_of, class_name, hooked, is_plain, is_written
from simplegraph.fused.torch_operators import Adapted, KernelTrial, Operators

ADAPTIVE_NORM, ATTENTION, TIMESTEPS = "adaptive_norm", "attention", "timesteps"
_PROCESSOR = "diffusers.models.attention_processor.AttnProcessor2_0"
_ZERO = "diffusers.models.normalization.AdaLayerNormZero"
_TIMESTEPS = "diffusers.models.embeddings.Timesteps"
_CONDITION = "diffusers.models.embeddings.CombinedTimestepLabelEmbeddings"
# Parts of a block with such a norm that are not called, or whose output is written to.
_ADAPTIVE = (
    *("norm1", "norm1.norm", "norm1.silu", "norm1.emb", "norm1.emb.time_proj"),
    *("norm1.emb.timestep_embedder", "norm1.emb.timestep_embedder.linear_2"),
)


def _block_layer(module: Any) -> Layer | None:
    norms = [module.norm1, *([] if module.attn2 is None else [module.norm2]), module.norm3]
    if module.pos_embed is not None or module.only_cross_attention:
        return None
    signature = inspect.signature(type(module).forward)
    if module.norm_type == "layer_norm" and all(type(norm) is nn.LayerNorm for norm in norms):
        trials = [_trial(norm, "residual") for norm in norms[1:]]
        bypassed = ("norm3",) if module.attn2 is None else ("norm2", "norm3")
        run = functools.partial(_block, module, _run_plain, signature)
        return Layer("residual", tuple(trials), run, bypassed=bypassed)
    zero = module.norm1
    fits = (
        module.norm_type == "ada_norm_zero"
        and module.attn2 is None
        and class_name(zero) == _ZERO
        and class_name(zero.emb) == _CONDITION
        and class_name(zero.emb.time_proj) == _TIMESTEPS
        and [type(layer) for layer in (zero.norm, module.norm3, zero.silu)] == [nn.LayerNorm, nn.LayerNorm, nn.SiLU]
    )
    if not fits:
        return None
    trials = [_trial(zero.norm, "scale", "shift"), _trial(module.norm3, "gate", "residual", "scale", "shift")]
    trials.append(KernelTrial("finish", ("silu", 1)))
    run = functools.partial(_block, module, _run_adaptive, signature)
    return Layer(ADAPTIVE_NORM, tuple(trials), run, bypassed=("norm3", *_ADAPTIVE))


def _trial(norm: Any, *given: str) -> KernelTrial:
    weights = [name for name in ("weight", "bias") if getattr(norm, name) is not None]
    return KernelTrial("adapt", (*norm.normalized_shape, *weights, *given))


def _block(
    module: Any,
    run: Callable[..., Any],
    signature: inspect.Signature,
    operators: Operators,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = arguments_of(signature, module, *args, **kwargs)
    hidden = given["hidden_states"]
    others = given["cross_attention_kwargs"] or module._chunk_size is not None
    if others or not is_plain(hidden, 3):
        raise AsWritten
    return run(operators, module, hidden, given)


def _run_plain(operators: Operators, module: Any, hidden: Any, given: dict[str, Any]) -> Any:
    branch = module.attn1(module.norm1(hidden), attention_mask=given["attention_mask"])
    if module.attn2 is not None:
        normed, hidden = operators.adapt(branch, _adapted(module.norm2, residual=hidden))
        states, mask = given["encoder_hidden_states"], given["encoder_attention_mask"]
        branch = module.attn2(normed, encoder_hidden_states=states, attention_mask=mask)
    normed, hidden = operators.adapt(branch, _adapted(module.norm3, residual=hidden))
    return module.ff(normed) + hidden


def _run_adaptive(operators: Operators, module: Any, hidden: Any, given: dict[str, Any]) -> Any:
    zero = module.norm1
    times, labels = _embed(zero.emb, given["timestep"], given["class_labels"], hidden.dtype)
    # Images of one pixel: their sum and its activation are one kernel.
    active = operators.finish(times[:, :, None, None], None, labels[:, :, None, None], "silu").flatten(1)
    shift, scale, gate, shift_after, scale_after, gate_after = zero.linear(active).chunk(6, dim=1)
    normed, _ = operators.adapt(hidden, _adapted(zero.norm, scale=scale, shift=shift))
    branch = module.attn1(normed, attention_mask=given["attention_mask"])
    after = _adapted(module.norm3, gate=gate, residual=hidden, scale=scale_after, shift=shift_after)
    normed, hidden = operators.adapt(branch, after)
    return torch.addcmul(hidden, gate_after.unsqueeze(1), module.ff(normed))


def _adapted(norm: Any, **given: Any) -> Adapted:
    return Adapted(norm.eps, norm.weight, norm.bias, **given)


def _gated_layer(module: Any) -> Layer:
    trial = KernelTrial("gated", (module.proj.out_features // 2, "gelu"))
    return Layer("gated", (trial,), functools.partial(_gated, module), 3)


def _gated(module: Any, operators: Operators, x: Tensor) -> Tensor:
    up, gate = module.proj(x).chunk(2, dim=-1)
    return operators.gated(gate, up, "gelu")


def _gelu_layer(module: Any) -> Layer | None:
    if module.approximate != "tanh" or type(module.proj) is not nn.Linear or module.proj.bias is None:
        return None
    trial = KernelTrial("linear_gelu", (module.proj.in_features, module.proj.out_features))
    return Layer("activation", (trial,), functools.partial(_gelu, module), 3, ("proj",))


def _gelu(module: Any, operators: Operators, x: Tensor) -> Tensor:
    return operators.linear_gelu(x, module.proj.weight, module.proj.bias)


# Layers of a running model share equal results computed from one tensor, until it is written to.


class _SharedValues(threading.local):
    """The values of this thread's running model, by the tensor that they are computed from; None outside of a model."""

    values: dict[Any, tuple[Any, int | None, Any]] | None = None


_RUNNING = _SharedValues()


def sharing_layer(module: Any) -> Layer:
    """Return the layer of a model whose layers share values."""
    return Layer(TIMESTEPS, (), functools.partial(_share, functools.partial(type(module).forward, module)))


def _share(original: Callable[..., Any], operators: Operators, *args: Any, **kwargs: Any) -> Any:
    before, _RUNNING.values = _RUNNING.values, {}
    try:
        return original(*args, **kwargs)
    finally:
        _RUNNING.values = before


def shared(layer: nn.Module, source: Any, key: Any, compute: Callable[[], Any]) -> Any:
    """Return a value computed from a tensor: computes it once in a call of a model, each time outside of a model.

    Args:
        layer: computes the value; does so again if it is hooked and gets an inference tensor, which does not count a
            hook's writes.
        source: the tensor.
        key: all else that the value depends on.
        compute: computes the value.
    """
    values = _RUNNING.values
    if values is None:
        return compute()
    version = source._version if isinstance(source, Tensor) and not source.is_inference() else None
    kept = values.get((id(source), key))
    if kept is None or kept[1] != version or (version is None and hooked(layer)):
        kept = source, version, compute()  # the tensor is kept, too, so that no other gets its id
        values[id(source), key] = kept
    return kept[2]


def _timesteps_layer(module: Any) -> Layer | None:
    if class_name(module.time_proj) != _TIMESTEPS:
        return None
    return Layer(TIMESTEPS, (), functools.partial(_timesteps, module))


def _timesteps(module: Any, operators: Operators, timestep: Any, class_labels: Any, hidden_dtype: Any = None) -> Any:
    """Run it so that the layers of a model share values that depend only on the timestep."""
    if hooked(module.time_proj) or class_name(module.time_proj) != _TIMESTEPS:
        raise AsWritten
    times, labels = _embed(module, timestep, class_labels, hidden_dtype)
    return times + labels


def _embed(module: Any, timestep: Any, class_labels: Any, dtype: Any) -> tuple[Any, Any]:
    """Embed timesteps and labels."""
    project = module.time_proj
    settings = project.num_channels, project.flip_sin_to_cos, project.downscale_freq_shift, project.scale
    projected = shared(module, timestep, (dtype, *settings), lambda: project(timestep).to(dtype=dtype))
    return module.timestep_embedder(projected), module.class_embedder(class_labels)


def _multihead_layer(module: Any) -> Layer | None:
    return Layer(ATTENTION, (), functools.partial(_multihead, module)) if _is_simple(module) else None


def _is_simple(module: Any) -> bool:
    usual = module.in_proj_weight is not None and module.bias_k is None and module.bias_v is None
    return usual and module.batch_first and not module.add_zero_attn


def _multihead(module: Any, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    """Run it on one input without masks; torch itself does not always choose its fused attention there."""
    others = (value for name, value in kwargs.items() if name not in ("need_weights", "average_attn_weights"))
    plain = (
        len(args) == 3
        and kwargs.get("need_weights") is False
        and all(value is None or value is False for value in others)
        and all(argument is args[0] for argument in args)
        and _is_simple(module)
        and is_plain(args[0], 3)
    )
    if not plain:
        raise AsWritten
    shape = (*args[0].shape[:2], module.num_heads, module.head_dim)
    product = F.linear(args[0], module.in_proj_weight, module.in_proj_bias)
    query, key, value = (part.view(shape).transpose(1, 2) for part in product.chunk(3, dim=-1))
    attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(args[0].shape)
    return F.linear(attended, module.out_proj.weight, module.out_proj.bias), None


def _attention_layer(module: Any) -> Layer | None:
    return Layer(ATTENTION, (), functools.partial(_attention, module)) if _is_usual(module) else None


def _is_usual(module: Any) -> bool:
    others = (module.spatial_norm, module.group_norm, module.norm_q, module.norm_k, module.norm_cross)
    kind = type(module.processor)
    return (
        all(part is None for part in others)
        and not module.residual_connection
        and class_name(module.processor) == _PROCESSOR
        and is_written(kind, kind.__call__)
    )


def _attention(
    module: Any,
    operators: Operators,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """Run the operators of its processor, without a division by one."""
    usual = _is_usual(module) and module.rescale_output_factor == 1
    if kwargs or attention_mask is not None or not usual or not is_plain(hidden_states, 3):
        raise AsWritten
    states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    parts = (module.to_q(hidden_states), module.to_k(states), module.to_v(states))
    query, key, value = (
        part.view(*part.shape[:2], module.heads, part.shape[-1] // module.heads).transpose(1, 2) for part in parts
    )
    attended = F.scaled_dot_product_attention(query, key, value)
    return module.to_out[1](module.to_out[0](attended.transpose(1, 2).reshape(*parts[0].shape)))


ATTENTION_CLASSES = {
    "diffusers.models.attention.BasicTransformerBlock": _block_layer,
    "diffusers.models.activations.GEGLU": _gated_layer,
    "diffusers.models.activations.GELU": _gelu_layer,
    _CONDITION: _timesteps_layer,
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel": sharing_layer,
    "diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel": sharing_layer,
    "torch.nn.modules.activation.MultiheadAttention": _multihead_layer,
    "diffusers.models.attention_processor.Attention": _attention_layer,
}
