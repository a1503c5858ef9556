"""Hooks around captures and replays, for libraries beside this one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.batch.descriptor import BatchDescriptor


class GraphHooks:
    """Calls around a captured run, for a library beside this one. Override what is needed.

    Attention backends plan in `before_replay`; an offloader joins its copy stream in `end_of_forward`.

    Attributes:
        support: what its part of the forward can do in a full graph.
        max_num_reqs: the most requests that its part of a step can have; None for any number. A manager of full graphs
            is made for no more (`max_num_seqs`), so that none is captured for a batch that cannot occur.
    """

    support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    max_num_reqs: int | None = None

    @property
    def settings(self) -> Mapping[str, object]:
        """Settings that must be the same on all ranks that capture together, by name."""
        return {}

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Outside the capture, before it begins: set up what this descriptor's graph will read."""

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Outside the graph, before every replay: refresh what the graph reads."""

    def undo_step(self) -> None:
        """Allow the last step to run once more: a proof undid what it wrote, and is about to replay it."""

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Inside the capture, after the forward: whatever runs here is recorded."""


def settings_of(hooks: Iterable[GraphHooks]) -> dict[str, object]:
    """Return the settings of several hooks."""
    return {name: value for each in hooks for name, value in each.settings.items()}
