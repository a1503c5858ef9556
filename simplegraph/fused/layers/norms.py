"""Norms, and the sums before them: RMS norms that are written as seven or more operators, and layers with residuals.

The branches of such a layer are added to its input, and each sum goes into a norm: the layer's next one, or the first
one of the layer that follows. One kernel computes both, and the norm's module hands out what was computed when it is
called with exactly that sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import AsWritten, Layer, arguments_of, runs_as_written
from simplegraph.fused.layers.texts import known_name, recognize, undecorated
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


def gated_norms(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the norms of a model that multiply by the SiLU of a gate before, as Mamba2's do, to their layers."""
    found: dict[Any, bool] = recognize(model, {"MambaRMSNormGated.forward": True})
    one_dimension = (module for module in found if isinstance(module.weight, Tensor) and module.weight.dim() == 1)
    return {module: _gated_norm(module, len(module.weight)) for module in one_dimension}


def _gated_norm(module: Any, columns: int) -> Layer:
    grouped = "group_size" in undecorated(type(module).forward).__code__.co_names  # since transformers 5.23

    def run(operators: Operators, *args: Any, **kwargs: Any) -> Any:
        x, gate = args if len(args) == 2 and not kwargs else (None, None)
        if x is None or gate is None or not _fits(x, module.weight) or not _alike(x, gate):
            raise AsWritten
        size, eps = module.group_size if grouped else x.shape[-1], module.variance_epsilon
        if type(size) is not int or size < 1 or x.shape[-1] % size or type(eps) is not float:
            raise AsWritten
        return operators.gated_rms_norm(x, gate, module.weight, eps, x.shape[-1] // size)

    in_one_group = not grouped or getattr(module, "group_size", None) == columns
    return Layer("rms_norm", (KernelTrial("gated_rms_norm", (columns,)),) * in_one_group, run)


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
    known = not norm.offset or known_name(getattr(type(module), "_norm", None)) == "GemmaRMSNorm._norm"
    return known and "_norm" not in vars(module)


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
    return (
        type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and (x.dtype, x.device) == (weight.dtype, weight.device)
        and x.shape[-1:] == weight.shape
        and x.dtype is not torch.float64
        and not torch.is_autocast_enabled(x.device.type)
    )


def _alike(x: Tensor, other: Any) -> bool:
    """True if another value is a tensor that looks the same."""
    return type(other) is Tensor and (other.shape, other.dtype, other.device) == (x.shape, x.dtype, x.device)


def _fits_sum(residual: Any, x: Any, module: Any) -> bool:
    """True if the sum is of equal tensors without gradients, and its norm can be computed now."""
    tensors = (residual, x, module.weight, getattr(module, "bias", None))
    return (
        _fits(x, module.weight)
        and _alike(x, residual)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors if each is not None))
    )


AddFor = Callable[[Tensor, Tensor, Any], Tensor]  # residual, branch, the sum's norm: None for the following layer's
Branch = Callable[[Any, Any, dict[str, Any]], Any]  # from the layer, its normed input and other arguments by name
_LISTS = (nn.ModuleList, nn.Sequential)
# Names of the norm that follows a model's last layer; a wrong one costs a norm that nobody asks for.
_LAST = ("norm", "ln", "final_layernorm", "final_layer_norm", "ln_f", "layernorm", "layer_norm", "post_layernorm")


class KnownResidual(NamedTuple):
    """A known layer.

    Attributes:
        run: computes the layer by an `AddFor`, from the module, its input and its other arguments by name.
        first: name of the norm that reads the layer's input; "" if none does.
        norms: names of the norms of the layer's own sums.
        takes: tells from the input and the other arguments if it is known how to compute with these.
    """

    run: Callable[[Any, Any, dict[str, Any], AddFor], Any]
    first: str
    norms: tuple[str, ...]
    takes: Callable[[Any, dict[str, Any]], bool] = lambda hidden, given: True


