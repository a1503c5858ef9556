"""Norms, and the sums before them: RMS norms that are written as seven or more operators, and layers with residuals.

The branches of such a layer are added to its input, and each sum goes into a norm: the layer's next one, or the first
one of the following layer. One kernel computes both; the norm's module returns that result when it is called with
exactly that sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import AsWritten, Layer, arguments_of, runs_as_written
from simplegraph.fused.layers.provable import plain_class
from simplegraph.fused.layers.recognition import Calls, Candidate, Candidates, Opaque, holds, same
from simplegraph.fused.torch_operators import DTYPES, KernelTrial, Operators, sample_numbers

_NORMED = "_simplegraph_normed"  # a sum's norm, among the sum's attributes


class Norm(NamedTuple):
    """The parameters of a norm.

    Attributes:
        eps: name of the attribute that is added to the variance; offset: number that is added to the weights.
        centered: True for a layer norm.
        settings: attributes that its forward reads, and their values, of which it was proven.
    """

    eps: str = "variance_epsilon"
    offset: float = 0.0
    centered: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    def normalize(self, operators: Operators, module: Any, x: Tensor) -> Tensor:
        """Run the norm."""
        weight, eps = module.weight, getattr(module, self.eps)
        if self.centered:
            return nn.functional.layer_norm(x, weight.shape, weight, module.bias, eps)
        return operators.rms_norm(x, weight, eps, self.offset)

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


_OWN = {nn.LayerNorm: Norm("eps", centered=True), nn.RMSNorm: Norm("eps")}
_RMS_NORMS = tuple(Norm(eps, offset) for eps in ("variance_epsilon", "eps") for offset in (0.0, 1.0))
# Names that an RMS norm of the user's own may read: none shows it rows, shapes, devices or training.
_RMS_WORDS = frozenset(
    (
        *("dtype", "eps", "float", "float32", "functional", "mean", "nn", "pow", "rms_norm", "rsqrt", "sqrt"),
        *("square", "to", "type_as", "variance_epsilon", "weight"),
    )
)
_GATED_WORDS = _RMS_WORDS | {"silu"}
_LAYER_WORDS = frozenset({"bias", "eps", "functional", "layer_norm", "nn", "normalized_shape", "weight"})


def gated_norms(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the norms of a model that first multiply by the SiLU of a gate, as Mamba2's do, to their layers."""
    candidates = Candidates()
    layers = {module: _gated_norm(module, candidates) for module in model.modules() if holds(module, "weight")}
    return {module: layer for module, layer in layers.items() if layer is not None}


