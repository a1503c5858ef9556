"""Two-batch overlap: a step runs as two micro-batches in one graph, collectives of one under the compute of the other.

A forward that can be split is a generator, which launches a collective, yields, and waits for the collective when it
goes on; meanwhile the other micro-batch computes. Both compute on one stream, and torch runs collectives with
``async_op=True`` on another. The host alternates between the two, so every rank launches the collectives of both in one
order, and one communicator serves both: with two, nothing in a graph orders their collectives alike on all ranks, and
NCCL may deadlock.

Source: vLLM's dual batch overlap, where threads hand over; SGLang's two-batch overlap, where operations yield, and its
cut within a request (SGLang #6328).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simplegraph.attention.layers import BackendGroup, LayerBackend, serving_layers
from simplegraph.attention.metadata.step_arrays import Ints, Pages, int64s
from simplegraph.attention.recurrent.states import StateMetadata
from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import ConfigError, InputError
from simplegraph.batch.dispatch import Dispatch
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.table import GraphHooks

logger = logging.getLogger("simplegraph")

Attention = LayerBackend | BackendGroup
# The forward of some rows; it yields wherever it has launched a collective and not waited for it.
Stages = Generator[None, None, Any]


class TwoBatchOverlap(GraphHooks):
    """Splits the steps of full graphs in two micro-batches. Joins the manager as hooks, in place of the backend.

    Steps go through `set`, and a forward asks `split` how its descriptor runs:

        def forward(mode, descriptor):
            if overlap.split(mode, descriptor):
                return torch.cat(overlap.run(mode, descriptor, lambda rows: model.stages(ids[rows], positions[rows])))
            with attending(overlap.whole, mode, descriptor):
                return model(ids[: descriptor.num_tokens], positions[: descriptor.num_tokens])

    Args:
        manager: of the graphs, without hooks of attention.
        whole: the model's backend, or group of backends, for steps that are not split.
        micro: two more such backends, each with metadata of its own, over the caches of `whole`.
        sizes: tokens of the full graphs that are split; None for all that can be, which are those of two rows or more.
            A split pays where collectives take long beside the compute; ``python -m bench.two_batch`` measures it.

    Attributes:
        chosen: the descriptors of graphs that are split.

    Raises:
        ConfigError: the manager has no full graphs, or none of a size, or the backends do not go together.
    """

    def __init__(
        self,
        manager: CudaGraphManager,
        whole: Attention,
        micro: Sequence[Attention],
        *,
        sizes: Collection[int] | None = None,
    ) -> None:
        mode = manager.dispatcher.mode
        if not mode.has_full():
            raise ConfigError(f"two-batch overlap needs full graphs, the manager's mode is {mode.name}; leave it out.")
        _check_backends(whole, micro)
        self.manager, self.whole, self.micro = manager, whole, tuple(micro)
        self.support, self.max_num_reqs = whole.support, whole.max_num_reqs
        pairs = ((d, micro_batches(d)) for kind, d in manager.descriptors() if kind is CudaGraphMode.FULL)
        able = {descriptor: parts for descriptor, parts in pairs if parts is not None}
        self._splits = {
            descriptor: parts for descriptor, parts in able.items() if sizes is None or descriptor.num_tokens in sizes
        }
        self.chosen = frozenset(self._splits)
        missing = {*(sizes or ())} - {descriptor.num_tokens for descriptor in able}
        if missing:
            choices = ", ".join(map(str, sorted({descriptor.num_tokens for descriptor in able})))
            raise ConfigError(f"no full graph of {min(missing)} tokens can be split; sizes may have {choices}.")
        self._step: BatchDescriptor | None = None  # whose halves were set last
        manager.add_hooks(self)

    @property
    def settings(self) -> Mapping[str, object]:
        return {"two_batch_overlap": "; ".join(map(str, sorted(self.chosen)))}

    def split(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> tuple[MicroBatch, MicroBatch] | None:
        """Return the micro-batches that a forward runs as; None if it runs whole.

        A step that was set for a split graph, which then turned out to be missing, runs eagerly in its halves, too.
        """
        eager = mode is CudaGraphMode.NONE and descriptor == self._step
        return self._splits.get(descriptor) if eager or mode is CudaGraphMode.FULL else None

    def run(self, mode: CudaGraphMode, descriptor: BatchDescriptor, stages: Callable[[slice], Stages]) -> list[Any]:
        """Run a forward as two micro-batches, in turn; call it where `split` does not return None.

        Args:
            mode: as the manager passes it to the forward.
            descriptor: as the manager passes it to the forward.
            stages: starts the forward of some rows; its layers call `attend` and `recur`.

        Returns:
            The results of the first and the second half's forwards.
        """
        serving = self._serving(mode, descriptor)
        for backend, part in serving:
            backend.enter(mode, part)
        waiting = []
        for (backend, _), (rows, _) in zip(serving, self._splits[descriptor], strict=True):
            with serving_layers(backend):
                waiting.append((backend, stages(rows)))
        return _in_turn(waiting)

    def set(self, batch: Dispatch, query_lens: int | Ints, seq_lens: Ints, tables: Sequence[Pages | Ints]) -> None:
        """Write a step, whole or in halves as its graph runs it; call before every step, outside the graph.

        Args:
            batch: the manager's answer for the step.
            query_lens: (num_reqs,) integers, tokens of each request in this step, or one number for all.
            seq_lens: (num_reqs,) integers, tokens in each request's KV cache, this step's included.
            tables: for each of `whole.members`, the table of its metadata: (num_reqs, n) pages, or (num_reqs,) slots
                of states.

        Raises:
            CaptureSizeError: the step is empty, or larger than its graph.
            InputError: the lengths or pages do not match. The step cannot be run then.
        """
        mode, descriptor = batch.mode, batch.descriptor
        parts = self.split(mode, descriptor) if mode is CudaGraphMode.FULL else None
        self._step = None
        lengths = int64s("seq_lens", seq_lens)
        full = mode is CudaGraphMode.FULL
        if parts is None:
            reqs = descriptor.num_reqs if full else len(lengths)
            _write(self.whole, query_lens, lengths, tables, descriptor.num_tokens, reqs)
            return
        for backend, table in zip(self.whole.members, tables, strict=True):
            if isinstance(backend.metadata, StateMetadata):  # a slot in both halves shows in neither
                backend.metadata.check_slots(int64s("slots", table), len(lengths))  # type: ignore[arg-type]
        halves = _halves(query_lens, lengths, parts[0].descriptor.num_tokens)
        for attention, (_, part), (queries, half_lengths, which) in zip(self.micro, parts, halves, strict=True):
            if len(half_lengths) or which.start == 0:
                half_tables = [table[which] for table in tables]
                _write(attention, queries, half_lengths, half_tables, part.num_tokens, part.num_reqs)
            else:  # all of it is padding
                _write_dummy(attention, part)
        self._step = descriptor

    def set_dummy(self, batch: Dispatch) -> None:
        """Write a step of padding alone, for a rank without requests that takes part in the collectives of others."""
        self._step = None
        for backend, part in self._serving(batch.mode, batch.descriptor):
            _write_dummy(backend, part)
        if self.split(batch.mode, batch.descriptor):
            self._step = batch.descriptor

    def repeat(self) -> None:
        """Allow the step that was set last to run once more.

        Raises:
            ReplayError: no step is set.
        """
        for attention in (self.whole,) if self._step is None else self.micro:
            for backend in attention.members:
                backend.metadata.repeat()

    def _serving(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[tuple[Attention, BatchDescriptor]]:
        """List the backends that serve a graph, each with the shape that it sees."""
        parts = self.split(mode, descriptor)
        if parts is None:
            return [(self.whole, descriptor)]
        return [(backend, part.descriptor) for backend, part in zip(self.micro, parts, strict=True)]

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        for backend, part in self._serving(mode, descriptor):
            backend.before_capture(mode, part)

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        for backend, part in self._serving(mode, descriptor):
            backend.before_replay(mode, part)

    def undo_step(self) -> None:
        for backend in (self.whole, *self.micro):
            backend.undo_step()

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        for backend, part in self._serving(mode, descriptor):
            backend.end_of_forward(mode, part)


def _halves(
    query_lens: int | Ints, lengths: npt.NDArray[np.int64], border: int
) -> tuple[tuple[Any, Any, slice], tuple[Any, Any, slice]]:
    """Return query lengths, lengths and requests of each half of a step, whose second begins at the token `border`.

    The request that is cut, if any, is the last of the first half and the first of the second.

    Raises:
        InputError: there is not one query length for each request.
    """
    queries = np.full(len(lengths), query_lens) if isinstance(query_lens, int) else int64s("query_lens", query_lens)
    if len(queries) != len(lengths):
        raise InputError(f"query_lens has {len(queries)} entries, seq_lens {len(lengths)}; expected one a request.")
    ends = np.add.accumulate(queries)
    starts = ends - queries
    last, first = int(np.searchsorted(starts, border, "left")), int(np.searchsorted(ends, border, "right"))
    later, earlier = np.maximum(ends[:last] - border, 0), np.maximum(border - starts[first:], 0)
    return (
        (queries[:last] - later, lengths[:last] - later, slice(0, last)),
        (queries[first:] - earlier, lengths[first:], slice(first, None)),
    )


def _in_turn(waiting: Sequence[tuple[Attention, Stages]]) -> list[Any]:
    """Run the stages of forwards in turn, each with its backends, until all have returned."""
    results: dict[int, Any] = {}
    while len(results) < len(waiting):
        for index, (backend, stages) in enumerate(waiting):
            if index not in results:
                try:
                    with serving_layers(backend):
                        next(stages)
                except StopIteration as end:
                    results[index] = end.value
    return [results[index] for index in range(len(waiting))]


def _write(
    attention: Attention, queries: Any, lengths: Any, tables: Sequence[Any], rows: int, reqs: int | None
) -> None:
    for backend, table in zip(attention.members, tables, strict=True):
        metadata: Any = backend.metadata  # whose `set` takes pages, or slots of states
        metadata.set(queries, lengths, table, num_tokens=rows, num_reqs=reqs)


def _write_dummy(attention: Attention, descriptor: BatchDescriptor) -> None:
    for backend in attention.members:
        backend.metadata.set_dummy(descriptor.num_tokens, descriptor.num_reqs, descriptor.uniform_query_len)


def _check_backends(whole: Attention, micro: Sequence[Attention]) -> None:
    """Refuse backends that share a step's buffers, or do not serve the same caches."""
    if len(micro) != 2:
        raise ConfigError(f"micro has {len(micro)} entries; expected the backends of two micro-batches.")
    backends = [backend for attention in (whole, *micro) for backend in attention.members]
    if len({id(backend.metadata) for backend in backends}) < len(backends):
        raise ConfigError("two backends share a metadata; expected one for each, since their steps are set together.")
    caches = [[id(getattr(backend, "cache", None)) for backend in attention.members] for attention in (whole, *micro)]
    if caches[0] != caches[1] or caches[0] != caches[2]:
        raise ConfigError(
            "the backends of micro-batches have other caches than those of whole steps; share the caches."
        )
    for name in ("support", "window", "scale", "softcap"):
        kinds = [[getattr(backend, name, None) for backend in attention.members] for attention in (whole, *micro)]
        if kinds[0] != kinds[1] or kinds[0] != kinds[2]:
            raise ConfigError(
                f"{name} of the backends is {kinds}; expected the same for micro-batches as for whole steps."
            )


