"""Runs the projections of an attention that read the same input as one product.

Their weights keep their names, shapes and values, and come to lie one after the other in one memory: all of them are a
weight, too, which is written whenever they are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.modes import outside_modes
from simplegraph.fused.layers.classes import class_name
from simplegraph.fused.layers.written import hooked, plain_class
from simplegraph.fused.optimizing.layout import has_own_memory, tied_memories
from simplegraph.fused.optimizing.pairs import shared_modules
from simplegraph.fused.optimizing.table import full_name, runs_own_forward

JOINED = "_simplegraph_joined"
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


class Joined:
    """The names of an attention's projections that lie together; copies and pickles have none.

    Attributes:
        names: of the projections.
        memories: the address and bytes of each memory in which their weights, or their biases, were placed.
    """

    __slots__ = ("memories", "names")

    def __init__(self, names: Sequence[str], memories: Iterable[tuple[int, int]]) -> None:
        self.names, self.memories = tuple(names), frozenset(memories)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Joint:
    """The projections of one attention in one forward, which hand out parts of one product."""

    __slots__ = ("_parts", "_projections", "_version", "_x")

    def __init__(self, projections: Sequence[Any]) -> None:
        self._projections = projections
        self._parts: dict[int, Tensor] = {}
        self._x: Any = None
        self._version: int | None = None

    def project(self, module: Any, x: Any) -> Tensor | None:
        """Return a projection of an input; None if it has to be computed by itself."""
        if module is self._projections[0]:
            product = _product(self._projections, x)
            if product is None:
                return None
            sizes = [len(each.weight) for each in self._projections]
            parts = torch.split(product, sizes, dim=-1)
            self._parts = dict(zip(map(id, self._projections), parts, strict=True))
            self._x, self._version = x, _version(x)
        same = x is self._x and _version(x) == self._version
        return self._parts.pop(id(module), None) if same else None


def _version(x: Any) -> int | None:
    return None if x.is_inference() else x._version


def _product(projections: Sequence[Any], x: Any) -> Tensor | None:
    """Compute all projections at once; None if their weights do not lie together any more, or gradients are wanted."""
    weights, biases = [each.weight for each in projections], [each.bias for each in projections]
    if type(x) is not Tensor or x.dtype is not weights[0].dtype or torch.is_autocast_enabled(x.device.type):
        return None
    given = (x, *weights, *(each for each in biases if each is not None))
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        return None
    biased = any(each is not None for each in biases)
    if any((each is None) == biased for each in biases):
        return None
    weight, bias = _whole(weights), _whole(biases) if biased else None
    if weight is None or (bias is None) == biased:
        return None
    return nn.functional.linear(x, weight, bias)


def _whole(parts: Sequence[Any]) -> Tensor | None:
    """Return tensors that lie one after the other as one; None if they do not."""
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


class _RunningAttention(threading.local):
    """The projections of this thread's running attention, by their ids."""

    joints: Mapping[int, _Joint] = MappingProxyType({})


_RUNNING = _RunningAttention()


def forward_attention(original: Callable[..., Any], plain: Callable[[], bool]) -> Callable[..., Any]:
    """Make the forward of an attention whose projections are joined; `plain` says that none may be."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        joined: Joined | None = vars(self).get(JOINED)
        if joined is None or self.training or plain() or not _has_known_processor(self):
            return original(self, *args, **kwargs)
        projections = [self._modules.get(name) for name in joined.names]
        if not all(map(_is_linear, projections)):
            return original(self, *args, **kwargs)
        before, joint = _RUNNING.joints, _Joint(projections)
        _RUNNING.joints = {id(each): joint for each in projections}
        try:
            return original(self, *args, **kwargs)
        finally:
            _RUNNING.joints = before

    return forward


def forward_projection(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the forward of one of its projections."""

    @functools.wraps(original)
    def forward(self: Any, input: Any) -> Any:
        joint = _RUNNING.joints.get(id(self))
        found = None if joint is None else joint.project(self, input)
        return original(self, input) if found is None else found

    return forward


def _is_linear(module: Any) -> bool:
    return plain_class(module) is nn.Linear and not hooked(module)


def find_joined(root: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yield attentions of known classes, and the names of their projections that can be joined."""
    shared, tied = shared_modules(root), tied_memories(root)
    for module in root.modules():
        names = _KNOWN.get(full_name(module), ())
        if not names or not runs_own_forward(module) or not _has_known_processor(module):
            continue
        if getattr(module, "is_cross_attention", False):  # queries read another input
            names = names[1:]
        projections = [module._modules.get(name) for name in names]
        if not _can_be_joined(projections) or any(id(each) in shared for each in projections):
            continue
        tensors = (tensor for each in projections for tensor in each.parameters())  # type: ignore[union-attr]
        if not any(tensor.untyped_storage().data_ptr() in tied for tensor in tensors):
            yield module, names


def _has_known_processor(module: Any) -> bool:
    processor = getattr(module, "processor", None)
    return processor is None or class_name(processor) in _PROCESSORS


def _can_be_joined(projections: Sequence[Any]) -> bool:
    if not all(map(_is_linear, projections)):
        return False
    first = projections[0]
    kinds = {(each.in_features, each.bias is None, each.weight.dtype, each.weight.device) for each in projections}
    tensors = [tensor for each in projections for tensor in each.parameters(recurse=False)]
    return first.weight.is_floating_point() and len(kinds) == 1 and all(map(_is_whole, tensors))


def _is_whole(tensor: Tensor) -> bool:
    return has_own_memory(tensor) and tensor.is_contiguous()


def place_together(attention: nn.Module, names: Sequence[str]) -> Joined:
    """Place the weights of projections, and their biases, one after the other."""
    projections: list[Any] = [attention._modules[name] for name in names]
    alike = list(zip(*(each.parameters(recurse=False) for each in projections), strict=True))
    with outside_modes():
        memories = [torch.cat([part.data for part in parts]) for parts in alike]
        for memory, parts in zip(memories, alike, strict=True):
            for part, rows in zip(parts, torch.split(memory, [len(part) for part in parts]), strict=True):
                part.data = rows
    return Joined(names, map(_memory, memories))


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def place_apart(root: nn.Module) -> None:
    """Give weights that were placed together, and still are there, memory of their own."""
    for module in root.modules():
        joined: Joined | None = vars(module).pop(JOINED, None)
        for name in joined.names if joined is not None else ():
            projection = module._modules.get(name)
            for part in () if projection is None else projection.parameters():
                if joined is not None and type(part) is nn.Parameter and _memory(part) in joined.memories:
                    with outside_modes():
                        part.data = part.data.clone()