def _branches(*branches: tuple[str, Branch], **known: Any) -> KnownResidual:
    """Describe a layer of branches one after the other, each behind a norm of that name."""
    first, *norms = [name for name, _ in branches]
    return KnownResidual(functools.partial(_run_branches, branches), first, tuple(norms), **known)


def _run_branches(
    branches: tuple[tuple[str, Branch], ...], self: Any, hidden: Any, given: dict[str, Any], add: AddFor
) -> Any:
    norms = [*(getattr(self, name) for name, _ in branches), None]
    for (_, run), norm, following in zip(branches, norms, norms[1:], strict=False):
        hidden = add(hidden, run(self, norm(hidden), given), following)
    return hidden


def _attend(self: Any, x: Any, given: dict[str, Any]) -> Any:
    attended, _ = self.self_attn(hidden_states=x, **given)
    return attended


def _perceive(self: Any, x: Any, given: dict[str, Any]) -> Any:
    return self.mlp(x)


def _attend_vit(self: Any, x: Any, given: dict[str, Any]) -> Any:
    mask = given.pop("attention_mask")
    attended, _ = self.attention(x, mask, **given)
    return self.dropout(attended)


def _attend_gpt2(self: Any, x: Any, given: dict[str, Any]) -> Any:
    del given["encoder_hidden_states"], given["encoder_attention_mask"]
    attended, _ = self.attn(x, **given)
    return attended


