"""A small continuous-batching engine on simplegraph's public API, to read and to copy. Contains no measurements.

Example:
    >>> engine = Engine(model, EngineConfig(max_num_seqs=64, num_pages=2000))
    >>> engine.capture()
    >>> outputs = engine.generate([[1, 15, 7], [1, 20]], SamplingParams(max_tokens=32))
"""

from __future__ import annotations

from bench.engine.config import EngineConfig as EngineConfig
from bench.engine.engine import Engine as Engine
from bench.engine.engine import Output as Output
from bench.engine.request import EngineError as EngineError
from bench.engine.request import RequestError as RequestError
from bench.engine.request import SamplingParams as SamplingParams

__all__ = ["Engine", "EngineConfig", "EngineError", "Output", "RequestError", "SamplingParams"]
