"""The serving benchmark: what is asked for is served, and the figures are what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from bench.engine import Engine, EngineConfig
from bench.engine.request import Request, SamplingParams
from bench.models.workload import Workload
from bench.serve import __main__ as serve
from bench.serve import load


def test_requests_come_at_the_rate_asked_for_with_lengths_of_the_table() -> None:
    arrivals = load.arrivals(2000, 50.0, 512)
    assert arrivals[0].at == 0
    assert 1999 / arrivals[-1].at == pytest.approx(50, rel=0.1)
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    assert {(len(one.prompt), one.max_tokens) for one in arrivals} >= {(501, 655), (655, 118)}
    assert load.arrivals(5, 50.0, 512) == load.arrivals(5, 50.0, 512)
    assert load.arrivals(5, 50.0, 512, seed=1) != load.arrivals(5, 50.0, 512)


def test_all_requests_can_come_at_once_and_long_ones_be_cut() -> None:
    arrivals = load.arrivals(50, math.inf, 512, longest=64)
    assert {one.at for one in arrivals} == {0.0}
    assert max(len(one.prompt) + one.max_tokens for one in arrivals) <= 64


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="the rate is"):
        load.arrivals(3, rate, 512)


def test_the_figures_are_those_of_the_tokens() -> None:
    timings = [load.Timing(0.0, [0.1, 0.2, 0.4]), load.Timing(1.0, [1.5])]
    requests = [_request(3, 3), _request(2, 1)]
    figures = load.summary(timings, requests)
    assert figures["dropped"] == 1
    assert figures["tokens_per_second"] == pytest.approx(4 / 1.5)
    assert figures["ttft_mean_ms"] == pytest.approx(300)
    assert figures["itl_median_ms"] == pytest.approx(150)
    assert figures["itl_p99_ms"] == pytest.approx(200)
    assert figures["tpot_mean_ms"] == pytest.approx(150)


def _request(asked: int, got: int) -> Request:
    return Request(0, [1], SamplingParams(max_tokens=asked), output=[0] * got)


def test_quantiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert load.quantile(values, 0.99) == 99
    assert load.quantile(values, 0.5) == 50
    assert load.quantile([7.0], 0.99) == 7


def test_every_request_of_a_load_gets_its_tokens() -> None:
    llama = Workload("tiny", (1,), torch.device("cpu"), lm_head=True).build()
    engine = Engine(llama, EngineConfig(mode="NONE", max_num_seqs=3, max_model_len=64, num_pages=20))
    arrivals = load.arrivals(8, 500.0, 512, longest=40)
    timings, requests = load.serve(engine, arrivals)
    assert [len(request.output) for request in requests] == [one.max_tokens for one in arrivals]
    assert [len(timing.tokens) for timing in timings] == [one.max_tokens for one in arrivals]
    assert all(timing.ttft > 0 for timing in timings)
    assert load.summary(timings, requests)["dropped"] == 0


def test_the_serving_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    assert (
        serve.main(["--requests", "3", "--rate", "100", "--arms", "eager,full-decode-only", "--json", str(path)]) == 0
    )
    printed = capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert list(saved["results"]) == ["eager", "full-decode-only"]
    assert "ITL ms mean" in printed
    if not torch.cuda.is_available():
        assert "NOT speed" in printed
    with pytest.raises(SystemExit):
        serve.main(["--arms", "none"])