class MicroBatch(NamedTuple):
    """A part of a graph's rows.

    Attributes:
        rows: of the whole batch.
        descriptor: its shape.
    """

    rows: slice
    descriptor: BatchDescriptor


def micro_batches(descriptor: BatchDescriptor) -> tuple[MicroBatch, MicroBatch] | None:
    """Split a shape in two nearly equal parts; None if it has a single row, or a single request of uniform decode.

    Requests of uniform decode stay whole. The rows of other batches are cut in the middle, wherever that is in a
    request: its later tokens belong to the second part.
    """
    unit = descriptor.uniform_query_len or 1
    count = descriptor.num_tokens // unit
    if count < 2:
        return None
    first = (count + 1) // 2 * unit
    bounds = itertools.pairwise((0, first, descriptor.num_tokens))
    one, other = (MicroBatch(slice(*bound), _part(descriptor, bound[1] - bound[0])) for bound in bounds)
    return one, other


def _part(descriptor: BatchDescriptor, num_tokens: int) -> BatchDescriptor:
    most = num_tokens // (descriptor.uniform_query_len or 1)
    num_reqs = None if descriptor.num_reqs is None else min(most, descriptor.num_reqs)
    return dataclasses.replace(descriptor, num_tokens=num_tokens, num_reqs=num_reqs)
