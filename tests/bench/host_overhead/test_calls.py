"""The cost of a call: each of the compared calls is what its name says."""

from __future__ import annotations

import torch

from bench.host_overhead import calls


def test_every_call_is_of_its_kind_and_gets_a_figure() -> None:
    said: list[str] = []
    medians = calls.measure(torch.device("cpu"), [calls.SIZE], 1, said.append)
    above = {f"{name} above {name}, eager" for name in ("too large", "opaque")}
    assert set(medians) >= {"in place", "copied", "constant", "refused", "eager", "refused above eager", *above}
    assert "break above in place" in medians
    assert all(
        medians[name] > 0 for name in ("in place", "copied", "constant", "refused", "eager", "too large", "opaque")
    )
    assert len(said) == 1
