"""Processes side by side: who measures is alone, a task that fails or hangs costs no other, and time ends."""

from __future__ import annotations

import itertools
import time
from typing import Any

from bench.tools import fresh
from bench.tools.fresh import ProcessFailed, Turn
from bench.tools.side_by_side import DRAINED, SideBySide


def works(seconds: float, gpu: int, turn: Turn) -> tuple[list[float], tuple[float, float]]:
    """Work for a while, then measure; returns the moments at which it worked, and from when to when it measured."""
    end, moments = time.monotonic() + seconds, [time.monotonic()]
    while time.monotonic() < end:
        moments.append(time.monotonic())
        if moments[-1] - moments[-2] > DRAINED:
            break  # it was halted
        time.sleep(0.005)
    with turn:
        began = time.monotonic()
        time.sleep(0.1)
        measured = began, time.monotonic()
    return moments, measured


def raises(gpu: int, turn: Turn) -> None:
    raise ValueError("no such model\nin detail")


def hangs(gpu: int, turn: Turn) -> None:
    time.sleep(60)


def tells_gpu(gpu: int, turn: Turn) -> int:
    return gpu


def test_a_process_that_measures_is_alone() -> None:
    tasks = {name: (works, (seconds,)) for name, seconds in {"long": 30.0, "short": 0.2, "middle": 0.4}.items()}
    found: dict[str, Any] = dict(SideBySide(workers=3, seconds=60, total=120).run(tasks))
    assert {*found} == {*tasks}
    for name, (_, (began, ended)) in found.items():
        for other, (moments, measured) in found.items():
            if other != name:
                assert not [moment for moment in moments if began < moment < ended]
                assert measured[1] <= began or ended <= measured[0]
    # The long one was halted while others measured: the time is missing in its work.
    moments = found["long"][0]
    assert max(later - earlier for earlier, later in itertools.pairwise(moments)) > DRAINED


def test_a_task_that_fails_or_hangs_costs_no_other() -> None:
    tasks: Any = {"raises": (raises, ()), "hangs": (hangs, ()), "works": (works, (0.1,))}
    found: dict[str, Any] = dict(SideBySide(workers=3, seconds=1, total=60).run(tasks))
    assert isinstance(found["raises"], ProcessFailed)
    assert found["raises"].reason == "ValueError: no such model"
    assert isinstance(found["hangs"], TimeoutError)
    assert isinstance(found["works"], tuple)


def test_what_is_done_is_kept_when_the_time_is_over() -> None:
    tasks: Any = {"hangs": (hangs, ()), "first": (tells_gpu, ()), "second": (tells_gpu, ())}
    fresh.call(time.sleep, 0, seconds=60)  # starts what processes are forked from
    began = time.monotonic()
    found = dict(SideBySide(workers=2, gpus=2, seconds=60, total=4).run(tasks))
    assert time.monotonic() - began < 30
    assert found == {"first": 0, "second": 1}
