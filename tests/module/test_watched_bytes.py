"""Small CPU tensors that a capture on a GPU read: whoever writes to them, and however, makes the graphs stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simplegraph.guard.guards import CapturedState, MemoryRead
from simplegraph.guard.survey import Survey


def captured(module: nn.Module, *values: Tensor) -> CapturedState:
    """The state of graphs of a module whose captures took the values of these."""
    state = CapturedState(module)
    state.add(MemoryRead(values=dict(enumerate(values))), Survey(module))  # type: ignore[arg-type]
    return state


class Scaled(nn.Module):
    def __init__(self, temperature: Tensor) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.temperature = temperature


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda t: t.fill_(5.0),
    "data.fill_": lambda t: t.data.fill_(5.0),
    "numpy": lambda t: t.numpy().fill(5.0),
    "a view": lambda t: t.view(-1)[0].fill_(5.0),
    "minus zero": lambda t: t.zero_().neg_(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen_with_its_name(write: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        temperature = torch.zeros(())
        module = Scaled(temperature)
        state = captured(module, temperature.detach())
        assert not state.moved()
        WRITES[write](temperature)
        assert state.moved()
        assert state.what_moved() == ["inner.temperature (changed on the CPU)"]


def test_what_is_written_and_written_back_is_not_stale() -> None:
    temperature = torch.ones(2)
    module = Scaled(temperature)
    state = captured(module, temperature[1:].detach())
    temperature.fill_(2.0)
    assert state.moved()
    temperature.fill_(1.0)
    assert not state.moved()


def test_only_the_elements_that_were_read_count() -> None:
    table = torch.zeros(100)
    module = Scaled(table)
    state = captured(module, table[3].detach())
    table[4] = 1.0
    assert not state.moved()
    table[3] = 1.0
    assert state.moved()


def test_memory_that_is_given_up_is_noticed_and_not_read() -> None:
    scale = torch.ones(2)
    module = Scaled(scale)
    state = captured(module, scale.detach())
    scale.untyped_storage().resize_(0)
    assert state.moved()


def test_a_tensor_that_no_module_holds_is_watched_too() -> None:
    outside = torch.zeros(())
    module = nn.Identity()
    state = captured(module, outside.detach())
    outside.fill_(1.0)
    assert state.what_moved() == ["a CPU tensor from elsewhere (changed on the CPU)"]


def test_what_changed_between_two_captures_makes_the_first_stale() -> None:
    temperature, scale = torch.ones(()), torch.ones(())
    module = Scaled(temperature)
    read = MemoryRead(values={(1,): temperature})
    state = CapturedState(module)
    state.add(read, Survey(module))
    temperature.data.fill_(2.0)
    read.values[2,] = scale
    state.add(read, Survey(module))
    assert state.moved()
    assert state.what_moved() == ["inner.temperature (changed on the CPU)"]


def test_a_value_is_watched_on_after_another_change_was_looked_at() -> None:
    temperature = torch.ones(())
    module = Scaled(temperature)
    state = captured(module, temperature)
    for value in (1.0, 2.0):
        temperature.data.fill_(value)
        module.inner.register_forward_hook(print).remove()  # somebody looks at all of it
        assert state.moved() == (value != 1.0)
    temperature.data.fill_(1.0)
    assert not state.moved()
    temperature.data.fill_(3.0)
    assert state.moved()
