"""Changes how weights lie in memory: those of 2-d convolutions in channels_last, those of projections together.

Convolutions then need not transpose images, and the projections of an attention that read the same input run as one
product. Weights of projections keep their names, shapes and values, but lie one after the other in one memory: together
they are a weight, too, which is written whenever they are.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.modes import outside_modes
from simplegraph.fused.layers.layer import AsWritten, Layer, class_name, hooked, runs_own_forward
from simplegraph.fused.layers.linears import Together
from simplegraph.fused.layers.provable import plain_class
from simplegraph.fused.optimizing.pairs import PROJECTIONS, shared_modules
from simplegraph.fused.torch_operators import Operators

_MARK = "_simplegraph_was_contiguous"
_PLACED = "_simplegraph_placed"  # the address and bytes of each memory that a projection's tensors were placed in
_BERT = ("query", "key", "value")
_DIFFUSERS = "diffusers.models.attention_processor."
_PROCESSORS = frozenset({f"{_DIFFUSERS}AttnProcessor2_0", f"{_DIFFUSERS}AttnProcessor"})
# Nothing writes to their input between the projections' calls.
_KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "transformers.models.bert.modeling_bert.BertSelfAttention": _BERT,
        "transformers.models.roberta.modeling_roberta.RobertaSelfAttention": _BERT,
        "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaSelfAttention": _BERT,
        "transformers.models.electra.modeling_electra.ElectraSelfAttention": _BERT,
        f"{_DIFFUSERS}Attention": ("to_q", "to_k", "to_v"),
    }
)


def store_channels_last(root: nn.Module, folded: Collection[nn.Module]) -> list[str]:
    """Store weights in channels_last, in place.

    A convolution with such a weight converts its input, and its output has that format: images are converted once,
    before the first convolution.

    Args:
        root: the module.
        folded: layers that have such weights already.

    Returns:
        The names of the convolutions whose weights were changed.
    """
    names, tied = [], tied_memories(root)
    for name, module in root.named_modules():
        weight: Any = module.weight if type(module) is nn.Conv2d and module not in folded else None
        if _can_be_stored(weight) and _memory(weight) not in tied:
            with outside_modes():
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
            vars(module)[_MARK] = True
            names.append(name)
    return names


def _can_be_stored(weight: Any) -> bool:
    return (
        has_own_memory(weight)
        and weight.is_floating_point()
        and weight.is_contiguous()
        and not weight.is_contiguous(memory_format=torch.channels_last)
    )


def has_own_memory(weight: Any) -> bool:
    """True for a plain parameter alone in its memory, which is shared with no process: that would keep the old."""
    return (
        type(weight) is nn.Parameter
        and weight.layout is torch.strided
        and not weight.is_meta
        and not weight.is_inference()
        and weight.untyped_storage().nbytes() == weight.nbytes
        and not (weight.device.type == "cpu" and weight.untyped_storage().is_shared())
    )


def tied_memories(root: nn.Module) -> set[tuple[int, int]]:
    """Return the memory, as `_memory` does, that several parameters or buffers of a module lie in."""
    plain = (tensor for tensor in (*root.parameters(), *root.buffers()) if type(tensor) in (Tensor, nn.Parameter))
    places = collections.Counter(_memory(tensor) for tensor in plain if tensor.layout is torch.strided)
    return {place for place, count in places.items() if count > 1}


def join(attention: nn.Module, names: Sequence[str]) -> dict[nn.Module, Layer]:
    """Place the weights of an attention's projections together; return the layers that compute them as one product."""
    projections: list[Any] = [attention._modules[name] for name in names]
    _place_together(projections)
    together = Together(projections)
    return {
        projection: Layer(PROJECTIONS, (), functools.partial(_project, attention, projection, together))
        for projection in projections
    }


def _project(attention: nn.Module, projection: Any, together: Together, operators: Operators, input: Any) -> Any:
    as_found = all(map(_is_linear, together.layers)) and {*together.layers} <= {*attention._modules.values()}
    if attention.training or not as_found or not _has_known_processor(attention) or not isinstance(input, Tensor):
        raise AsWritten
    return together.compute(projection, input, _multiply)


