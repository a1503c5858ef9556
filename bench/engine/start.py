"""Starts the engine that a config describes, with every graph captured."""

from __future__ import annotations

import gc

from bench.engine.config import EngineConfig
from bench.engine.engine import Engine
from bench.engine.spec import SpecEngine
from bench.engine.spec_config import SpecConfig
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama
from simplegraph import RankGroup


def start(
    config: EngineConfig, target: Llama, draft: Eagle | Eagle3 | None = None, ranks: RankGroup | None = None
) -> Engine:
    """Build an engine and capture its graphs; a `SpecEngine` if the config is for one.

    Raises:
        ValueError: the config is for speculation, and there is no draft.
        RuntimeError: a graph could not be captured.
    """
    engine: Engine
    if isinstance(config, SpecConfig):
        if draft is None:
            raise ValueError("the config is for speculation; expected a draft.")
        engine = SpecEngine(target, draft, config)
        summaries = engine.capture()
    else:
        engine = Engine(target, config, ranks)
        summaries = [engine.capture()]
    for summary in summaries:
        if summary.failed:
            raise RuntimeError(f"not captured: {summary.failed}")
    return engine


def drop_graphs(engine: Engine) -> None:
    """Drop every graph of an engine that is not used any more."""
    if isinstance(engine, SpecEngine):
        engine.runner.reset()
    else:
        engine.runner.manager.reset()
    gc.collect()
