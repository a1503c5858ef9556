"""A load of requests on the engine, and the latencies that their callers see."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.engine import Engine, SamplingParams
from bench.engine.request import Request
from bench.tools import text
from bench.tools.files import DATA

PERCENTILES = range(101)
LENGTHS = json.loads((DATA / "lengths.json").read_text(encoding="utf-8"))
MOST: int = LENGTHS["most_together"]


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of the load: its arrival time in seconds, and its tokens."""

    at: float
    prompt: list[int]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Load:
    """The way in which requests come.

    Args:
        rate: requests a second, on average (a Poisson process); infinity for all at once.
        in_flight: None, or that many requests are in flight all the time: one comes when another has ended.
    """

    rate: float = math.inf
    in_flight: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.in_flight is None else f"{self.in_flight} in flight"


@dataclasses.dataclass
class Timing:
    """Times of a request's arrival and of its tokens, in seconds."""

    arrived: float
    tokens: list[float] = dataclasses.field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.arrived

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies; tokens that come together, such as those of a speculative round, count as one."""
        return [after - before for before, after in itertools.pairwise(dict.fromkeys(self.tokens))]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single one."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


def draw_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Draw tokens of prompts and outputs from the long-tailed distribution of `data/lengths.json`.

    The same seed gives the same pairs, of which fewer are the first ones of more.
    """
    draw = random.Random(seed)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        pair = _draw_length(draw, LENGTHS["prompt"]), _draw_length(draw, LENGTHS["output"])
        if sum(pair) <= MOST:
            pairs.append(pair)
    return pairs


def _draw_length(draw: random.Random, shape: Mapping[str, float]) -> int:
    """Draw from a log-normal distribution, whose mean is that of the shape without its limits."""
    center = math.log(shape["mean"]) - shape["sigma"] ** 2 / 2
    while True:
        length = round(draw.lognormvariate(center, shape["sigma"]))
        if shape["least"] <= length <= shape["most"]:
            return length


def arrivals(count: int, rate: float, vocab_size: int, *, seed: int = 0, longest: int | None = None) -> list[Arrival]:
    """Make requests that arrive at random times.

    Args:
        count: number of requests.
        rate: requests a second, on average (a Poisson process); infinity for all at once.
        vocab_size: of the model.
        seed: of the times and of the lengths, which are the same at every rate.
        longest: the most tokens of prompt and output together; all lengths are scaled down to it.

    Raises:
        ValueError: the rate is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"the rate is {rate}; expected requests a second, above 0.")
    draw, now, found = random.Random(f"times {seed}"), 0.0, []
    scale = 1.0 if longest is None else min(1.0, longest / MOST)
    for index, pair in enumerate(draw_lengths(count, seed)):
        prompt, output = (max(1, int(length * scale)) for length in pair)
        found.append(Arrival(now, text.token_ids(prompt, vocab_size, start=101 * index).tolist(), output))
        now += draw.expovariate(rate)
    return found


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    clock: Callable[[], float] = time.perf_counter,
    in_flight: int | None = None,
) -> tuple[list[Timing], list[Request]]:
    """Serve a load in real time; return the times of each request's tokens, and the requests.

    Several ranks can serve it together if `clock` returns the same seconds on all of them.

    Args:
        engine: that serves.
        arrivals: the requests, by their times.
        clock: seconds.
        in_flight: the most requests that are given to the engine at once; the others arrive when one of these ends.
    """
    timings: dict[Request, Timing] = {}
    waiting = list(reversed(arrivals))
    start, began, running = clock(), time.perf_counter(), 0
    while waiting or not engine.idle:
        now = clock() - start
        while waiting and waiting[-1].at <= now and (in_flight is None or running < in_flight):
            arrival = waiting.pop()
            request = engine.add(arrival.prompt, SamplingParams(max_tokens=arrival.max_tokens))
            timings[request] = Timing(arrival.at if in_flight is None else now)
            running += 1
        if engine.idle:
            time.sleep(max(0.0, waiting[-1].at - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        for output in outputs:
            timings[output.request].tokens.append(now)
            running -= output.finished is not None
    return list(timings.values()), list(timings)


def count_steps(timings: Sequence[Timing]) -> int:
    """Count the steps that gave tokens, by their times."""
    return len({moment for timing in timings for moment in timing.tokens})


def mean_in_flight(timings: Sequence[Timing]) -> float:
    """Compute how many requests are in flight on average, while any is."""
    whole = covered = 0.0
    end = -math.inf
    for timing in sorted(timings, key=lambda timing: timing.arrived):
        last = timing.tokens[-1]
        whole += last - timing.arrived
        covered += max(0.0, last - max(end, timing.arrived))
        end = max(end, last)
    return whole / covered


def summary(timings: Sequence[Timing], requests: Sequence[Request]) -> dict[str, Any]:
    """Compute throughputs, and TTFT, TPOT and ITL in ms, with every percentile of ITL.

    `dropped` counts requests that did not get all the tokens they asked for.
    """
    seconds = max(timing.tokens[-1] for timing in timings) - min(timing.arrived for timing in timings)
    tokens = sum(len(timing.tokens) for timing in timings)
    series = {
        "ttft": [timing.ttft for timing in timings],
        "tpot": [timing.tpot for timing in timings if timing.tpot is not None],
        "itl": [gap for timing in timings for gap in timing.itl],
    }
    figures: dict[str, Any] = {
        "requests": len(timings),
        "dropped": sum(len(request.output) < request.params.max_tokens for request in requests),
        "preemptions": sum(request.preemptions for request in requests),
        "seconds": seconds,
        "requests_per_second": len(timings) / seconds,
        "tokens_per_second": tokens / seconds,
        "mean_in_flight": mean_in_flight(timings),
    }
    for name, values in series.items():
        figures |= {
            f"{name}_mean_ms": statistics.mean(values) * 1e3,
            f"{name}_median_ms": statistics.median(values) * 1e3,
            f"{name}_p99_ms": quantile(values, 0.99) * 1e3,
        }
    gaps = sorted(series["itl"])  # sorted once: `quantile` sorts again, which is cheap for a sorted list
    figures["itl_percentiles_ms"] = [quantile(gaps, share / 100) * 1e3 for share in PERCENTILES]
    return figures


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
