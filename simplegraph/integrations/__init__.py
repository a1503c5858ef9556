"""CUDA graphs for models of other libraries, one folder per library; the models' code is unchanged.

What serves a module without being imported is registered here with the core, and loaded when it is first needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from simplegraph.base.extras import (
    batch_provers,
    engine_probes,
    length_servers,
    probes,
    report_pages,
    runner_kinds,
    sleepers,
    state_keys,
    touch_displays,
)


def register() -> None:
    """Register all that; called once, by the package's door."""
    engine_probes.append(_late("simplegraph.manager.observation", "engine_probes"))
    batch_provers.append(_late("simplegraph.manager.proof", "prove_batch"))
    probes.append(lambda _: importlib.import_module("simplegraph.manager.touched").Inspection())
    probes.append(_late("simplegraph.integrations.mask_decisions", "MaskDecisions"))
    state_keys.append(_late("simplegraph.integrations.switches", "known_switches"))
    runner_kinds.append(
        _when("training", lambda _: importlib.import_module("simplegraph.training.runner").TrainingRunner)
    )
    length_servers.append(_when("lengths", _late("simplegraph.integrations.lengths", "LengthBuckets")))
    report_pages.append(_late("simplegraph.doctor.page", "page"))
    touch_displays.append(_late("simplegraph.doctor.touches", "touched_lines"))
    sleepers.append(lambda: importlib.import_module("simplegraph.sleeping.sleeper"))


def _late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports and calls another."""
    return lambda *args: getattr(importlib.import_module(module), name)(*args)


def _when(setting: str, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that passes a configuration to `load` if it has the setting, and returns None without it."""
    return lambda config: load(config) if getattr(config, setting) else None
