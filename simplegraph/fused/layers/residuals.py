"""Layers whose branches are added to their input, with norms before the branches or behind the sums.

Each sum goes into a norm: the layer's next one, or the first one of the layer that follows. One kernel computes both,
and the norm's module hands out what was computed when it is called with exactly that sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from simplegraph.fused.layers.layer import AsWritten, Layer, arguments_of
from simplegraph.fused.layers.norms import Norm, add
from simplegraph.fused.layers.texts import recognize
from simplegraph.fused.torch_operators import Operators

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
    if module.training and getattr(module, "gradient_checkpointing", False):
        raise AsWritten
    (_, (_, hidden), *others) = arguments_of(signature, module, *args, **kwargs).items()
    given = dict(others)
    given |= given.pop("kwargs", {})
    if not text.takes(hidden, given):
        raise AsWritten

    def add_for(residual: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
        return add(operators, norms, residual, branch, after if norm is None else norm)

    return text.run(module, hidden, given, add_for)