def _run_bert(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    return self.LayerNorm(add(given["input_tensor"], self.dropout(self.dense(hidden)), self.LayerNorm))


def _run_whisper(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    encoded, encoded_mask = given.pop("encoder_hidden_states"), given.pop("encoder_attention_mask")
    mask = given.pop("attention_mask")
    del given["use_cache"]

    def drop(states: Any, chance: float) -> Any:
        return nn.functional.dropout(states, p=chance, training=self.training)

    attended, _ = self.self_attn(self.self_attn_layer_norm(hidden), attention_mask=mask, **given)
    crossed = encoded is not None
    norm = self.encoder_attn_layer_norm if crossed else self.final_layer_norm
    hidden = add(hidden, drop(attended, self.dropout), norm)
    if crossed:
        attended, _ = self.encoder_attn(norm(hidden), key_value_states=encoded, attention_mask=encoded_mask, **given)
        hidden = add(hidden, drop(attended, self.dropout), self.final_layer_norm)
    inner = drop(self.activation_fn(self.fc1(self.final_layer_norm(hidden))), self.activation_dropout)
    return add(hidden, drop(self.fc2(inner), self.dropout), None)


def _run_t5(name: str, self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    mask = given.pop("attention_mask")
    attended, *rest = getattr(self, name)(self.layer_norm(hidden), mask=mask, **given)
    return add(hidden, self.dropout(attended), None), *rest


KNOWN_RESIDUALS = {
    "LlamaDecoderLayer.forward": _branches(("input_layernorm", _attend), ("post_attention_layernorm", _perceive)),
    "MixtralDecoderLayer.forward": _branches(("input_layernorm", _attend), ("post_attention_layernorm", _perceive)),
    "Gemma2DecoderLayer.forward": _branches(
        ("input_layernorm", lambda self, *given: self.post_attention_layernorm(_attend(self, *given))),
        ("pre_feedforward_layernorm", lambda self, x, given: self.post_feedforward_layernorm(self.mlp(x))),
    ),
    "CLIPEncoderLayer.forward": _branches(("layer_norm1", _attend), ("layer_norm2", _perceive)),
    "ViTLayer.forward": _branches(
        ("layernorm_before", _attend_vit), ("layernorm_after", lambda self, x, given: self.dropout(self.mlp(x)))
    ),
    "BertSelfOutput.forward": KnownResidual(_run_bert, "", ("LayerNorm",)),
    "WhisperDecoderLayer.forward": KnownResidual(
        _run_whisper, "self_attn_layer_norm", ("encoder_attn_layer_norm", "final_layer_norm")
    ),
    "T5LayerFF.forward": _branches(
        ("layer_norm", lambda self, x, given: self.dropout(self.DenseReluDense(x))),
    ),
    "T5LayerSelfAttention.forward": KnownResidual(functools.partial(_run_t5, "SelfAttention"), "layer_norm", ()),
    "T5LayerCrossAttention.forward": KnownResidual(functools.partial(_run_t5, "EncDecAttention"), "layer_norm", ()),
    "GPT2Block.forward": _branches(
        ("ln_1", _attend_gpt2),
        ("ln_2", _perceive),
        takes=lambda hidden, given: given["encoder_hidden_states"] is None,
    ),
    "Block.forward": _branches(
        ("norm1", lambda self, x, given: self.drop_path1(self.ls1(self.attn(x, **given)))),
        ("norm2", lambda self, x, given: self.drop_path2(self.ls2(self.mlp(x)))),
    ),
    "EncoderBlock.forward": _branches(
        ("ln_1", lambda self, x, given: self.dropout(self.self_attention(x, x, x, need_weights=False)[0])),
        ("ln_2", _perceive),
        takes=lambda hidden, given: hidden.dim() == 3,
    ),
}


def residual_layers(
    model: nn.Module, norms: Mapping[nn.Module, Norm]
) -> tuple[dict[nn.Module, Layer], dict[nn.Module, Norm]]:
    """Map the layers of a model with sums that go into these norms to their layers; return the norms of sums, too."""
    known = recognize(model, KNOWN_RESIDUALS)
    following: dict[nn.Module, nn.Module | None] = {}
    _follow(model, None, known, following)
    layers: dict[nn.Module, Layer] = {}
    behind: dict[nn.Module, Norm] = {}
    for module, text in known.items():
        after = following.get(module)
        targets = [each for name in text.norms if isinstance(each := getattr(module, name, None), nn.Module)]
        own = {each: norms[each] for each in (*targets, after) if each is not None and each in norms}
        if own:
            trials = tuple(norm.trial(each, added=True) for each, norm in own.items())
            following_norm = after if after in own else None
            signature = inspect.signature(type(module).forward)
            run = functools.partial(_run, module, text, following_norm, own, signature)
            layers[module] = Layer("residual", trials, run)
            behind |= own
    return layers, behind


def _follow(
    owner: nn.Module,
    after: nn.Module | None,
    known: Mapping[nn.Module, KnownResidual],
    following: dict[nn.Module, nn.Module | None],
) -> None:
    """Find the norm that reads each known layer's output: the next layer's first one, or the model's last."""
    after = next((last for name in _LAST if (last := owner._modules.get(name)) is not None), after)
    for child in owner.children():
        listed = list(child) if isinstance(child, _LISTS) else [child]
        firsts = [*(_first(each, known) for each in listed[1:]), after]
        for each, norm in zip(listed, firsts, strict=False):  # a list can be empty
            if each in known:
                following.setdefault(each, norm)
            else:
                _follow(each, norm, known, following)


def _first(module: nn.Module, known: Mapping[nn.Module, KnownResidual]) -> nn.Module | None:
    """Return the norm that reads a layer's input."""
    if module in known:
        return getattr(module, known[module].first, None)
    lists = [list(child) for child in module.children() if isinstance(child, _LISTS)]
    return _first(lists[0][0], known) if len(lists) == 1 and lists[0] else None


def _run(
    module: nn.Module,
    text: KnownResidual,
    after: nn.Module | None,
    norms: dict[nn.Module, Norm],
    signature: inspect.Signature,
    operators: Operators,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # By a caller from before transformers 5.24, whose decorator gives the cache its present name.
    renamed = "past_key_values" in kwargs and "past_key_values" not in signature.parameters
    if renamed or (module.training and getattr(module, "gradient_checkpointing", False)):
        raise AsWritten
    (_, (_, hidden), *others) = arguments_of(signature, module, *args, **kwargs).items()
    given = dict(others)
    given |= given.pop("kwargs", {})
    if not text.takes(hidden, given):
        raise AsWritten

    def add_for(residual: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
        return add(operators, norms, residual, branch, after if norm is None else norm)

    return text.run(module, hidden, given, add_for)