def _gated_norm(module: Any, candidates: Candidates) -> Layer | None:
    candidate, columns = candidates.of(module, _GATED_WORDS), len(module.weight)
    if candidate is None or candidate.arguments != 2:
        return None
    size = candidate.settings.get("group_size", columns)
    eps = candidate.settings.get("variance_epsilon")
    if type(eps) is not float or type(size) is not int or size < 1 or columns % size:
        return None

    def agrees(candidate: Candidate, dtype: torch.dtype) -> bool:
        (x, gate), weight = _examples(dtype, columns, eps, 2), sample_numbers(dtype, columns, phase=5)
        expected = Operators().gated_rms_norm(x, gate, weight, eps, columns // size)
        return candidate.runs_to(expected, x, gate, weights={"weight": weight})

    if not candidate.proves(("gated_rms_norm", columns), agrees, *DTYPES):
        return None

    def run(operators: Operators, *args: Any, **kwargs: Any) -> Any:
        x, gate = args if len(args) == 2 and not kwargs else (None, None)
        if x is None or gate is None or not _fits(x, module.weight) or not _alike(x, gate):
            raise AsWritten
        return operators.gated_rms_norm(x, gate, module.weight, eps, columns // size)

    trials = (KernelTrial("gated_rms_norm", (columns,)),) * (size == columns)
    return Layer("rms_norm", trials, run, settings=candidate.settings)


def rms_norms(model: nn.Module) -> dict[nn.Module, Norm]:
    """Map the norms of a model that one kernel can replace to their parameters."""
    plain = (module for module in model.modules() if type(module) is not nn.RMSNorm and holds(module, "weight"))
    candidates = Candidates()
    norms = {module: _proven(candidates.of(module, _RMS_WORDS), *_RMS_NORMS) for module in plain}
    return {module: norm for module, norm in norms.items() if norm is not None}


def sum_norms(model: nn.Module, alone: Mapping[nn.Module, Norm]) -> dict[nn.Module, Norm]:
    """Map the norms of a model that one kernel can compute together with a sum, its `rms_norms` too, to parameters."""
    own = {module: _OWN[type(module)] for module in model.modules() if type(module) in _OWN and runs_as_written(module)}
    candidates = Candidates()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) and module not in own and holds(module, "weight", "bias"):
            norm = _proven(candidates.of(module, _LAYER_WORDS), Norm("eps", centered=True))
            own |= {} if norm is None else {module: norm}
    return {module: norm for module, norm in own.items() if _has_one_dimension(module)} | {**alone}


def _proven(candidate: Candidate | None, *norms: Norm) -> Norm | None:
    """Return the first of some norms that a module's forward is proven to compute; None if it computes none."""
    if candidate is None or candidate.arguments != 1:
        return None
    columns = len(candidate.module.weight)
    for norm in norms:
        eps = candidate.settings.get(norm.eps)
        agrees = functools.partial(_agrees, norm)
        if type(eps) is float and candidate.proves((norm, columns), agrees, *DTYPES):
            return norm._replace(settings=tuple(candidate.settings.items()))
    return None


def _agrees(norm: Norm, candidate: Candidate, dtype: torch.dtype) -> bool:
    columns, eps = len(candidate.module.weight), candidate.settings[norm.eps]
    weights = {"weight": sample_numbers(dtype, columns, phase=5)}
    weights |= {"bias": sample_numbers(dtype, columns, phase=6)} if norm.centered else {}
    standing: Any = SimpleNamespace(**{"bias": None, norm.eps: eps, **weights})
    (x,) = _examples(dtype, columns, eps, 1)
    # A mean over another dimension is one over the last in some shape only.
    for shaped in (x.flatten(0, 1), x, x.unsqueeze(1)):
        before = shaped.clone()
        expected = norm.normalize(Operators(), standing, shaped)
        if not candidate.runs_to(expected, shaped, weights=weights) or not torch.equal(shaped, before):
            return False
    return True


def _examples(dtype: torch.dtype, columns: int, eps: float, count: int) -> list[Tensor]:
    """Make inputs of a norm: rows as small as the root of `eps`, to see where that is added, of 1, and large ones."""
    sizes = torch.tensor([max(eps, 1e-12) ** 0.5, 1.0, 300.0])[:, None]
    plain = (sample_numbers(torch.float32, 2, 3, columns, phase=phase + columns) for phase in range(count))
    return [(numbers * sizes).to(dtype) for numbers in plain]


def _has_one_dimension(module: Any) -> bool:
    return len(module.normalized_shape) == 1 and module.weight is not None and module.eps is not None


def norm_layer(module: Any, norm: Norm, *, alone: bool) -> Layer:
    """Return the layer of a norm, which hands out the result of a sum; `alone` if operators run the norm otherwise."""
    kind, trials = ("rms_norm", (norm.trial(module, added=False),)) if alone else ("residual", ())
    run = functools.partial(_normalize, module, norm, alone)
    return Layer(kind, trials, run, settings=dict(norm.settings))


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
    """Return the norm that was computed with a sum, if it is this module's and the sum was not written to since."""
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
    """True if another value is a tensor of the same shape, dtype and device."""
    return type(other) is Tensor and (other.shape, other.dtype, other.device) == (x.shape, x.dtype, x.device)


def _fits_sum(residual: Any, x: Any, module: Any) -> bool:
    """True if the sum is of equal tensors without gradients, and its norm can be computed now."""
    tensors = (residual, x, module.weight, getattr(module, "bias", None))
    return (
        _fits(x, module.weight)
        and _alike(x, residual)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors if tensor is not None))
    )


AddFor = Callable[[Tensor, Tensor, Any], Tensor]  # residual, branch, the sum's norm: None for the following layer's
Branch = Callable[[Any, Any, dict[str, Any]], Any]  # from the layer, its normed input and other arguments by name
_LISTS = (nn.ModuleList, nn.Sequential)
# Names of the norm that follows a model's last layer; a wrong one costs computing an unused norm.
_LAST = ("norm", "ln", "final_layernorm", "final_layer_norm", "ln_f", "layernorm", "layer_norm", "post_layernorm")


class KnownResidual(NamedTuple):
    """A known layer.

    Attributes:
        run: computes the layer by an `AddFor`, from the module, its input and its other arguments by name.
        first: name of the norm that reads the layer's input; "" if none does.
        norms: names of the norms of the layer's own sums.
        parts: names of its other parts -> how many results each has in a tuple; 1 for one without a tuple.
        takes: True for an input and other arguments that `run` can compute with.
        added: names of other arguments that are added to something.
    """

    run: Callable[[Any, Any, dict[str, Any], AddFor], Any]
    first: str
    norms: tuple[str, ...]
    parts: Mapping[str, int]
    takes: Callable[[Any, dict[str, Any]], bool] = lambda hidden, given: True
    added: tuple[str, ...] = ()

    def fits(self, module: nn.Module) -> bool:
        """True if a module has the parts, and maybe others."""
        return {*self.norms, *self.parts, *filter(None, [self.first])} <= module._modules.keys()


