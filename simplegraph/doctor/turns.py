"""Time two variants of a call in turns, since the speed of a shared host may change within seconds."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_CALLS, _BLOCK_SECONDS = 8, 0.06  # the most timed calls of a block, and its most seconds
_TURNS, _SECONDS = 3, 1.0  # the fewest turns, and the seconds after which no turn begins


class Way(NamedTuple):
    """A variant of a call, such as eager or by a graph.

    Attributes:
        call: the call.
        context: makes the context of its blocks; entering it is not timed.
    """

    call: Callable[[], object]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def in_turns(
    first: Way, second: Way, wait: Callable[[], object], *, calls: float = math.inf, seconds: float = _SECONDS
) -> tuple[float, float]:
    """Return the median times of both variants in ms, in the turn with the median ratio of the two.

    A turn is a block of calls of each variant. Within a turn, the host is equally fast for both.

    Args:
        first: the first variant.
        second: the second variant.
        wait: waits for the work of a call.
        calls: the number of timed calls of each variant after which no turn begins.
        seconds: the time after which no turn begins, if there were three turns.
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
    """Return the seconds of each call, without the first call, which follows the other variant, if there are several.

    The first call may make further checks, and caches of the host are cold.
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
