"""The serving benchmark: what is asked for is served, and the figures are what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.engine import Engine, EngineConfig
from bench.engine.request import Request, SamplingParams
from bench.models.workload import Workload
from bench.serve import __main__ as serve
from bench.serve import load
from bench.serve.serving import ARMS
from bench.tools.options import written


def test_requests_come_at_the_rate_asked_for() -> None:
    arrivals = load.arrivals(2000, 50.0, 512)
    assert arrivals[0].at == 0
    assert 1999 / arrivals[-1].at == pytest.approx(50, rel=0.1)
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    assert [(len(one.prompt), one.max_tokens) for one in arrivals] == load.draw_lengths(2000)
    assert load.arrivals(5, 50.0, 512) == load.arrivals(5, 50.0, 512)
    assert load.arrivals(5, 50.0, 512, seed=1) != load.arrivals(5, 50.0, 512)
    slower = load.arrivals(5, 25.0, 512)  # the same requests at twice the distances
    for one, other in zip(load.arrivals(5, 50.0, 512), slower, strict=True):
        assert (one.prompt, one.max_tokens) == (other.prompt, other.max_tokens)
        assert 2 * one.at == pytest.approx(other.at)


def test_lengths_have_a_long_tail_of_the_committed_shape() -> None:
    pairs = load.draw_lengths(20_000)
    for kind, lengths in zip(("prompt", "output"), zip(*pairs, strict=True), strict=True):
        shape = load.LENGTHS[kind]
        assert shape["least"] <= min(lengths)
        assert shape["most"] // 2 < max(lengths) <= shape["most"]
        ordered = sorted(lengths)
        median, mean = ordered[10_000], sum(lengths) / 20_000
        assert median == pytest.approx(shape["mean"] * math.exp(-(shape["sigma"] ** 2) / 2), rel=0.1)
        assert 0.75 * shape["mean"] < mean < shape["mean"]  # the limits take the longest
        assert ordered[19_800] > 5 * median
    assert max(map(sum, pairs)) <= 2048
    assert load.draw_lengths(30) == pairs[:30]
    assert load.draw_lengths(30, seed=1) != pairs[:30]


def test_all_requests_can_come_at_once_and_be_scaled_down() -> None:
    arrivals = load.arrivals(50, math.inf, 512, longest=64)
    assert {one.at for one in arrivals} == {0.0}
    lengths = [len(one.prompt) + one.max_tokens for one in arrivals]
    assert 32 < max(lengths) <= 64
    assert len(set(lengths)) > 15


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


def test_tokens_that_come_together_are_one_arrival() -> None:
    timing = load.Timing(0.0, [0.1, 0.3, 0.3, 0.3, 0.4])
    assert timing.itl == pytest.approx([0.2, 0.1])
    assert timing.tpot == pytest.approx(0.075)


def test_requests_in_flight_are_counted_while_there_are_any() -> None:
    assert load.mean_in_flight([load.Timing(0.0, [1.0, 2.0]), load.Timing(1.0, [4.0])]) == pytest.approx(5 / 4)
    assert load.mean_in_flight([load.Timing(0.0, [1.0]), load.Timing(9.0, [10.0])]) == pytest.approx(1)


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


def test_a_number_of_requests_is_in_flight_all_the_time() -> None:
    llama = Workload("tiny", (1,), torch.device("cpu"), lm_head=True).build()
    engine = Engine(llama, EngineConfig(mode="NONE", max_num_seqs=3, max_model_len=64, num_pages=20))
    seen, step = [], engine.step

    def counted() -> Any:
        seen.append(len(engine.scheduler.running) + len(engine.scheduler.waiting))
        return step()

    engine.step = counted  # type: ignore[method-assign]
    arrivals = load.arrivals(6, math.inf, 512, longest=40)
    timings, requests = load.serve(engine, arrivals, in_flight=2)
    assert max(seen) == 2
    assert seen.count(2) > 0.6 * len(seen)
    assert load.summary(timings, requests)["dropped"] == 0
    assert sorted(timing.arrived for timing in timings)[2] > 0  # it came when another had ended


def test_the_table_with_speculation_at_three_loads(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    arms = "full-and-piecewise,speculation-draft-eager,speculation-draft-piecewise,speculation-draft-full"
    arguments = ["--model", "trained", "--rate", "200,inf", "--in-flight", "2", "--requests", "5", "--k", "3"]
    assert serve.main([*arguments, "--arms", arms, "--json", str(path)]) == 0
    saved = json.loads(path.read_text())
    loads = ["200/s", "inf/s", "2 in flight"]
    assert saved["load"]["loads"] == loads
    assert saved["load"]["mean_length"] is None  # the drafts are the trained draft's
    names = [name for name in ARMS if written(name) in arms.split(",")]
    assert list(saved["results"]) == [f"{name}, {one}" for name in names for one in loads]
    drafted = set()
    for found in saved["results"].values():
        assert (found["requests"], found["dropped"], found["preemptions"]) == (5, 0, 0)
        assert found["ttft_median_ms"] > 0
        assert found["itl_p99_ms"] >= found["itl_median_ms"] > 0
        assert 1 <= found["mean_in_flight"] <= (2 if found["load"] == "2 in flight" else 4.1)
        if found["arm"].startswith("speculation"):
            assert 1 < found["mean_length"] <= 4
            assert len(found["per_position"]) == 3
            drafted.add((found["mean_length"], *found["per_position"]))
    assert len(drafted) == 1  # neither the load nor the draft's mode changes what is accepted


def test_a_limit_leaves_out_the_loads_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "2", "--arms", "eager", "--limit", "1e-9", "--json", str(tmp_path / "serve.json")]
    assert serve.main(arguments) == 0
    assert "eager: not begun; 1e-09 s have passed" in capsys.readouterr().err
    assert not (tmp_path / "serve.json").exists()


def test_models_that_do_not_fit_are_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "trained", "--requests", "2", "--arms", "speculation-draft-full"]
    assert serve.main([*arguments, "--k", "300"]) == 1
    assert "num_draft_tokens is 300; expected below max_model_len" in capsys.readouterr().err


def test_the_serving_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    assert (
        serve.main(["--requests", "3", "--rate", "100", "--arms", "eager,full-decode-only", "--json", str(path)]) == 0
    )
    printed = capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert list(saved["results"]) == ["eager", "full-decode-only"]
    assert saved["load"]["mean_length"] == 2.4
    assert "ITL ms mean" in printed
    if not torch.cuda.is_available():
        assert "NOT speed" in printed
    with pytest.raises(SystemExit):
        serve.main(["--arms", "none"])