def _branches(parts: Mapping[str, int], *branches: tuple[str, Branch], **options: Any) -> KnownResidual:
    """Describe a layer of branches one after the other, each behind a norm of that name."""
    first, *norms = [name for name, _ in branches]
    return KnownResidual(functools.partial(_run_branches, branches), first, tuple(norms), parts, **options)


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


_ATTENDING = {"self_attn": 2, "mlp": 1}
# Layers by how they call their parts, each for some families of models; the first one that is proven counts.
KNOWN_RESIDUALS = (
    # Llama and most decoders after it.
    _branches(_ATTENDING, ("input_layernorm", _attend), ("post_attention_layernorm", _perceive)),
    # Gemma 2.
    _branches(
        _ATTENDING | {"post_attention_layernorm": 1, "post_feedforward_layernorm": 1},
        ("input_layernorm", lambda self, *given: self.post_attention_layernorm(_attend(self, *given))),
        ("pre_feedforward_layernorm", lambda self, x, given: self.post_feedforward_layernorm(self.mlp(x))),
    ),
    # CLIP.
    _branches(_ATTENDING, ("layer_norm1", _attend), ("layer_norm2", _perceive)),
    # ViT.
    _branches(
        {"attention": 2, "mlp": 1, "dropout": 1},
        ("layernorm_before", _attend_vit),
        ("layernorm_after", lambda self, x, given: self.dropout(self.mlp(x))),
    ),
    # BERT, after attention and after the perceptron.
    KnownResidual(_run_bert, "", ("LayerNorm",), {"dense": 1, "dropout": 1}, added=("input_tensor",)),
    # Whisper's decoder.
    KnownResidual(
        _run_whisper,
        "self_attn_layer_norm",
        ("encoder_attn_layer_norm", "final_layer_norm"),
        {"self_attn": 2, "encoder_attn": 2, "activation_fn": 1, "fc1": 1, "fc2": 1},
    ),
    # T5.
    _branches(
        {"DenseReluDense": 1, "dropout": 1},
        ("layer_norm", lambda self, x, given: self.dropout(self.DenseReluDense(x))),
    ),
    KnownResidual(functools.partial(_run_t5, "SelfAttention"), "layer_norm", (), {"SelfAttention": 3, "dropout": 1}),
    KnownResidual(
        functools.partial(_run_t5, "EncDecAttention"), "layer_norm", (), {"EncDecAttention": 3, "dropout": 1}
    ),
    # GPT-2.
    _branches(
        {"attn": 2, "mlp": 1},
        ("ln_1", _attend_gpt2),
        ("ln_2", _perceive),
        takes=lambda hidden, given: given["encoder_hidden_states"] is None,
    ),
    # timm's vision transformers.
    _branches(
        dict.fromkeys(("attn", "ls1", "drop_path1", "mlp", "ls2", "drop_path2"), 1),
        ("norm1", lambda self, x, given: self.drop_path1(self.ls1(self.attn(x, **given)))),
        ("norm2", lambda self, x, given: self.drop_path2(self.ls2(self.mlp(x)))),
    ),
    # torchvision's.
    _branches(
        {"self_attention": 2, "dropout": 1, "mlp": 1},
        ("ln_1", lambda self, x, given: self.dropout(self.self_attention(x, x, x, need_weights=False)[0])),
        ("ln_2", _perceive),
        takes=lambda hidden, given: hidden.dim() == 3,
    ),
)
_SUMS = frozenset({"add", "alias", "detach", "dropout"})  # of a layer beside its parts, outside of training


def _proven_layers(model: nn.Module) -> dict[nn.Module, tuple[KnownResidual, Mapping[str, Any]]]:
    """Map modules that call their parts as a known layer does to that layer, and to the settings that they read."""
    layers: dict[nn.Module, tuple[KnownResidual, Mapping[str, Any]]] = {}
    candidates = Candidates()
    for module in model.modules():
        several = len(module._modules) > 1
        fitting = [at for at, form in enumerate(KNOWN_RESIDUALS) if several and form.fits(module)]
        candidate = candidates.of(module, module._modules) if fitting else None
        for at in fitting:
            form = KNOWN_RESIDUALS[at]
            question = "residual", at, tuple(name for name, part in module._modules.items() if part is not None)
            agrees = functools.partial(_calls_alike, form)
            if candidate is not None and candidate.proves(question, agrees, torch.float64, *DTYPES):
                layers.setdefault(module, (form, candidate.settings))
    return layers


