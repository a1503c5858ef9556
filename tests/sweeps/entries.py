"""torch's own databases of operators and modules as things to call: what to wrap, and calls with fresh values."""

from __future__ import annotations

import copy
import dataclasses
import random
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from eager_twin import tensors
from torch import nn

with unittest.mock.patch("torch.backends.disable_global_flags"):  # which would forbid every later test to set any
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db


# Their values are whatever was in memory: only shapes, types and layouts can be compared.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
UNDEFINED |= {"resize_", "resize_as_"}
ALTERNATIVES = (torch.float32, torch.complex64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@dataclasses.dataclass
class Sample:
    """One kind of call of an entry.

    Attributes:
        label: where it comes from.
        make: makes the module, the same at every call.
        calls: (args, kwargs) of calls to come, of the same shapes and with other values.
        values: False where eager's own values are undefined.
    """

    label: str
    make: Callable[[], nn.Module]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    values: bool = True


@dataclasses.dataclass
class Entry:
    """An operator or a module of the database, and its samples."""

    name: str
    samples: Callable[[torch.device, int], Iterator[Sample]]


class Operator(nn.Module):
    """A module whose forward is one operator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def operators(*, in_place: bool = False) -> list[Entry]:
    """Every operator of the database; `in_place` for the variants that write to their input."""
    entries = []
    for op in op_db:
        function = op.inplace_variant if in_place else op.get_op()
        if function is not None:
            name = f"{op.formatted_name}{'_' if in_place else ''}"
            entries.append(Entry(name, _OperatorSamples(op, function, in_place)))
    return entries


def modules() -> list[Entry]:
    """Every module of the database."""
    return [Entry(info.formatted_name, _ModuleSamples(info)) for info in module_db]


@dataclasses.dataclass
class _OperatorSamples:
    op: Any
    function: Callable[..., Any]
    in_place: bool

    def __call__(self, device: torch.device, calls: int) -> Iterator[Sample]:
        dtype = _dtype(self.op.supported_dtypes(device.type))
        if dtype is None:
            return
        rounds = [self._round(device, dtype, seed) for seed in range(calls)]
        for index, samples in enumerate(zip(*rounds, strict=False)):
            if not (self.in_place and samples[0].broadcasts_input):
                called = [((sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]
                make = lambda: Operator(self.function).eval()  # noqa: E731
                yield Sample(str(index), make, called, self.op.name not in UNDEFINED)

    def _round(self, device: torch.device, dtype: torch.dtype, seed: int) -> list[Any]:
        _seed(seed)
        return list(self.op.sample_inputs(device, dtype, requires_grad=False))


@dataclasses.dataclass
class _ModuleSamples:
    info: Any

    def __call__(self, device: torch.device, calls: int) -> Iterator[Sample]:
        dtype = _dtype(self.info.supported_dtypes(device.type))
        if dtype is None:
            return
        rounds = [self._round(device, dtype, seed) for seed in range(calls)]
        for index, inputs in enumerate(zip(*rounds, strict=False)):
            if inputs[0].forward_input is None:
                continue
            called = [(tuple(each.forward_input.args), dict(each.forward_input.kwargs)) for each in inputs]
            yield Sample(f"{index} {inputs[0].desc}".strip(), self._maker(inputs[0], device, dtype), called)

    def _maker(self, given: Any, device: torch.device, dtype: torch.dtype) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            _seed(0)
            arguments = copy.deepcopy(given.constructor_input)
            module: nn.Module = self.info.module_cls(*arguments.args, **arguments.kwargs)
            return module.to(device, dtype).eval()

        return make

    def _round(self, device: torch.device, dtype: torch.dtype, seed: int) -> list[Any]:
        _seed(seed)
        return list(
            self.info.module_inputs_func(self.info, device=device, dtype=dtype, requires_grad=False, training=False)
        )


def _dtype(supported: Any) -> torch.dtype | None:
    """The dtype to try an entry with: float32 wherever it goes."""
    return next((dtype for dtype in ALTERNATIVES if dtype in supported), next(iter(sorted(supported, key=str)), None))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def spread(samples: Iterator[Sample], most: int) -> list[Sample]:
    """At most so many of the samples, evenly spread over all of them; 0 for all."""
    found = list(samples)
    if not most or len(found) <= most:
        return found
    return [found[index * len(found) // most] for index in range(most)]


def fresh(value: Any) -> Any:
    """Nested values with tensors of their own, which keep their strides; tensors that share memory still do."""
    odd = [tensor for tensor in tensors(value) if tensor.layout is not torch.strided]  # torch cannot copy all of them
    return copy.deepcopy(value, {id(tensor): tensor.clone() for tensor in odd})


def first_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The size of dimension 0 of the first tensor that has one; 1 if none has."""
    return next((t.shape[0] for t in tensors((args, kwargs)) if not t.is_nested and t.dim() and t.shape[0]), 1)
