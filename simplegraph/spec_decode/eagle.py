"""EAGLE drafting in graphs: one graph for the draft's prefill, another for all drafts after the first.

proposals = Proposals(num_slots=64, num_draft_tokens=5, device="cuda")
drafter = EagleDrafter(draft, prefill, decode, proposals, num_draft_tokens=5)
drafter.capture()
...
metadata.set(query_lens, seq_lens, block_table, ahead=4, num_tokens=..., num_reqs=...)   # for target and draft
...
drafter.load(tokens, positions, states, last, slots)     # at the end of the target's forward
drafter.draft(num_reqs * 6, num_reqs, 6)                 # then proposals.tokens has the next drafts

The draft has a KV cache of its own, with the target's page ids and slots. Keys and values of refused drafts lie beyond
their request's length, and the next round overwrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend
from simplegraph.attention.layers import attending
from simplegraph.attention.metadata.step_arrays import check_counts
from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import ConfigError, InputError
from simplegraph.batch.dispatch import Dispatch
from simplegraph.batch.sizes import BatchDescriptor, default_sizes
from simplegraph.device.protocol import GraphPool
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.stats import CaptureSummary
from simplegraph.program.breaks.marks import eager_break
from simplegraph.spec_decode.advance import follow, upcoming
from simplegraph.spec_decode.buffers import DraftBuffers, DraftModel, Proposals

_MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


class EagleDrafter:
    """Drafts K tokens for each request after the target's step.

    The draft's prefill runs over the tokens that the target just computed: K + 1 per request in a uniform full graph,
    or any other batch. It gives the first draft. The other K - 1 come from one graph of K - 1 decode steps, which
    advances positions, slots and lengths on the device.

    Args:
        model: the draft model, on its device.
        prefill: attention over the draft's cache and the metadata of the target's step.
        decode: attention over the draft's cache and its own metadata. It reads lengths on the device, as FlashInfer,
            which plans on the host, does not; the prefill may use that.
        proposals: receives the drafts.
        num_draft_tokens: K.
        mode: of the graphs: NONE, PIECEWISE, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.
        capture_sizes: sizes in requests, for decode steps and for uniform prefills of K + 1 tokens per request; by
            default the library's sizes up to the most requests possible.
        mixed_capture_sizes: sizes in tokens of a piecewise prefill; by default the library's.
        pool: graph memory to share with the target's manager or with other drafters.
        progress: show a progress bar while capturing.

    Attributes:
        prefill_manager, decode_manager: of the two kinds of graphs; decode_manager is None for K = 1.
        num_draft_tokens: K.

    Raises:
        ConfigError: K is below 1 or more than the metadata or `proposals` can hold; the backends do not match; the mode
            is another.

    Source: EAGLE (arXiv 2401.15077).
    """

    def __init__(
        self,
        model: DraftModel,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        proposals: Proposals,
        *,
        num_draft_tokens: int,
        mode: CudaGraphMode | str = CudaGraphMode.FULL_AND_PIECEWISE,
        capture_sizes: Sequence[int] | None = None,
        mixed_capture_sizes: Sequence[int] | None = None,
        pool: GraphPool | None = None,
        progress: bool = False,
    ) -> None:
        self.model, self.num_draft_tokens, self.proposals = model, num_draft_tokens, proposals
        _check_fit(prefill, decode, proposals, num_draft_tokens)
        mode = CudaGraphMode.parse(mode)
        if mode.name not in _MODES:
            raise ConfigError(f"mode is {mode.name}; a drafter runs in one of {', '.join(_MODES)}.")
        self._prefill_backend, self._decode_backend, self._metadata = prefill, decode, decode.metadata
        most = min(prefill.metadata.max_num_reqs, proposals.num_slots)
        self._buffers = DraftBuffers(model, prefill.metadata.max_num_tokens, most, proposals, prefill.cache.dtype)
        make = functools.partial(_manager, max_num_reqs=most, capture_sizes=capture_sizes, progress=progress)
        self.prefill_manager = make(
            prefill, num_draft_tokens + 1, mode, mixed_capture_sizes=mixed_capture_sizes, pool=pool
        )
        self.decode_manager: CudaGraphManager | None = None
        if num_draft_tokens > 1:
            mode = CudaGraphMode.FULL_DECODE_ONLY if mode.has_full() else mode
            # With one token per request, sizes in requests are sizes in tokens, for piecewise graphs as well.
            self.decode_manager = make(decode, 1, mode, mixed_capture_sizes=None, pool=self.prefill_manager.pool)

    def capture(self) -> list[CaptureSummary]:
        """Capture every graph and return a summary of each kind.

        Raises:
            CaptureError: as `CudaGraphManager.capture`.
        """
        self._buffers.forget()
        summaries = [self.prefill_manager.capture(self._prefill)]
        if self.decode_manager is not None:
            self._buffers.finish(self._metadata.max_model_len)
            summaries.append(self.decode_manager.capture(self._decode))
        return summaries

    def dispatch(self, num_tokens: int, num_reqs: int, uniform_query_len: int | None) -> Dispatch:
        """Decide how the draft's prefill of a batch runs; set the target's metadata to at least its shape."""
        return self.prefill_manager.dispatch(num_tokens, num_reqs, uniform_query_len)

    def padded_reqs(self, num_reqs: int) -> int:
        """Return the padded requests of the draft's decode steps; set the target's metadata to at least as many."""
        manager = self.decode_manager
        return num_reqs if manager is None else manager.dispatch(num_reqs, num_reqs, 1).descriptor.num_tokens

    def load(self, input_ids: Tensor, positions: Tensor, states: Tensor, last: Tensor, slots: Tensor) -> None:
        """Copy the target's results for the next `draft`; graph-safe, so that it can end the target's graph.

        Args:
            input_ids: (T,) int64, the token that follows each position: the step's tokens, shifted by one.
            positions: (T,) int64.
            states: (T, state_size), the dtype of the draft's cache: the target's states at these positions.
            last: (R,) int64, the row of each request's last accepted token; its later rows are ignored.
            slots: (R,) int64, each request's row of `Proposals.tokens`.

        Raises:
            InputError: the states' shape or dtype is not the draft model's, or there are too many rows.
        """
        self._buffers.load(input_ids, positions, states, last, slots)

    def draft(self, num_tokens: int, num_reqs: int, uniform_query_len: int | None) -> None:
        """Write drafts for the loaded batch to `proposals`; does not synchronize.

        Args:
            num_tokens: tokens of the target's step, as passed to its dispatcher.
            num_reqs: as `num_tokens`.
            uniform_query_len: as `num_tokens`.

        Raises:
            InputError: the target's step has another shape, or was set without pages for the drafts.
        """
        live = self._prefill_backend.metadata.batch
        if uniform_query_len is not None and not live.has_query_len(uniform_query_len):
            raise InputError(
                f"uniform_query_len is {uniform_query_len}, but the target's step has requests of "
                f"{sorted(live.query_lens)} tokens. Run prompts in a separate step, without uniform_query_len."
            )
        manager = self.decode_manager
        batch = None if manager is None else manager.dispatch(num_reqs, num_reqs, 1)
        more, rows = self.num_draft_tokens - 1, num_reqs if batch is None else batch.descriptor.num_tokens
        if live.ahead < more or live.padded_reqs < rows:
            raise InputError(
                f"the target's step was set with ahead={live.ahead} and {live.padded_reqs} requests, padding included; "
                f"the draft's steps need ahead={more} and num_reqs={rows} at least. Pass them to BatchMetadata.set."
            )
        self.prefill_manager.run(self.dispatch(num_tokens, num_reqs, uniform_query_len), self._prefill)
        if manager is not None and batch is not None:
            self._metadata.follow(live, rows, more)
            manager.run(batch, self._decode)

    def reset(self) -> None:
        """Drop every graph."""
        for manager in (self.prefill_manager, self.decode_manager):
            if manager is not None:
                manager.reset()

    def _prefill(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Run the draft over the target's results, for the first draft of each request."""
        buffers, rows = self._buffers, descriptor.num_tokens
        with attending(self._prefill_backend, mode, descriptor):
            fused = self.model.fuse(buffers.states[:rows])
            outputs, hidden = self.model(buffers.input_ids[:rows], buffers.positions[:rows], fused)
        self._begin(outputs, hidden)

    # An eager break: a piecewise graph does not know how many requests its rows belong to.
    @eager_break(padded=True)
    def _begin(self, outputs: Tensor, hidden: Tensor) -> None:
        """Choose the first draft of each request: in a full graph of the padded requests, else of the real ones."""
        buffers, seq_lens = self._buffers, self._prefill_backend.live.seq_lens
        last = buffers.last_rows(seq_lens)
        tokens = self.model.choose(outputs.index_select(0, last))
        buffers.keep(tokens, buffers.positions.index_select(0, last), hidden.index_select(0, last))
        buffers.publish(seq_lens)

    def _decode(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Run the steps after the first draft."""
        buffers, metadata, rows = self._buffers, self._metadata, descriptor.num_tokens
        steps, drafts = self.num_draft_tokens - 1, []
        with attending(self._decode_backend, mode, descriptor):
            live, most = metadata.view(rows, rows), metadata.max_model_len
            limits = follow(live, self._prefill_backend.metadata.view(rows, rows), steps, most)
            last = buffers.last_positions[:rows]
            ids, hidden = buffers.tokens[:rows], buffers.hidden[:rows]
            ahead = upcoming(last, limits, live.block_table, metadata.page_size, steps, most)
            for positions, slots, seq_lens in zip(*ahead, strict=True):
                live.slot_mapping.copy_(slots)
                live.seq_lens.copy_(seq_lens)
                out, hidden = self.model(ids, positions, hidden)
                ids = self.model.choose(out)
                drafts.append(ids)
        buffers.add(torch.stack(drafts, dim=1))
        buffers.publish(limits)


def _manager(
    backend: AttentionBackend,
    query_len: int,
    mode: CudaGraphMode,
    *,
    max_num_reqs: int,
    capture_sizes: Sequence[int] | None,
    mixed_capture_sizes: Sequence[int] | None,
    **shared: Any,
) -> CudaGraphManager:
    """Make the manager of graphs over requests of `query_len` tokens each, with the backend as its hooks."""
    metadata = backend.metadata
    most = min(max_num_reqs, metadata.max_num_tokens // query_len)
    reqs = default_sizes(most) if capture_sizes is None else sorted({min(size, most) for size in capture_sizes})
    settings: dict[str, Any] = {"capture_sizes": reqs if query_len == 1 else mixed_capture_sizes}
    if mode.separate_routine():
        settings |= {"uniform_query_len": query_len, "decode_capture_sizes": [size * query_len for size in reqs]}
    manager = CudaGraphManager(
        mode=mode,
        device=backend.device,
        support=backend.support,
        max_num_tokens=metadata.max_num_tokens,
        max_num_seqs=max_num_reqs,
        name="draft decode" if query_len == 1 else "draft prefill",
        **settings,
        **shared,
    )
    manager.add_hooks(backend)
    return manager


def _check_fit(prefill: AttentionBackend, decode: AttentionBackend, proposals: Proposals, drafts: int) -> None:
    """Refuse backends and numbers of drafts that do not match."""
    of_prefill, of_decode = prefill.metadata, decode.metadata
    check_counts(num_draft_tokens=drafts)
    most = min(of_prefill.max_model_len, of_prefill.max_num_tokens) - 1
    if drafts > most:
        raise ConfigError(
            f"num_draft_tokens is {drafts}; expected at most {most}: a request's step of {drafts + 1} tokens must "
            f"fit into max_model_len={of_prefill.max_model_len} and max_num_tokens={of_prefill.max_num_tokens}."
        )
    if drafts > proposals.num_draft_tokens:
        raise ConfigError(f"num_draft_tokens is {drafts}; proposals holds {proposals.num_draft_tokens}.")
    if decode.cache is not prefill.cache:
        raise ConfigError("prefill and decode have different caches; build both with the draft's one cache.")
    if drafts > 1 and not decode.reads_lengths_on_device:
        raise ConfigError(
            f"decode is {decode.name}, which plans on the host; the draft's decode steps are one graph, whose lengths "
            "only the device knows. Take TritonDecodeBackend, FlashAttentionBackend or SDPABackend for it."
        )
    if of_decode is of_prefill:
        raise ConfigError("prefill and decode share one BatchMetadata; give decode a separate one.")
    if of_decode.max_model_len != of_prefill.max_model_len:
        raise ConfigError(
            f"max_model_len of decode's metadata is {of_decode.max_model_len}, "
            f"prefill's is {of_prefill.max_model_len}; expected the same."
        )
    if of_decode.max_num_reqs < of_prefill.max_num_reqs:
        raise ConfigError(
            f"max_num_reqs of decode's metadata is {of_decode.max_num_reqs}, below prefill's {of_prefill.max_num_reqs}."
        )
