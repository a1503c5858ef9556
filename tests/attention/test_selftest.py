"""`doctor --attention` reports backends that work, are absent, compute wrong numbers, or fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from simplegraph.attention import SDPABackend, selftest
from simplegraph.attention.selftest import self_test


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_the_self_test_tries_what_is_installed_and_names_what_is_not(device: torch.device) -> None:
    trials = {(trial.backend, trial.batches): trial for trial in self_test(device, rounds=6)}
    assert trials["SDPA", "decode"].problem is None
    assert trials["SDPA", "mixed"].problem is None
    assert trials["SDPA", "mixed"].rounds == 6
    absent = [trial for trial in trials.values() if not trial.installed]
    assert all(trial.problem for trial in absent)


def test_the_self_test_finds_a_backend_that_is_wrong(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SDPABackend.run

    def wrong(self: Any, layer: int, q: Any, out: Any, metadata: Any) -> None:
        run(self, layer, q, out, metadata)
        out[:1] *= 1.5

    monkeypatch.setattr(SDPABackend, "run", wrong)
    trials = [trial for trial in self_test(device, rounds=3) if trial.backend == "SDPA"]
    assert all("beyond any rounding" in str(trial.problem) for trial in trials)
    assert all("seq_lens" in str(trial.problem) for trial in trials)


@pytest.mark.parametrize("where", ["__init__", "prepare", "run"])
def test_the_self_test_outlives_a_broken_backend(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    broken_backend = type("Broken", (SDPABackend,), {"support": SDPABackend.support, "name": "Broken", where: broken})
    monkeypatch.setattr(selftest, "BACKENDS", (broken_backend, SDPABackend))
    trials = list(self_test(device, rounds=2))
    found = [trial for trial in trials if trial.backend == "Broken"]
    assert all("no such kernel" in str(trial.problem) for trial in found)
    assert found
    assert all(trial.problem is None for trial in trials if trial.backend == "SDPA")
