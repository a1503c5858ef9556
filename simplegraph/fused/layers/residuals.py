"""Layers whose branches are added to their input, with norms before the branches or behind the sums.

Each sum goes into a norm: the layer's next one, or the first one of the layer that follows. One kernel computes both,
and the norm's module hands out what was computed when it is called with exactly that sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from simplegraph.fused.layers.known_residuals import KNOWN_RESIDUALS, KnownResidual
from simplegraph.fused.layers.layer import Forward, Layer, arguments_of
from simplegraph.fused.layers.norms import Norm, add
from simplegraph.fused.layers.texts import recognize
from simplegraph.fused.torch_operators import Operators

_LISTS = (nn.ModuleList, nn.Sequential)
# Names of the norm that follows a model's last layer; a wrong one costs a norm that nobody asks for.
_LAST = ("norm", "ln", "final_layernorm", "final_layer_norm", "ln_f", "layernorm", "layer_norm", "post_layernorm")


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
    original: Forward,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Since transformers 5.24 a wrapper of the forward gives a cache that is passed by its old name the present one.
    renamed = "past_key_values" in kwargs and "past_key_values" not in signature.parameters
    if renamed or (module.training and getattr(module, "gradient_checkpointing", False)):
        return original(*args, **kwargs)
    (_, (_, hidden), *others) = arguments_of(signature, module, *args, **kwargs).items()
    given = dict(others)
    given |= given.pop("kwargs", {})

    def add_for(residual: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
        return add(operators, norms, residual, branch, after if norm is None else norm)

    result = text.run(module, hidden, given, add_for)
    return original(*args, **kwargs) if result is NotImplemented else result
