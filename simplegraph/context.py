"""What is unusual about the calls of a thread at the moment: run eagerly, or described further."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from simplegraph.batch.reasons import Reason


class CallContext(NamedTuple):
    """What is unusual about calls in this thread at the moment."""

    bypass: Reason | None
    batch: tuple[int | None, int | None, int]


class _CallState(threading.local):
    context: CallContext | None = None


CALLS = _CallState()


@contextlib.contextmanager
def bypassed(reason: Reason) -> Iterator[None]:
    """Run every wrapped module of this thread eagerly in here, for this reason."""
    before = CALLS.context
    CALLS.context = CallContext(reason, before.batch if before else (None, None, 0))
    try:
        yield
    finally:
        CALLS.context = before


@contextlib.contextmanager
def outside_calls() -> Iterator[None]:
    """Forget in here what is unusual about the calls around: wrapped modules run as outside of them."""
    before = CALLS.context
    CALLS.context = None
    try:
        yield
    finally:
        CALLS.context = before


@contextlib.contextmanager
def describe(
    *, num_reqs: int | None = None, uniform_query_len: int | None = None, num_active_loras: int = 0
) -> Iterator[None]:
    """Describe the batches of the calls in here, where a module's arguments do not tell.

    FULL_DECODE_ONLY and FULL_AND_PIECEWISE give a batch its full graph only if it is known to be uniform
    decode; without a description every call counts as mixed.

    Args:
        num_reqs: requests in the batch.
        uniform_query_len: tokens of each request, when all have the same number.
        num_active_loras: LoRA adapters in use.
    """
    before = CALLS.context
    CALLS.context = CallContext(before.bypass if before else None, (num_reqs, uniform_query_len, num_active_loras))
    try:
        yield
    finally:
        CALLS.context = before


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Leave graphs alone in here: every wrapped module of this thread runs eagerly, and counts it."""
    with bypassed(Reason.EAGER_CONTEXT):
        yield
