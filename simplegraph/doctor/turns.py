"""Times two ways to make one call in turns, since the speed of a shared host may change within seconds."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_CALLS, _BLOCK_SECONDS = 8, 0.06  # calls of a block that are timed, and seconds that it takes, at most
_TURNS, _SECONDS = 3, 1.0  # the fewest turns, and the seconds after which none begins


class Way(NamedTuple):
    """A way to make a call.

    Attributes:
        call: the call.
        context: makes a context that its blocks run in; entering it is not timed.
    """

    call: Callable[[], object]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def in_turns(
    first: Way, second: Way, wait: Callable[[], object], *, calls: float = math.inf, seconds: float = _SECONDS
) -> tuple[float, float]:
    """Return the median time of a call in ms, for both ways, in the turn whose ratio of the two is the median.

    A turn is a block of calls of each way. The ratio is taken within a turn, when the host was equally fast for both.

    Args:
        first: the one way.
        second: the other.
        wait: waits for the work of a call.
        calls: timed calls of each way after which no turn begins.
        seconds: after which no turn begins, if there were three.
    """
    turns: list[tuple[float, float]] = []
    counts, began = [0, 0], time.perf_counter()
    while min(counts) < calls and (len(turns) < _TURNS or time.perf_counter() - began < seconds):
        blocks = [_block(way, wait, min(_CALLS, calls - min(counts))) for way in (first, second)]
        counts = [count + len(block) for count, block in zip(counts, blocks, strict=True)]
        turns.append((statistics.median(blocks[0]) * 1e3, statistics.median(blocks[1]) * 1e3))
    turns.sort(key=lambda turn: turn[0] / turn[1])
    return turns[(len(turns) - 1) // 2]


def _block(way: Way, wait: Callable[[], object], calls: float) -> list[float]:
    """Return the seconds that calls took: not of the first, before which the other way ran, unless it is the only one.

    A call of a graph may look at more then, and caches of the host are cold.
    """
    taken: list[float] = []
    with way.context():
        while len(taken) <= calls and sum(taken) < _BLOCK_SECONDS:
            wait()
            started = time.perf_counter()
            way.call()
            wait()
            taken.append(time.perf_counter() - started)
    return taken[1:] or taken
