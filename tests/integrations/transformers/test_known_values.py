"""Values that follow from Python numbers: read in a capture as eager reads them, and nothing else is."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from simplegraph.integrations.transformers.masks import KnownValues
from simplegraph.program.breaks.marks import recording_breaks


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], autouse=True)
def _grad_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.fixture
def known() -> Iterator[KnownValues]:
    values = KnownValues()
    values.follow()
    yield values
    values.end()


X = torch.randint(0, 9, (2, 5))
KNOWN: list[Callable[[Tensor], Tensor]] = [
    lambda _: torch.arange(5).unsqueeze(0).expand(2, -1)[:, 1:] + 3,
    lambda _: (torch.diff(torch.arange(5)[None], prepend=torch.arange(5)[None, :1] - 1) != 1).cumsum(-1),
    lambda x: torch.ones_like(x).bool(),
    lambda x: torch.ones(2, 5).to(torch.int64).cumsum(1) * x.new_ones(2, 5) - 1,
    lambda _: torch.cat([torch.zeros(2, dtype=torch.int64), torch.full((3,), 7)]),
]
UNKNOWN: list[Callable[[], Tensor]] = [
    lambda: X + torch.arange(5),
    lambda: torch.ones(2, 5).mul_(X),
    lambda: torch.arange(5).add_(1),
    lambda: torch.arange(5).index_fill_(0, X[0] % 5, 1)[:2],
    lambda: torch.rand(3) > 0.5,
    lambda: torch.empty(3, dtype=torch.int64),
    lambda: torch.ones(3) + 0.1,  # devices may round otherwise
    lambda: torch.zeros(1 << 17, dtype=torch.bool),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])  # a tensor on the latter never has a value
@pytest.mark.parametrize("make", KNOWN)
def test_what_python_numbers_make_is_known_and_read_as_it_is(
    known: KnownValues, make: Callable[[Tensor], Tensor], device: str
) -> None:
    with torch.device(device):
        made = make(X.to(device))
    assert made.device.type == device
    assert known.knows(made)
    served = [bool((made == 3).any()), made.sum().item(), int(made.flatten()[-1])]
    known.end()
    made = make(X)
    assert served == [bool((made == 3).any()), made.sum().item(), int(made.flatten()[-1])]


@pytest.mark.parametrize("make", UNKNOWN)
def test_data_and_what_is_written_or_drawn_is_not_known(known: KnownValues, make: Callable[[], Tensor]) -> None:
    assert not known.knows(make())


def test_a_write_to_a_view_makes_all_of_its_memory_unknown(known: KnownValues) -> None:
    made = torch.arange(6)
    rows = made.view(2, 3)
    assert known.knows(rows)
    made[1:2].copy_(X[0, :1])
    assert not known.knows(made)
    assert not known.knows(rows)


def test_what_a_break_makes_is_not_known(known: KnownValues) -> None:
    """It runs again at every replay, and may make something else then."""
    before, recorder = torch.arange(6), types.SimpleNamespace(operators=())
    with recording_breaks(cast(Any, recorder)):
        assert not known.knows(torch.arange(6))
        before[1:].zero_()
    assert not known.knows(before)


def test_other_tensors_in_memory_that_was_freed_are_not_known(known: KnownValues) -> None:
    del (made := [torch.arange(6) for _ in range(20)])[:]
    assert not any(known.knows(torch.empty(6, dtype=torch.int64)) for _ in range(20)), made


def test_results_are_those_without_following(known: KnownValues) -> None:
    """An autograd graph or a factory must not find that somebody else holds its tensor."""
    made = torch.arange(4)
    assert made._is_view() is False
    known.end()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not known.knows(made)
