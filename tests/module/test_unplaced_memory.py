"""Memory that no walk finds a place of: once nothing but the graphs holds it, they go before the next answer."""

from __future__ import annotations

import collections
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base import tensors
from tests.module.answers import close

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]

WIDTH = 4


class Box:
    """An ordinary object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return 1


def keep(held: Any, key: Any, value: Any) -> None:
    held[key] = value


def replace_in_weak(held: Any, tensor: Tensor) -> None:
    held().held = tensor


def in_generator(tensor: Tensor) -> tuple[Iterator[Tensor], Callable[[Any, Tensor], None]]:
    box = [tensor]
    return (box[0] for _ in iter(int, 1)), lambda _, other: keep(box, 0, other)


def in_view(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    table = {"k": tensor}
    return table.values(), lambda _, other: keep(table, "k", other)


def in_array(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    array = np.empty(1, dtype=object)
    array[0] = tensor
    return array, lambda held, other: keep(held, 0, other)


def in_weak(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    box = Box(tensor)

    def change(_: Any, other: Tensor) -> None:
        box.held = other

    return weakref.ref(box), change


def in_optimizer(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["mean"] = tensor
    return optimizer, lambda held, other: keep(held.state[parameter], "mean", other)


def deeply(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    held: Any = [tensor]
    inner = held
    for _ in range(9):
        held = [held]
    return held, lambda _, other: keep(inner, 0, other)


def deepest(held: Any) -> Tensor:
    while isinstance(held, list):
        held = held[0]
    return held  # type: ignore[no-any-return]


def in_c(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    box = Box(tensor)
    return ctypes.py_object(box), lambda _, other: vars(box).update(held=other)


def in_key(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    box = Box(tensor)
    return {box: 1}, lambda _, other: vars(box).update(held=other)


def in_exception(tensor: Tensor) -> tuple[Any, Callable[[Any, Tensor], None]]:
    def change(held: Any, other: Tensor) -> None:
        held.args = (other,)

    return ValueError(tensor), change


# By name: what holds a tensor and what replaces it, and what reads it.
PLACES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "frame of a generator": (in_generator, next),
    "view of a dict": (in_view, lambda held: next(iter(held))),
    "array of objects": (in_array, lambda held: held[0]),
    "weak reference": (in_weak, lambda held: held().held),
    "state of an optimizer": (in_optimizer, lambda held: next(iter(held.state.values()))["mean"]),
    "ten lists": (deeply, deepest),
    "object of C": (in_c, lambda held: held.value.held),
    "key of a dict": (in_key, lambda held: next(iter(held)).held),
    "exception": (in_exception, lambda held: held.args[0]),
}


class Reader(nn.Module):
    """Scales by what it is given a way to."""

    def __init__(self, held: Any, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.held)


def wrapped(read: Callable[[Tensor], Tensor], module: Reader, *, as_module: bool) -> Any:
    return sg.wrap(module.eval() if as_module else read, capture_sizes=[2])


def call(run: Any, expected: Tensor) -> None:
    x = torch.randn(2, WIDTH, device=expected.device)
    close(run(x), x * expected)


@pytest.mark.parametrize("as_module", [False, True], ids=["function", "module"])
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_was_replaced_where_nothing_looks_is_never_read(
    device: torch.device, place: str, as_module: bool
) -> None:
    make, read = PLACES[place]
    tensor = torch.randn(WIDTH, device=device)
    expected = tensor.clone()
    held, change = make(tensor)
    del tensor
    run = wrapped(lambda x: x * read(held), Reader(held, read), as_module=as_module)
    for _ in range(4):
        for _ in range(5):
            call(run, expected)
        other = torch.randn(WIDTH, device=device)
        expected = other.clone()
        change(held, other)
        del other
    assert run.graph_stats.replays >= 8  # in each round, once the new one was captured
    assert run.graph_stats.recaptures == 3


def test_gradients_of_a_tensor_without_a_place_are_todays(device: torch.device) -> None:
    """An optimizer is not looked into: what its parameters have for gradients nothing but the counts tell."""
    parameter = nn.Parameter(torch.randn(WIDTH, device=device))
    optimizer = torch.optim.SGD([parameter])
    read = lambda x: x * next(each.grad for group in optimizer.param_groups for each in group["params"])  # noqa: E731
    run = sg.wrap(read, capture_sizes=[2])
    for _ in range(3):
        parameter.grad = torch.randn_like(parameter)
        for _ in range(5):
            call(run, parameter.grad)
        optimizer.zero_grad()
    assert run.graph_stats.replays >= 6


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_is_replaced_right_after_the_capture_is_never_read(device: torch.device, place: str) -> None:
    """As an optimizer's `zero_grad` replaces gradients after each call."""
    make, read = PLACES[place]
    tensor = torch.randn(WIDTH, device=device)
    expected = tensor.clone()
    held, change = make(tensor)
    del tensor
    run = sg.wrap(lambda x: x * read(held), capture_sizes=[2])
    for _ in range(8):
        call(run, expected)
        other = torch.randn(WIDTH, device=device)
        expected = other.clone()
        change(held, other)
        del other