def _multiply(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Compute linear layers as one product, or one by one if their weights no longer lie together."""
    given = (x, *weights, *(bias for bias in biases if bias is not None))
    biased = biases[0] is not None
    plain = (
        type(x) is Tensor
        and x.dtype is weights[0].dtype
        and not torch.is_autocast_enabled(x.device.type)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))
        and all((bias is not None) == biased for bias in biases)
    )
    weight, bias = (_whole(weights), _whole(biases) if biased else None) if plain else (None, None)
    if weight is None or (bias is None) == biased:
        return [nn.functional.linear(x, *pair) for pair in zip(weights, biases, strict=True)]
    return torch.split(nn.functional.linear(x, weight, bias), [len(weight) for weight in weights], dim=-1)


def _whole(parts: Sequence[Any]) -> Tensor | None:
    """Return tensors that lie one after the other as one tensor; None if they do not."""
    first, rows = parts[0], 0
    for part in parts:
        alike = type(part) is nn.Parameter and part.dtype is first.dtype and part.shape[1:] == first.shape[1:]
        if not alike or not part.is_contiguous() or part.device != first.device:
            return None
        if part.data_ptr() != first.data_ptr() + rows * first.stride(0) * first.itemsize:
            return None
        rows += len(part)
    if first.untyped_storage().nbytes() < (first.storage_offset() + rows * first.stride(0)) * first.itemsize:
        return None
    whole: Tensor = first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    return whole


def _is_linear(module: Any) -> bool:
    return plain_class(module) is nn.Linear and not hooked(module)


def find_joined(root: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yield attentions of known classes, and the names of their projections that can be joined."""
    shared, tied = shared_modules(root), tied_memories(root)
    for module in root.modules():
        names = _KNOWN.get(class_name(module), ())
        if not names or not runs_own_forward(module) or not _has_known_processor(module):
            continue
        if getattr(module, "is_cross_attention", False):  # queries read another input
            names = names[1:]
        projections = [module._modules.get(name) for name in names]
        if not _can_be_joined(projections) or any(id(projection) in shared for projection in projections):
            continue
        tensors = (tensor for projection in projections for tensor in projection.parameters())  # type: ignore[union-attr]
        if not any(_memory(tensor) in tied for tensor in tensors):
            yield module, names


def _has_known_processor(module: Any) -> bool:
    processor = getattr(module, "processor", None)
    return processor is None or class_name(processor) in _PROCESSORS


def _can_be_joined(projections: Sequence[Any]) -> bool:
    if not all(map(_is_linear, projections)):
        return False
    first = projections[0]
    kinds = {
        (projection.in_features, projection.bias is None, projection.weight.dtype, projection.weight.device)
        for projection in projections
    }
    tensors = [tensor for projection in projections for tensor in projection.parameters(recurse=False)]
    return first.weight.is_floating_point() and len(kinds) == 1 and all(map(_is_whole, tensors))


def _is_whole(tensor: Tensor) -> bool:
    return has_own_memory(tensor) and tensor.is_contiguous()


def _place_together(projections: Sequence[Any]) -> None:
    """Place the weights of projections, and their biases, one after the other."""
    alike = list(zip(*(projection.parameters(recurse=False) for projection in projections), strict=True))
    with outside_modes():
        memories = [torch.cat([part.data for part in parts]) for parts in alike]
        for memory, parts in zip(memories, alike, strict=True):
            for part, rows in zip(parts, torch.split(memory, [len(part) for part in parts]), strict=True):
                part.data = rows
    for projection in projections:
        vars(projection)[_PLACED] = tuple(map(_memory, memories))


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def restore_layout(root: nn.Module) -> None:
    """Store weights as before `store_channels_last`; give those that were placed together memory of their own."""
    with outside_modes():
        for module in root.modules():
            weight, memories = getattr(module, "weight", None), vars(module).pop(_PLACED, ())
            if vars(module).pop(_MARK, False) and isinstance(weight, nn.Parameter) and not weight.is_contiguous():
                weight.data = weight.data.contiguous()
            for part in module.parameters(recurse=False) if memories else ():
                if type(part) is nn.Parameter and _memory(part) in memories:  # it still lies there
                    part.data = part.data.clone()
