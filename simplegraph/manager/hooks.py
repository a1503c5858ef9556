"""Hooks around captures and replays, for libraries beside this one."""

from __future__ import annotations

from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.config import AttentionCGSupport, CudaGraphMode


class GraphHooks:
    """Calls around a captured run, for a library beside this one. Override what is needed.

    Attention backends plan in `before_replay`; an offloader joins its copy stream in `end_of_forward`.

    Attributes:
        support: what its part of the forward can do in a full graph.
    """

    support: AttentionCGSupport = AttentionCGSupport.ALWAYS

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Outside the capture, before it begins: set up what this descriptor's graph will read."""

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Outside the graph, before every replay: refresh what the graph reads."""

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Inside the capture, after the forward: whatever runs here is recorded."""
