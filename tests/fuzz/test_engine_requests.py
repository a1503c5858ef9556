"""Random loads of the engine: seeded requests get the tokens that each gets alone, and a leak between them is found."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from bench.engine import sampling
from tests.fuzz.engine_requests import MODES, ROOMS, Counts, Engines, random_load


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines("cuda" if torch.cuda.is_available() else "cpu")


def test_seeded_requests_of_random_loads_have_the_tokens_that_each_has_alone(engines: Engines) -> None:
    counts = Counts()
    for seed in range(len(MODES) * len(ROOMS)):
        assert engines.differences(random_load(seed), counts) == []
    assert counts.preemptions > 0
    assert counts.cancelled > 0
    assert counts.compared > 200


def test_noise_that_other_rows_share_is_found(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator(engines.of("NONE", "ample", True).runner.device).manual_seed(0)
    monkeypatch.setattr(
        sampling, "_exponential", lambda scores, *_: torch.empty_like(scores).exponential_(generator=generator)
    )
    assert engines.differences(random_load(0), Counts()) != []