def _calls_alike(form: KnownResidual, candidate: Candidate, dtype: torch.dtype) -> bool:
    """True if a module calls its parts as a known layer does, for any arguments, and adds up the same."""
    module, taken = candidate.module, 0
    signature = inspect.signature(plain_class(module).forward)
    hidden, names = sample_numbers(dtype, 2, 3, 8), [name for name, part in module._modules.items() if part is not None]
    # A layer whose code depends on the dtype does not also depend on the arguments.
    examples = list(_given(signature, form, hidden))[: None if dtype is torch.float64 else 2]
    for given in examples:
        calls, expected_calls = (Calls(names, hidden, form.parts) for _ in range(2))
        _, others = _arguments(signature, module, hidden, **given)
        if form.takes(hidden, others):
            own, operators = candidate.run(hidden, parts=calls.parts, **given)
            standing = candidate.stand_in(parts=expected_calls.parts)
            expected = form.run(standing, hidden, others, lambda residual, branch, norm: residual + branch)
            if not (same(own, expected) and calls.same(expected_calls) and _SUMS.issuperset(operators)):
                return False
            taken += 1
    return taken > 0


def _given(signature: inspect.Signature, form: KnownResidual, hidden: Tensor) -> Iterator[dict[str, Any]]:
    """Make the arguments of calls: the required ones with all optional ones, each one alone, all but one, and none."""
    _, _, *parameters = signature.parameters.values()
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    every: dict[str, Any] = {
        parameter.name: 2 * hidden if parameter.name in form.added else Opaque() for parameter in named
    }
    every |= {"another": Opaque()} if len(named) < len(parameters) else {}
    optional = [parameter.name for parameter in named if parameter.default is None]
    choices = [{*optional}, set(), *({name} for name in optional), *({*optional} - {name} for name in optional)]
    for absent in choices:
        yield {name: value for name, value in every.items() if name not in absent}


def residual_layers(
    model: nn.Module, norms: Mapping[nn.Module, Norm]
) -> tuple[dict[nn.Module, Layer], dict[nn.Module, Norm]]:
    """Map the layers of a model with sums that go into these norms to their layers; return the norms of sums, too."""
    recognized = _proven_layers(model)
    following: dict[nn.Module, nn.Module | None] = {}
    _follow(model, None, recognized, following)
    layers: dict[nn.Module, Layer] = {}
    behind: dict[nn.Module, Norm] = {}
    for module, (form, settings) in recognized.items():
        after = following.get(module)
        targets = [target for name in form.norms if isinstance(target := getattr(module, name, None), nn.Module)]
        own = {target: norms[target] for target in (*targets, after) if target is not None and target in norms}
        if own:
            trials = tuple(norm.trial(target, added=True) for target, norm in own.items())
            following_norm = after if after in own else None
            signature = inspect.signature(type(module).forward)
            run = functools.partial(_run, module, form, following_norm, own, signature)
            layers[module] = Layer("residual", trials, run, settings=settings)
            behind |= own
    return layers, behind


def _follow(
    owner: nn.Module,
    after: nn.Module | None,
    recognized: Mapping[nn.Module, tuple[KnownResidual, Any]],
    following: dict[nn.Module, nn.Module | None],
) -> None:
    """Find the norm that reads each known layer's output: the next layer's first one, or the model's last."""
    after = next((last for name in _LAST if (last := owner._modules.get(name)) is not None), after)
    for child in owner.children():
        listed = list(child) if isinstance(child, _LISTS) else [child]
        firsts = [*(_first(layer, recognized) for layer in listed[1:]), after]
        for layer, norm in zip(listed, firsts, strict=False):  # a list can be empty
            if layer in recognized:
                following.setdefault(layer, norm)
            else:
                _follow(layer, norm, recognized, following)


def _first(module: nn.Module, recognized: Mapping[nn.Module, tuple[KnownResidual, Any]]) -> nn.Module | None:
    """Return the norm that reads a layer's input."""
    if module in recognized:
        return getattr(module, recognized[module][0].first, None)
    lists = [list(child) for child in module.children() if isinstance(child, _LISTS)]
    return _first(lists[0][0], recognized) if len(lists) == 1 and lists[0] else None


def _run(
    module: nn.Module,
    form: KnownResidual,
    after: nn.Module | None,
    norms: dict[nn.Module, Norm],
    signature: inspect.Signature,
    operators: Operators,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Passed by callers from before transformers 5.24; a decorator gives the cache its present name.
    renamed = "past_key_values" in kwargs and "past_key_values" not in signature.parameters
    if renamed or (module.training and getattr(module, "gradient_checkpointing", False)):
        raise AsWritten
    hidden, given = _arguments(signature, module, *args, **kwargs)
    if not form.takes(hidden, given):
        raise AsWritten

    def add_for(residual: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
        return add(operators, norms, residual, branch, after if norm is None else norm)

    return form.run(module, hidden, given, add_for)


def _arguments(signature: inspect.Signature, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return a layer's input, and its other arguments by name."""
    (_, (_, hidden), *others) = arguments_of(signature, module, *args, **kwargs).items()
    given = dict(others)
    return hidden, given | given.pop("kwargs", {})
