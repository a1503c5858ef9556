"""Measures a call of a served model: eager, served, and its kernels alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.tools.fresh import Turn
from bench.tools.measure import Figures, kernel_milliseconds, seconds, step_milliseconds
from bench.tools.replays import bound

# New tokens of the generations whose difference is the time of a decode step, and how often each is made. The short
# one has a step already, since before the first one the cache is copied to where graphs read it.
LONG, SHORT = {"eager_ms": 11, "ms": 35}, 3
TIMES = {"eager_ms": 2, "ms": 4}
WARMUPS = 5  # calls until graphs serve
BUDGET = 0.12  # seconds of calls of one kind in a round
ROUNDS, MORE_ROUNDS = 2, 5  # at first, and in addition where a limit is near
NEAR = 0.9  # of eager's time
# A product of matrices this wide takes times so close to the least one, so often, if the GPU does nothing else.
WIDTH, CLOSE, OFTEN, TRIES = 2048, 1.2, 5, 500

AT_MOST_KERNELS = (1.15, 0.030)  # times the kernels' own time, plus so many ms


def within_kernels(figures: Figures) -> bool:
    """True if a call takes little longer than its kernels do."""
    factor, more = AT_MOST_KERNELS
    return bool(figures["ms"] <= factor * figures["kernel_ms"] + more)


def call_times(
    served: Callable[..., Any], plain: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, turn: Turn
) -> Figures:
    """Measure a call in ms: `eager_ms`, `ms` served, and `kernel_ms`, the sum of the served one's kernels."""
    calls = {"eager_ms": lambda: plain(*args, **kwargs), "ms": bound(served, *args, **kwargs)}
    for _ in range(WARMUPS):
        seconds(lambda: calls["ms"](), device)  # waits, so that nothing is left to do when another row measures
    steps = {name: _steps(call, device) for name, call in calls.items()}

    def measured(name: str) -> float:
        return step_milliseconds(calls[name], device, warmup=1 + (steps[name] > 2), steps=steps[name])

    def kernels() -> float:
        return kernel_milliseconds(calls["ms"], min(5, steps["ms"]))

    return _in_turns(measured, kernels, calls["ms"], device, turn)


def _steps(call: Callable[[], Any], device: torch.device) -> int:
    """Return how many calls a round takes."""
    call()
    return max(1, min(20, int(BUDGET / seconds(lambda: call(), device))))


def token_times(
    served: Callable[..., Any],
    plain: Callable[..., Any],
    args: Any,
    kwargs: Any,
    device: torch.device,
    turn: Turn,
    tokens_per_launch: int = 1,
) -> Figures:
    """Measure a decode step, as `call_times` does a call: a long generation's time less a short one's, by token."""

    def tokens(function: Callable[..., Any], count: int) -> Callable[[], Any]:
        steps = (count - 1) // tokens_per_launch  # the first token is the prompt's
        return bound(function, *args, **kwargs, max_new_tokens=count, min_new_tokens=count, each=steps)

    functions = {"eager_ms": plain, "ms": served}
    for _ in range(3):
        tokens(served, LONG["ms"])()
    tokens(plain, LONG["eager_ms"])()

    def measured(name: str) -> float:
        generations = [tokens(functions[name], count) for count in (LONG[name], SHORT)]
        long, short = (min(seconds(each, device) for _ in range(TIMES[name])) for each in generations)
        return (long - short) / (LONG[name] - SHORT) * 1e3

    def kernels() -> float:
        long, short = (kernel_milliseconds(tokens(served, count), 1) for count in (LONG["ms"], SHORT))
        return (long - short) / (LONG["ms"] - SHORT)

    return _in_turns(measured, kernels, tokens(served, SHORT), device, turn)


def _in_turns(
    measured: Callable[[str], float],
    kernels: Callable[[], float],
    call: Callable[[], Any],
    device: torch.device,
    turn: Turn,
) -> Figures:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # others run while this one waits for its turn
    with turn:
        _wait_alone(device)
        rounds = [{name: measured(name) for name in ("eager_ms", "ms")} for _ in range(ROUNDS)]
        if rounds[0]["ms"] > NEAR * rounds[0]["eager_ms"]:
            rounds += [{name: measured(name) for name in ("eager_ms", "ms")} for _ in range(MORE_ROUNDS)]
    kernel_milliseconds(call, 1)  # the profiler's first start takes long, and calls are slower after it
    with turn:
        _wait_alone(device)
        kernel_ms = kernels()
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]} | {"kernel_ms": kernel_ms}


def _wait_alone(device: torch.device) -> None:
    """Wait until the GPU has done what halted processes had given to it."""
    if device.type != "cuda":
        return
    square = torch.ones(WIDTH, WIDTH, device=device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    least, alike = math.inf, 0
    for _ in range(TRIES):
        began.record()
        square @ square
        ended.record()
        ended.synchronize()
        taken = began.elapsed_time(ended)
        least, alike = min(least, taken), alike + 1 if taken < CLOSE * least else 0
        if alike == OFTEN:
            return
