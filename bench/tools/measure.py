"""Devices, clocks and memory counters; on a CPU the same calls, without a device to wait for."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType

from bench.tools.replays import timed

Figures = dict[str, Any]
_NO_POOL = (0, 0)  # the allocator's name for memory outside private pools
Call = Callable[[], object]

NOT_SPEED = "No GPU here: the graphs are the library's emulator, which checks behaviour. Times are NOT speed."


def say(message: str) -> None:
    """Print a line of progress to stderr, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[bench] {message}", file=sys.stderr, flush=True)


def device_of(name: str | None = None) -> torch.device:
    """Return the named device, or the GPU if there is one; does not initialize CUDA."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def with_index(device: torch.device) -> torch.device:
    """Return a GPU device with the index of the current one; other devices unchanged."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


@contextlib.contextmanager
def few_threads(device: torch.device) -> Iterator[None]:
    """Use one thread on a CPU: small operators gain nothing from more, and wait long if cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronize(device: torch.device) -> None:
    """Wait for the device if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timeline:
    """Seconds from the built model to each mark, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        synchronize(device)
        self._start = time.perf_counter()

    def mark(self, name: str) -> None:
        """Record the time until now; the first mark of a name counts."""
        synchronize(self._device)
        self.seconds.setdefault(name, time.perf_counter() - self._start)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory counters of one device at one moment, in bytes.

    Attributes:
        free: of the device; other processes on it count, too.
        reserved: by this process's allocator, graph pools included.
        pools: of that, in private pools, which graphs have; no other process and no cache of eager calls counts.
    """

    free: int
    reserved: int
    pools: int

    @classmethod
    def now(cls, device: torch.device, *, release: bool = True) -> DeviceMemory | None:
        """Read the counters, after cached memory was released if `release`; None on a CPU."""
        if device.type != "cuda":
            return None
        torch.cuda.synchronize(device)
        if release:
            gc.collect()
            torch.cuda.empty_cache()
        index = with_index(device).index
        segments: list[dict[str, Any]] = torch.cuda.memory.memory_snapshot()  # type: ignore[no-untyped-call]
        own = (each for each in segments if each.get("device", index) == index)
        pools = sum(each["total_size"] for each in own if tuple(each["segment_pool_id"]) != _NO_POOL)
        return cls(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device), pools)

    def spent(self, later: DeviceMemory) -> dict[str, int]:
        """Return the bytes kept between two moments: taken from the device, reserved, and reserved in pools."""
        return {
            "device_bytes": self.free - later.free,
            "reserved_bytes": later.reserved - self.reserved,
            "pool_bytes": later.pools - self.pools,
        }


def seconds(call: Call, device: torch.device) -> float:
    """Measure the wall time of one call, the device's work included."""
    synchronize(device)
    with timed(call, 1) as call:
        started = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - started


def step_milliseconds(call: Call, device: torch.device, *, warmup: int = 5, steps: int = 50) -> float:
    """Measure the median time of one call in ms; on a GPU by its events, with calls issued back to back."""
    for _ in range(warmup):
        call()
    synchronize(device)
    with timed(call, steps) as call:
        if device.type != "cuda":
            return statistics.median(_timed(call) for _ in range(steps)) * 1e3
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        synchronize(device)
    return statistics.median(first.elapsed_time(second) for first, second in itertools.pairwise(marks))


def in_turn(calls: Mapping[str, Call], device: torch.device, *, rounds: int, steps: int) -> dict[str, float]:
    """Measure each call in ms: medians over rounds in which all take turns, so that clock drift affects all alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(step_milliseconds(call, device, warmup=min(5, steps), steps=steps))
    return {name: statistics.median(ms) for name, ms in taken.items()}


def gpu_busy(call: Call, device: torch.device, *, calls: int = 20) -> dict[str, float]:
    """Measure `kernel_ms` of a call's kernels and copies, and `busy_share`, their share of its wall time.

    Calls are issued back to back; the wall time is that of calls without the profiler. Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    wall = seconds(lambda: [call() for _ in range(calls)], device) / calls * 1e3
    kernels = kernel_milliseconds(call, calls)
    return {"kernel_ms": kernels, "busy_share": kernels / wall}


def kernel_milliseconds(call: Call, calls: int = 10) -> float:
    """Sum the durations of a call's kernels and copies, in ms; needs a GPU."""
    return sum(us for _, us in kernels_by_name(call, calls).values()) / 1e3


def kernels_by_name(call: Call, calls: int = 10) -> dict[str, tuple[float, float]]:
    """Return how often each kernel and copy runs in a call, and its us in total, by its name; needs a GPU."""
    synchronize(torch.device("cuda"))
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile, timed(call, calls) as call:
        for _ in range(calls):
            call()
        synchronize(torch.device("cuda"))
    found: dict[str, tuple[float, float]] = {}
    for event in profile.events():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            count, us = found.get(event.name, (0.0, 0.0))
            found[event.name] = count + 1 / calls, us + event.time_range.elapsed_us() / calls
    return found


def host_microseconds(call: Call, device: torch.device, *, warmup: int = 5, calls: int = 50) -> float:
    """Measure the median time to issue one call, in us, without waiting for its result.

    The device is idle before each call, so a full launch queue never makes the host wait.
    """
    for _ in range(warmup):
        call()
    seconds = []
    with timed(call, calls) as call:
        for _ in range(calls):
            synchronize(device)
            seconds.append(_timed(call))
    synchronize(device)
    return statistics.median(seconds) * 1e6


def _timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
