"""CUDA graphs for models of other libraries, one folder per library; the models' code is unchanged.

What serves a module without being imported is registered here with the core, and loaded when it is first needed.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

from simplegraph.base.extras import (
    Notes,
    StateKey,
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
    state_keys.append(_switches)
    runner_kinds.append(_training)
    length_servers.append(_lengths)
    report_pages.append(_page)
    touch_displays.append(_touched)
    sleepers.append(_sleeper)


def _transformers_masks(notes: Notes, as_captured: bool) -> AbstractContextManager[None]:
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from simplegraph.integrations.transformers.masks import answering, counting

    return answering(notes) if as_captured else counting(notes)


def _switches(module: Any) -> StateKey | None:
    from simplegraph.integrations.switches import known_switches

    return known_switches(module)


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


def _touched(module: Any, manager: Any) -> tuple[str, ...]:
    from simplegraph.doctor.touches import touched_lines

    return touched_lines(module, manager)


def _page(report: Any) -> str:
    from simplegraph.doctor.page import page

    return page(report)


def _sleeper() -> Any:
    from simplegraph.sleeping import sleeper

    return sleeper
