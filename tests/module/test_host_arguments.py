"""CPU tensors passed beside tensors on a GPU, for which tensors on the meta device stand here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Binding
from simplegraph.call.inputs import HostArg
from simplegraph.call.signature import CallReader, Signature, device_of


def forward(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def read(scale: Tensor, x: Tensor | None = None) -> tuple[int, HostArg, Signature]:
    reader = CallReader(forward, CudaGraphConfig())
    leaves, names, spec = reader.leaves((torch.empty(3, 4, device="meta") if x is None else x, scale), {})
    size, args, signature = reader.read(leaves, names, spec, None)
    found = args[1]
    assert isinstance(found, HostArg)
    return size, found, signature


def test_a_small_one_is_part_of_the_key_by_its_value() -> None:
    size, scale, signature = read(torch.tensor(2.0))
    assert size == 3
    assert scale.holds(torch.tensor(2.0))
    assert signature.values == read(torch.tensor(2.0))[2].values
    for other in (
        torch.tensor(3.0),
        torch.tensor(2),
        torch.tensor([2.0]),
        torch.tensor(2.0, dtype=torch.float64),
        torch.empty((), device="meta"),
        2.0,
        None,
    ):
        assert not scale.holds(other)
    for value in (3.0, -2.0):
        assert signature.values != read(torch.tensor(value))[2].values


def test_a_value_written_later_is_another_one() -> None:
    passed = torch.tensor([1.0, 2.0])
    _, scale, signature = read(passed)
    assert scale.holds(passed)
    passed.data.mul_(2)
    assert not scale.holds(passed)
    assert scale.leaf.tolist() == [1.0, 2.0]
    assert signature != read(passed)[2]


def test_elements_count_and_not_how_they_lie() -> None:
    _, scale, _ = read(torch.tensor([1, 2]))
    assert scale.holds(torch.tensor([[1, 0], [2, 0]])[:, 0])
    assert not scale.holds(torch.tensor([[1, 0], [2, 0]])[:, 1])


def test_a_large_one_is_refused_with_its_name() -> None:
    with pytest.raises(CannotBind, match="scale is on the CPU and has 68 bytes") as caught:
        read(torch.ones(17))
    assert caught.value.reason is Reason.WRONG_DEVICE


def test_one_that_the_forward_writes_to_is_refused_with_its_name() -> None:
    class Observed:
        written = frozenset({7})

    binding = Binding(read(torch.tensor(2.0))[2])
    binding.note_written(Observed(), {"x": 7})  # type: ignore[arg-type]
    assert binding.unsupported is None
    binding.note_written(Observed(), {"scale": 7})  # type: ignore[arg-type]
    assert binding.unsupported is not None
    assert "scale is on the CPU and the forward writes to it" in binding.unsupported.detail


def test_the_device_of_a_call_is_the_one_that_is_not_the_cpu() -> None:
    assert device_of([1, torch.ones(1), torch.empty(1, device="meta")]).type == "meta"
    assert device_of([torch.ones(1), "a"]).type == "cpu"


def test_on_the_cpu_alone_every_tensor_has_a_static_input() -> None:
    reader = CallReader(forward, CudaGraphConfig())
    leaves, names, spec = reader.leaves((torch.ones(3, 4), torch.tensor(2.0)), {})
    _, args, _ = reader.read(leaves, names, spec, None)
    assert not any(isinstance(arg, HostArg) for arg in args)


DEFAULT = torch.tensor(2.0)


def test_one_that_equals_the_default_is_not_taken_for_it() -> None:
    def scaled(x: Tensor, scale: Tensor = DEFAULT) -> Tensor:
        return x * scale

    reader = CallReader(scaled, CudaGraphConfig())
    signatures = []
    for args in ((), (torch.tensor(2.0),)):
        leaves, names, spec = reader.leaves((torch.empty(3, 4, device="meta"), *args), {})
        signatures.append(reader.read(leaves, names, spec, None)[2])
    assert signatures[0] != signatures[1]  # the default may be written to, which the other graph would not see
