"""Captures draw no random numbers; every replay draws what eager would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from simplegraph.base.errors import EmulatorError
from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import assert_same, capture


def test_capture_draws_nothing_and_every_replay_draws_as_eager_would(pool: GraphPool) -> None:
    x = torch.ones(64)
    torch.manual_seed(3)
    segment, output = capture(pool, lambda: F.dropout(x, 0.5) + torch.rand(64))
    for _ in range(3):
        state = torch.get_rng_state()
        segment.replay()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert_same(output, F.dropout(x, 0.5) + torch.rand(64))
        assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(3)
    first = F.dropout(x, 0.5) + torch.rand(64)
    torch.manual_seed(3)
    segment.replay()
    assert_same(output, first)


def test_a_generator_is_captured_where_the_capture_was_told_of_it(pool: GraphPool) -> None:
    generator, twin = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    segment, output = capture(pool, lambda: torch.rand(4, generator=generator), generators=(generator,))
    for _ in range(2):
        segment.replay()
        assert_same(output, torch.rand(4, generator=twin))
    with pytest.raises(EmulatorError, match="generator that the capture was not told of"):
        capture(pool, lambda: torch.rand(4, generator=generator))


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("draw", [lambda: torch.rand(2), lambda: None])
def test_reseeding_in_a_capture_is_an_error_and_is_undone(pool: GraphPool, seed: int, draw: Any) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.raises(EmulatorError, match="reseeded"):
        capture(pool, lambda: (torch.manual_seed(seed), draw()))
    assert torch.initial_seed() == 5
    assert torch.equal(torch.get_rng_state(), state)
