"""Answers transformers' question if it is being traced, so that a graph goes the way that eager goes.

Transformers leaves out a mask that hides nothing. It first asks its `is_tracing`, which is true in any capture, and
then makes the mask, whose values cannot be read there. Where there is no mask to read, or its values follow from Python
numbers (`KnownValues`), a capture can do as eager does. Where they are data, as in a mask that the
caller passes, the graph must have it, whatever it holds; the eager run of a proof then makes it, too, and its replays
are compared with that.

It also asks if it is being compiled, lest it caches what is then computed; in a capture that matters as well.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from simplegraph.base import patches
from simplegraph.base.extras import Notes
from simplegraph.base.operators import strided_tensors
from simplegraph.integrations.transformers.known_values import KnownValues

# Modules that ask, where they are loaded. Not `torch_compilable_check`, which would read values next.
_ASKING = ("masking_utils", "modeling_attn_mask_utils", "models.zamba.modeling_zamba", "models.pixio.modeling_pixio")
# Their functions that ask about a tensor, and read it if the answer is no.
_DECIDING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "find_packed_sequence_indices")


class _ThreadAnswers(threading.local):
    known: KnownValues | None = None  # answers are those of a capture
    asked = 0  # questions about a tensor
    decisions = 0  # functions that asked some
    left = 0  # such functions to come, in a run whose values are followed


_THREAD = _ThreadAnswers()


def _watch() -> None:
    """Count decisions that depend on a tensor from now on, and answer questions in captures."""
    _watch_caches()
    for name in _ASKING:
        module = sys.modules.get(f"transformers.{name}")
        for function in ("is_tracing", *_DECIDING) if module is not None else ():
            original = vars(module).get(function)
            if original is not None and original.__module__ != __name__:
                patches.replace(module, function, _is_tracing if function == "is_tracing" else _decision)


@contextlib.contextmanager
def counting(notes: Notes) -> Iterator[None]:
    """Note how many decisions depend on a tensor in an eager run, if any does; the most of all runs is kept."""
    _watch()
    before = _THREAD.decisions
    yield
    decisions = _THREAD.decisions - before
    if decisions:
        notes[__name__] = max(decisions, notes.get(__name__, 0))


@contextlib.contextmanager
def answering(notes: Notes) -> Iterator[None]:
    """Answer in here as in a capture, whether it is one or an eager run that its replays are compared with.

    Values that follow from Python numbers are followed until as many decisions were made as an eager run made.
    """
    _watch()
    expected = notes.get(__name__, 0)
    known, before = KnownValues(), (_THREAD.known, _THREAD.left)
    _THREAD.known, _THREAD.left = known, expected
    if expected:
        known.follow()
    try:
        yield
    finally:
        _THREAD.known, _THREAD.left = before
        known.end()


def _answers() -> KnownValues | None:
    return None if _THREAD.known is None or _THREAD.known.inside_break else _THREAD.known


def _is_tracing(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_tracing(tensor: Any = None) -> bool:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return original(tensor)
        _THREAD.asked += tensor is not None
        known = _answers()
        return original(tensor) if known is None else tensor is not None and not known.knows(tensor)

    return is_tracing


def _watch_caches() -> None:
    """Let functions that transformers caches run uncached in captures if they are passed tensors.

    A cache would keep a graph's memory, and never find it again: it tells tensors apart by identity. Transformers asks
    if it is being compiled, and then leaves the cache alone.
    """
    module: Any = sys.modules.get("transformers.pytorch_utils")
    original = getattr(module, "is_torchdynamo_compiling", None)
    if original is not None and original.__module__ != __name__:

        def is_compiling() -> bool:
            if original():
                return True
            if _answers() is None:
                return False
            asking = sys._getframe(1).f_locals
            given = (*asking.get("args", ()), *asking.get("kwargs", {}).values())
            return bool(strided_tensors(given))  # in tuples, too

        patches.replace(module, "is_torchdynamo_compiling", lambda _: is_compiling)


def _decision(original: Callable[..., Any]) -> Callable[..., Any]:
    def decide(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        asked, known = _THREAD.asked, _answers()
        if known is not None and _reads_position(original, args) and not known.knows(args[3]):
            return False
        found = original(*args, **kwargs)
        if _THREAD.asked != asked:
            _THREAD.decisions += 1
            _THREAD.left -= 1
            if known is not None and not _THREAD.left:
                known.end()
        return found

    return decide


def _reads_position(original: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """True if a decision is about a position in a static cache, which some versions read without having asked."""
    return original.__name__ == _DECIDING[0] and len(args) > 3 and isinstance(args[3], Tensor)
