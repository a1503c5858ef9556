"""What the core asks of extras: probes of runs and captures, Python state that is part of the key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base import extras
from simplegraph.base.extras import StateKey
from simplegraph.integrations import LateExtras
from simplegraph.program.probes import Probe, Run

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]


def test_a_probe_tells_captures_and_the_runs_they_are_compared_with_from_other_runs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a library could not have a capture go the way that eager goes."""
    entered: list[tuple[bool, int]] = []

    class Answering(Probe):
        def __init__(self, counts: dict[str, int]) -> None:
            self.counts = counts

        @contextlib.contextmanager
        def around(self, run: Run) -> Iterator[None]:
            entered.append((run.as_recorded, self.counts.get("runs", 0)))
            yield
            if not run.as_recorded:
                self.counts["runs"] = self.counts.get("runs", 0) + 1

    class Extras(LateExtras):
        def probes(self, counts: dict[str, int]) -> list[Probe]:
            return [*super().probes(counts), Answering(counts)]

    monkeypatch.setattr(extras, "installed", Extras())
    model = sg.wrap(nn.Linear(3, 3).to(device).eval(), capture_sizes=[2], progress=False)
    for _ in range(4):
        x = torch.randn(2, 3, device=device)
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=0, atol=0)
    assert entered == [(False, 0), (True, 1), (True, 1)]  # the first call, the capture, the eager run of its proof
    assert model.graph_stats.replays == 2


class Scaled(nn.Module):
    first, second = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first * self.second


def test_state_that_extras_read_is_part_of_the_key(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would use the old value for ever."""

    class Extras(LateExtras):
        def state_key(self, module: Any) -> StateKey | None:
            return lambda called: (called.first, called.second)

    monkeypatch.setattr(extras, "installed", Extras())
    model = sg.wrap(Scaled().to(device).eval(), capture_sizes=[2], progress=False)
    for first, second in ((1.0, 1.0), (3.0, 1.0), (1.0, 5.0), (1.0, 1.0)) * 2:
        model.first, model.second = first, second
        for _ in range(3):
            x = torch.randn(2, 3, device=device)
            assert torch.equal(model(x), x * first * second)
    assert model.graph_stats.captures == 3
    assert model.graph_stats.replays >= 12
