"""The context of a thread's calls: why they run eagerly, and the description of their batches."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import NamedTuple

from simplegraph.base.failures import described_line, running_line
from simplegraph.base.reasons import Reason

logger = logging.getLogger("simplegraph")

_UNDESCRIBED: tuple[int | None, int | None, int] = (None, None, 0)


class CallContext(NamedTuple):
    """The context of calls in this thread.

    Attributes:
        bypass: why the calls run eagerly; None if they may use graphs.
        batch: (number of requests, tokens of each request, active LoRAs); None for unknown numbers.
    """

    bypass: Reason | None
    batch: tuple[int | None, int | None, int]


class _CallState(threading.local):
    """The context of this thread."""

    context: CallContext | None = None


CALLS = _CallState()


@contextlib.contextmanager
def _calling(context: CallContext | None) -> Iterator[None]:
    before, CALLS.context = CALLS.context, context
    try:
        yield
    finally:
        CALLS.context = before


@contextlib.contextmanager
def bypassed(reason: Reason) -> Iterator[None]:
    """Run every wrapped module of this thread eagerly in the block, for this reason."""
    with _calling(CallContext(reason, described_batch())):
        yield


def outside_calls() -> contextlib.AbstractContextManager[None]:
    """Remove the context in the block, so that calls of wrapped modules count as outermost calls."""
    return _calling(None)


def described_batch() -> tuple[int | None, int | None, int]:
    """Return the description of this thread's batches that `describe` set."""
    return CALLS.context.batch if CALLS.context is not None else _UNDESCRIBED


@contextlib.contextmanager
def describe(
    *, num_reqs: int | None = None, uniform_query_len: int | None = None, num_active_loras: int = 0
) -> Iterator[None]:
    """Describe the batches of the calls in the block, for modes that depend on it.

    With FULL_DECODE_ONLY and FULL_AND_PIECEWISE a batch has a full graph only if it is known to be uniform decode.
    Without a description every call counts as mixed.

    Args:
        num_reqs: requests in the batch.
        uniform_query_len: tokens of each request, when all have the same number.
        num_active_loras: LoRA adapters in use.
    """
    bypass = CALLS.context.bypass if CALLS.context is not None else None
    with _calling(CallContext(bypass, (num_reqs, uniform_query_len, num_active_loras))):
        yield


def eager() -> contextlib.AbstractContextManager[None]:
    """Run every wrapped module of this thread eagerly in the block, and count these calls.

    Use it around calls of wrapped modules. Inside a forward that is captured it has no effect, and warns; there, mark
    the part as an eager break (`eager_break`, `break_at`).
    """
    if CALLS.context is not None and CALLS.context.bypass is Reason.NESTED:
        _warn_of_eager(running_line())
    return bypassed(Reason.SWITCHED_OFF)


@functools.cache
def _warn_of_eager(line: tuple[str, int] | None) -> None:
    """Warn once for each line, although every size captures the line."""
    logger.warning(
        "simplegraph: eager()%s has no effect inside a forward that is captured; the part is captured, too.\n"
        "  To run it eagerly between two graphs mark it as a break (eager_break, break_at) under mode='PIECEWISE'; "
        "graphs for training have none. eager() is for calls of wrapped modules.",
        "" if line is None else f" at {described_line(*line)}",
    )
