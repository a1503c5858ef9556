"""CUDA graphs for models of other libraries, one folder per library; the models' code is unchanged.

What serves a module without being imported is registered here with the core, and loaded when it is first needed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from simplegraph.base.extras import (
    Notes,
    capture_contexts,
    length_servers,
    report_pages,
    runner_kinds,
    sleepers,
    state_keys,
    touch_displays,
)


def register() -> None:
    """Register all that; called once, by the package's door."""
    capture_contexts.append(_transformers_masks)
    state_keys.append(_late("simplegraph.integrations.switches", "known_switches"))
    runner_kinds.append(_training)
    length_servers.append(_lengths)
    report_pages.append(_late("simplegraph.doctor.page", "page"))
    touch_displays.append(_late("simplegraph.doctor.touches", "touched_lines"))
    sleepers.append(lambda: importlib.import_module("simplegraph.sleeping.sleeper"))


def _late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports and calls another."""
    return lambda *args: getattr(importlib.import_module(module), name)(*args)


def _transformers_masks(notes: Notes, as_captured: bool) -> AbstractContextManager[None]:
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from simplegraph.integrations.transformers.masks import answering, counting

    return answering(notes) if as_captured else counting(notes)


def _training(config: Any) -> Any:
    if not config.training:
        return None
    from simplegraph.training.runner import TrainingRunner

    return TrainingRunner


def _lengths(config: Any) -> Any:
    if not config.lengths:
        return None
    from simplegraph.integrations.lengths import LengthBuckets

    return LengthBuckets(config)
