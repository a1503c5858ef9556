"""The cost of a call: each of the compared calls is what its name says."""

from __future__ import annotations

import torch

from bench.host_overhead import calls


def test_every_call_is_of_its_kind_and_gets_a_figure() -> None:
    said: list[str] = []
    medians = calls.measure(torch.device("cpu"), [calls.SIZE], 1, said.append)
    assert set(medians) >= {"in place", "copied", "refused", "eager", "refused above eager"}
    assert all(medians[name] > 0 for name in ("in place", "copied", "refused", "eager"))
    assert len(said) == 1
