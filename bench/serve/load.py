"""A load of requests on the engine, and the latencies that their callers see."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engine import Engine, SamplingParams
from bench.engine.request import Request
from bench.tools import text

PERCENTILES = range(101)
LENGTHS = Path(__file__).parents[1] / "data" / "lengths.csv"


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of the load: its arrival time in seconds, and its tokens."""

    at: float
    prompt: list[int]
    max_tokens: int


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
        """Inter-token latencies."""
        return [after - before for before, after in itertools.pairwise(self.tokens)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single one."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


def arrivals(count: int, rate: float, vocab_size: int, *, seed: int = 0, longest: int | None = None) -> list[Arrival]:
    """Make requests that arrive at random times.

    Args:
        count: number of requests.
        rate: requests a second, on average (a Poisson process); infinity for all at once.
        vocab_size: of the model.
        seed: of the times and of the order of lengths.
        longest: the most tokens of prompt and output together; longer ones are cut.

    Raises:
        ValueError: the rate is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"the rate is {rate}; expected requests a second, above 0.")
    draw, now, found = random.Random(seed), 0.0, []
    with LENGTHS.open() as file:
        lengths = [(int(row["prompt"]), int(row["output"])) for row in csv.DictReader(file)]
    for index in range(count):
        prompt, output = draw.choice(lengths)
        if longest is not None:
            prompt = min(prompt, longest // 2)
            output = min(output, longest - prompt)
        found.append(Arrival(now, text.token_ids(prompt, vocab_size, start=101 * index).tolist(), output))
        now += draw.expovariate(rate)
    return found


def serve(
    engine: Engine, arrivals: Sequence[Arrival], clock: Callable[[], float] = time.perf_counter
) -> tuple[list[Timing], list[Request]]:
    """Serve a load in real time; return the times of each request's tokens, and the requests.

    Several ranks can serve it together if `clock` returns the same seconds on all of them.
    """
    timings: dict[Request, Timing] = {}
    waiting = list(reversed(arrivals))
    start, began = clock(), time.perf_counter()
    while waiting or not engine.idle:
        now = clock() - start
        while waiting and waiting[-1].at <= now:
            arrival = waiting.pop()
            timings[engine.add(arrival.prompt, SamplingParams(max_tokens=arrival.max_tokens))] = Timing(arrival.at)
        if engine.idle:
            time.sleep(max(0.0, waiting[-1].at - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        for output in outputs:
            timings[output.request].tokens.append(now)
    return list(timings.values()), list(timings)


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
