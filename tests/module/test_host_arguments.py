"""CPU tensors passed beside tensors on a GPU, for which tensors on the meta device stand here."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Binding
from simplegraph.call.inputs import HostArg, HostInput, TensorArg
from simplegraph.call.signature import CallReader, Signature, device_of
from simplegraph.program.host_arguments import HostArguments
from simplegraph.program.host_modes import HostWarmup


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


def seen(scale: Tensor, operator: Callable[[Tensor], object], *, by_value: bool = False) -> HostArguments:
    """What a run that does this with `scale` shows."""
    arguments = HostArguments()
    arguments.add("scale", scale, by_value=by_value)
    with HostWarmup(torch.device("meta"), arguments).following():
        operator(scale)
    return arguments


def kinds(reader: CallReader, *leaves: Tensor) -> list[type]:
    _, args, _ = reader.read(list(leaves), ["x", "scale"], reader.leaves(leaves, {})[2], None, torch.device("meta"))
    return [type(arg) for arg in args]


def test_a_large_one_has_a_static_input_until_a_run_uses_it_on_the_cpu() -> None:
    reader, scale = CallReader(forward, CudaGraphConfig()), torch.ones(17)
    call = torch.empty(3, 4, device="meta"), scale
    assert kinds(reader, *call) == [TensorArg, HostInput]
    assert reader.learn_hosts(seen(scale, lambda t: t * 2))
    with pytest.raises(CannotBind, match=r"scale is on the CPU, and the forward uses it there \(aten.mul") as caught:
        kinds(reader, *call)
    assert caught.value.reason is Reason.WRONG_DEVICE
    assert "scale = scale.to(device)" in caught.value.detail
    assert kinds(reader, call[0], torch.ones(2)) == [TensorArg, HostArg]  # a small one is compared


@pytest.mark.parametrize(
    "move", [lambda t: t.to("meta"), lambda t: t[:1].to("meta"), lambda t: torch.empty(2, device="meta").copy_(t)]
)
def test_a_small_one_has_a_static_input_once_a_run_moved_it(move: Callable[[Tensor], object]) -> None:
    reader, scale = CallReader(forward, CudaGraphConfig()), torch.ones(2)
    call = torch.empty(3, 4, device="meta"), scale
    assert kinds(reader, *call) == [TensorArg, HostArg]
    assert reader.learn_hosts(seen(scale, move, by_value=True))
    assert kinds(reader, *call) == [TensorArg, HostInput]
    assert not reader.learn_hosts(seen(scale, move))
    assert reader.learn_hosts(seen(scale, lambda t: (move(t), t.tolist())))
    assert kinds(reader, *call) == [TensorArg, HostArg]
    assert not reader.learn_hosts(seen(scale, move))  # some call reads it
    assert kinds(reader, *call) == [TensorArg, HostArg]


def test_what_a_run_shows_is_news_only_if_the_call_is_now_read_otherwise() -> None:
    scale = torch.ones(2)
    for move, by_value, news in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        reader = CallReader(forward, CudaGraphConfig())
        found = seen(scale, lambda t, move=move: t.to("meta") if move else t * 2, by_value=by_value)
        assert reader.learn_hosts(found) is news


def test_names_of_cpu_tensors_are_not_kept_for_ever() -> None:
    reader = CallReader(forward, CudaGraphConfig())
    for request in range(5000):
        arguments = HostArguments()
        arguments.moved.add(f"requests.{request}")
        reader.learn_hosts(arguments)
    assert len(reader.hosts) < 5000


@pytest.mark.parametrize(
    "given",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    ],
)
def test_a_cpu_tensor_that_does_not_know_its_size_is_opaque(given: Callable[[], Tensor]) -> None:
    with pytest.raises(CannotBind, match="scale") as caught:
        read(given())
    assert caught.value.reason is Reason.OPAQUE_ARGUMENT


def test_without_a_tensor_on_the_device_one_on_the_cpu_tells_the_batch_size() -> None:
    reader = CallReader(forward, CudaGraphConfig())
    for rows in (1, 3):
        leaves = [torch.ones(rows, 2), torch.ones(())]
        size, args, _ = reader.read(
            leaves, ["x", "scale"], reader.leaves(tuple(leaves), {})[2], None, torch.device("meta")
        )
        assert (size, [type(arg) for arg in args]) == (rows, [HostInput, HostInput])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda t: t.tolist(), "Tensor.tolist"),
        (lambda t: torch.tensor([t[0], 1.0]), "torch.tensor"),
        (lambda t: torch.as_tensor(data=[[t[0]], [1.0]]), "torch.as_tensor"),
        (lambda t: torch.asarray((t[0], t[1])), "torch.asarray"),
        (lambda t: torch.empty(2, device="meta").new_tensor([t[0]]), "Tensor.new_tensor"),
        (lambda t: t.numpy(), "Tensor.numpy"),
        (lambda t: numpy.asarray(t), "Tensor.__array__"),
        (lambda t: f"{t[0]}", "Tensor.__format__"),
        (lambda t: t[0].item(), "aten._local_scalar_dense"),
        (lambda t: t.sum().to("meta"), "aten.sum"),
        (lambda t: t.double().to("meta"), "aten._to_copy"),
        (lambda t: torch.empty(2, device="meta") * t[0], "aten.mul"),
        (lambda t: torch.tensor_split(torch.empty(2, device="meta"), t.long()), "aten._to_copy"),
        (lambda t: torch.where(torch.empty(2, device="meta") > 0, t[0], 0.0), "aten.where"),
    ],
)
def test_a_use_on_the_cpu_is_named(use: Callable[[Tensor], object], said: str) -> None:
    where = seen(torch.ones(2), use).read["scale"]
    assert where.startswith(f"{said} at ")
    assert "test_host_arguments.py" in where


@pytest.mark.parametrize(
    "use", [lambda t: t.view(2, 1), lambda t: t.is_pinned(), lambda t: torch.empty_like(t), lambda t: t.shape]
)
def test_what_reads_no_value_is_no_use(use: Callable[[Tensor], object]) -> None:
    found = seen(torch.ones(2), use)
    assert (found.read, found.moved) == ({}, set())


def test_a_move_waits_unless_it_is_said_not_to() -> None:
    for move, waits in (
        (lambda t: t.to("meta"), True),
        (lambda t: t.to("meta", non_blocking=True), False),
        (lambda t: torch.empty(2, device="meta").copy_(t), True),
        (lambda t: torch.empty(2, device="meta").copy_(t, non_blocking=True), False),
    ):
        found = seen(torch.ones(2), move)
        assert (found.moved, found.waited) == ({"scale"}, {"scale"} if waits else set())


def test_one_that_the_forward_writes_to_is_refused_with_its_name() -> None:
    class Observed:
        written = frozenset({7})

    binding = Binding(read(torch.tensor(2.0))[2])
    binding.note_written(Observed(), {"x": 7})  # type: ignore[arg-type]
    assert binding.refusal is None
    binding.note_written(Observed(), {"scale": 7})  # type: ignore[arg-type]
    assert binding.refusal is not None
    assert "scale is on the CPU and the forward writes to it" in binding.refusal.detail


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
