"""CUDA graphs for any PyTorch module, without a compiler.

Example:
    >>> import simplegraph as sg
    >>> model = sg.wrap(module.eval(), capture_sizes=[1, 2, 4, 8])
    >>> with torch.inference_mode():
    ...     y = model(x)  # eager, captured, or replayed; the answer is eager's
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplegraph._version import __version__ as __version__
    from simplegraph.batch.descriptor import BatchDescriptor as BatchDescriptor
    from simplegraph.batch.dispatch import Dispatch as Dispatch
    from simplegraph.batch.dispatch import Dispatcher as Dispatcher
    from simplegraph.batch.sizes import SizePlan as SizePlan
    from simplegraph.batch.sizes import plan_sizes as plan_sizes
    from simplegraph.checking.check import CheckReport as CheckReport
    from simplegraph.checking.check import check as check
    from simplegraph.config import AttentionCGSupport as AttentionCGSupport
    from simplegraph.config import CudaGraphConfig as CudaGraphConfig
    from simplegraph.config import CudaGraphMode as CudaGraphMode
    from simplegraph.context import describe as describe
    from simplegraph.context import eager as eager
    from simplegraph.distributed import RankGroup as RankGroup
    from simplegraph.distributed import ShapeConsensus as ShapeConsensus
    from simplegraph.errors import BreakError as BreakError
    from simplegraph.errors import CaptureError as CaptureError
    from simplegraph.errors import CaptureSizeError as CaptureSizeError
    from simplegraph.errors import ConfigError as ConfigError
    from simplegraph.errors import EmulatorError as EmulatorError
    from simplegraph.errors import InputError as InputError
    from simplegraph.errors import RankError as RankError
    from simplegraph.errors import ReplayError as ReplayError
    from simplegraph.errors import SimpleGraphError as SimpleGraphError
    from simplegraph.errors import StaleGraphError as StaleGraphError
    from simplegraph.errors import VerificationError as VerificationError
    from simplegraph.graph.breaks.marks import break_at as break_at
    from simplegraph.graph.breaks.marks import eager_break as eager_break
    from simplegraph.manager.hooks import GraphHooks as GraphHooks
    from simplegraph.manager.jobs import CaptureSummary as CaptureSummary
    from simplegraph.manager.jobs import MemoryEstimate as MemoryEstimate
    from simplegraph.manager.manager import CudaGraphManager as CudaGraphManager
    from simplegraph.module.mixin import CudaGraphWrapper as CudaGraphWrapper
    from simplegraph.module.mixin import cuda_graph as cuda_graph
    from simplegraph.module.mixin import graph_pool as graph_pool
    from simplegraph.module.mixin import unwrap as unwrap
    from simplegraph.module.mixin import wrap as wrap
    from simplegraph.reasons import Reason as Reason

# Where each public name lives; modules are imported at the first use of one of their names.
_HOMES = {
    "_version": ("__version__",),
    "batch.descriptor": ("BatchDescriptor",),
    "batch.dispatch": ("Dispatch", "Dispatcher"),
    "reasons": ("Reason",),
    "batch.sizes": ("SizePlan", "plan_sizes"),
    "checking.check": ("CheckReport", "check"),
    "config": ("AttentionCGSupport", "CudaGraphConfig", "CudaGraphMode"),
    "distributed": ("RankGroup", "ShapeConsensus"),
    "graph.breaks.marks": ("break_at", "eager_break"),
    "errors": (
        "BreakError",
        "CaptureError",
        "CaptureSizeError",
        "ConfigError",
        "EmulatorError",
        "InputError",
        "RankError",
        "ReplayError",
        "SimpleGraphError",
        "StaleGraphError",
        "VerificationError",
    ),
    "manager.jobs": ("CaptureSummary", "MemoryEstimate"),
    "manager.hooks": ("GraphHooks",),
    "manager.manager": ("CudaGraphManager",),
    "context": ("describe", "eager"),
    "module.mixin": ("CudaGraphWrapper", "cuda_graph", "graph_pool", "unwrap", "wrap"),
}
logging.getLogger("simplegraph").addHandler(logging.NullHandler())

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'simplegraph' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"simplegraph.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