class Maker(nn.Module):
    """Makes a tensor of memory that NumPy owns, at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.ones(WIDTH, dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(self.table).to(x.device)


def test_what_the_forward_makes_at_each_run_drops_no_graph(device: torch.device) -> None:
    """Nothing else ever held such a tensor, so its counts mean nothing."""
    run = sg.wrap(Maker().eval(), capture_sizes=[2, 8])
    for rows in (2, 2, 2, 5, 5, 5, 7, 7, 7, 6, 8, 2, 2, 5, 1, 1, 7, 8, 2):  # each new count is an eager run more
        x = torch.randn(rows, WIDTH, device=device)
        close(run(x), x + 1)
        gc.collect()
    assert run.graph_stats.recaptures == 0
    assert run.graph_stats.replays >= 8


def test_memory_that_others_hold_as_well_drops_no_graph(device: torch.device) -> None:
    tensor = torch.randn(WIDTH, device=device)
    held = in_view(tensor)[0]
    run = sg.wrap(lambda x: x * next(iter(held)), capture_sizes=[2])
    views = collections.deque([tensor[1:], tensor.detach(), tensor], maxlen=3)
    for _ in range(9):
        call(run, tensor)
        views.rotate(1)
        views.append(tensor.view(2, 2))
    assert run.graph_stats.recaptures == 0


def test_graphs_let_go_of_memory_that_was_given_up(device: torch.device) -> None:
    """The call after that is the first which no graph that read it can serve."""
    tensor = torch.randn(WIDTH, device=device)
    gone = weakref.ref(tensor)
    held, change = in_view(tensor)
    run = sg.wrap(lambda x: x * next(iter(held)), capture_sizes=[2])
    for _ in range(4):
        call(run, tensor)
    other = torch.randn(WIDTH, device=device)
    change(held, other)
    del tensor
    assert gone() is not None  # a graph would read it
    call(run, other)
    call(run, other)
    gc.collect()
    assert gone() is None


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda tensor: [tensor],
    "view": lambda tensor: tensor[1:],
    "detached": lambda tensor: tensor.detach(),
    "array": lambda tensor: tensor.cpu().numpy() if tensor.is_cpu else [tensor],
    "storage": lambda tensor: torch.empty(0, device=tensor.device).set_(tensor.untyped_storage()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_owned_tensor_tells_whoever_holds_it_or_its_memory(device: torch.device, holder: str) -> None:
    tensor = torch.randn(WIDTH, device=device)
    other = HOLDERS[holder](tensor)
    owned = tensors.OwnedTensor(tensor)
    del tensor
    owned.note_holders()
    assert not owned.is_released()
    del other
    assert owned.is_released()


def test_an_owned_gradient_is_released_with_its_tensor(device: torch.device) -> None:
    with torch.enable_grad():
        parameter = nn.Parameter(torch.randn(WIDTH, device=device))
        (parameter * 2).sum().backward()
    owned = tensors.OwnedTensor(parameter.grad)  # type: ignore[arg-type]
    owned.note_holders()
    assert not owned.is_released()
    parameter.grad = None
    assert owned.is_released()


def test_an_owned_tensor_that_nothing_else_held_is_not_released(device: torch.device) -> None:
    owned = tensors.OwnedTensor(torch.randn(WIDTH, device=device))
    owned.note_holders()
    assert not owned.is_released()


def test_counts_that_tell_nothing_release_nothing(device: torch.device) -> None:
    tensor = torch.randn(WIDTH, device=device)
    owned = tensors.OwnedTensor(tensor, counts=False)
    owned.note_holders()
    assert not owned.is_released()
    del tensor
    assert not owned.is_released()


def test_without_counts_of_torch_nothing_is_released(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release may not have them: then Python's references alone would say too much."""
    for name in ("storage_uses", "_tensor_uses"):
        monkeypatch.setattr(tensors, name, lambda _: 0)
    monkeypatch.setattr(tensors, "TELLS_OWNERS", False)
    tensors._uses_alone.cache_clear()
    tensor, other = torch.randn(2, WIDTH, device=device)
    held, change = in_view(tensor[:])
    run = sg.wrap(lambda x: x * next(iter(held)), capture_sizes=[2])
    for _ in range(4):
        call(run, tensor)
    change(held, other)
    call(run, tensor)  # as before: what no walk finds is not compared
    tensors._uses_alone.cache_clear()
    assert run.graph_stats.recaptures == 0
