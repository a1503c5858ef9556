"""Compares what a wrapped module does with what eager does: values, structure, layout, and what shares memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Other kernels may be chosen for other alignments and batch sizes: rounding, relative to the largest value.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
ROUNDING |= {torch.complex128: 1e-10, torch.complex64: 1e-4, torch.complex32: 1e-2}


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception that a call raised."""

    error: BaseException

    def __str__(self) -> str:
        return f"raised {type(self.error).__name__}: {str(self.error).splitlines()[:1]}"


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the exception it raises."""
    try:
        return call()
    except Exception as error:
        return Raised(error)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested lists, tuples, dicts and dataclasses, with the way to it."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def difference(
    actual: Any,
    expected: Any,
    *,
    values: bool = True,
    rounding: bool = True,
    coarsest: torch.dtype | None = None,
) -> str | None:
    """Say how a result differs from eager's in structure, type, layout or values; None if it does not.

    Args:
        values: False where eager's own values are undefined.
        rounding: False for values equal to the bit.
        coarsest: a dtype that intermediate results may have been rounded to.
    """
    if isinstance(expected, Raised) or isinstance(actual, Raised):
        alike = type(getattr(actual, "error", None)) is type(getattr(expected, "error", None))
        return None if alike else f"{_said(actual)}; eager {_said(expected)}"
    nested = type(actual), type(expected)
    if nested[0] is not nested[1] and not issubclass(nested[0], nested[1]):
        return f"is a {nested[0].__name__}, eager's a {nested[1].__name__}"
    mine, others = dict(leaves(actual)), dict(leaves(expected))
    if list(mine) != list(others):
        missing, more = [p for p in others if p not in mine], [p for p in mine if p not in others]
        return f"lacks {missing} and has {more} more, or in another order, than eager's"
    for path, other in others.items():
        found = _leaf_difference(mine[path], other)
        if found is None and values and isinstance(other, Tensor):
            found = value_difference(mine[path], other, rounding=rounding, coarsest=coarsest)
        if found is not None:
            return f"{path or 'the output'} {found}"
    return None


def _said(result: Any) -> str:
    return str(result) if isinstance(result, Raised) else f"returned a {type(result).__name__}"


def _leaf_difference(actual: Any, expected: Any) -> str | None:
    if type(actual) is not type(expected):
        return f"is a {type(actual).__name__}, eager's a {type(expected).__name__}"
    if not isinstance(expected, Tensor):
        same = actual is expected or actual == expected or (actual != actual and expected != expected)
        same = same or isinstance(expected, (nn.Module, torch.Generator, types.GeneratorType))
        return None if same else f"is {actual!r}, eager's {expected!r}"
    for name in ("shape", "dtype", "device", "layout", "requires_grad"):
        if getattr(actual, name) != getattr(expected, name):
            return f"has {name} {getattr(actual, name)}, eager's {getattr(expected, name)}"
    plain = expected.layout is torch.strided and not expected.is_nested
    if plain and _is_dense(expected) and _strides(actual) != _strides(expected):  # a copy of one with gaps has none
        return f"has strides {actual.stride()}, eager's {expected.stride()} for shape {tuple(expected.shape)}"
    return None


def _is_dense(tensor: Tensor) -> bool:
    """True if a tensor's elements lie one beside the other, in whatever order."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return all(stride == math.prod(size for _, size in dims[:index]) for index, (stride, _) in enumerate(dims))


def _strides(tensor: Tensor) -> list[int]:
    """Strides that mean something: those of dimensions with more than one element."""
    return [] if not tensor.numel() else [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def value_difference(
    actual: Tensor, expected: Tensor, *, rounding: bool = True, coarsest: torch.dtype | None = None
) -> str | None:
    """Say how values differ; a NaN equals a NaN."""
    if expected.is_nested or expected.is_quantized or expected.layout is not torch.strided:
        pairs = zip(_parts(actual), _parts(expected), strict=True)
        differences = (value_difference(*pair, rounding=rounding, coarsest=coarsest) for pair in pairs)
        return next(filter(None, differences), None)
    actual, expected = actual.detach().resolve_conj().resolve_neg(), expected.detach().resolve_conj().resolve_neg()
    if _same_bits(actual, expected):
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = actual.to(wide), expected.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (one - other).abs().nan_to_num(nan=float("inf"))).max().item()
    finite = other.abs()
    scale = torch.where(finite.isfinite(), finite, 0.0).max().item()
    allowed = ROUNDING.get(expected.dtype, 0.0)
    if allowed and coarsest is not None:
        allowed = max(allowed, ROUNDING[coarsest])
    if gap == 0.0 or (rounding and gap <= allowed * scale):
        return None
    return f"differs by up to {gap:.3g} (values up to {scale:.3g})"


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.dequantize()]
    return [tensor.to_dense()]


def _same_bits(actual: Tensor, expected: Tensor) -> bool:
    """True for equal bits, which NaNs may have that are not equal as numbers."""
    copies = (t.clone(memory_format=torch.contiguous_format) for t in (actual, expected))
    one, other = (copy.reshape(-1).view(torch.uint8) for copy in copies)
    return torch.equal(one, other)


def shared(values: Any, inputs: Any) -> dict[str, list[str]]:
    """List the leaves of a result that share memory with an input or an earlier leaf, and with which."""
    owners: dict[int, list[str]] = {}
    for path, leaf in leaves(inputs):
        if (key := _memory(leaf)) is not None:
            owners.setdefault(key, []).append(f"input{path}")
    found = {}
    for path, leaf in leaves(values):
        if (key := _memory(leaf)) is None:
            continue
        if key in owners:
            found[path] = list(owners[key])
        owners.setdefault(key, []).append(f"output{path}")
    return found


def same_objects(values: Any, inputs: Any) -> dict[str, str]:
    """List the leaves of a result that are the very objects that were passed in."""
    passed = {id(leaf): path for path, leaf in leaves(inputs) if isinstance(leaf, Tensor)}
    return {path: passed[id(leaf)] for path, leaf in leaves(values) if id(leaf) in passed}


def _memory(leaf: Any) -> int | None:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested or not leaf.numel():
        return None
    return leaf.untyped_storage().data_ptr() or None


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[list[Tensor]]:
    """Run a block from a seed; afterwards the list holds the numbers drawn next, which tell the generator's state."""
    torch.manual_seed(seed)
    drawn: list[Tensor] = []
    yield drawn
    drawn.append(torch.rand(4, device=device))
