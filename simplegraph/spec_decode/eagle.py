"""EAGLE drafting in graphs: the draft's prefill in one, and all the tokens it drafts after the first in another.

proposals = Proposals(num_slots=64, num_draft_tokens=5, device="cuda")
drafter = EagleDrafter(draft, prefill, decode, proposals, num_draft_tokens=5)
drafter.capture()
...
metadata.set(query_lens, seq_lens, block_table, ahead=4, num_tokens=..., num_reqs=...)   # for target and draft
...
drafter.load(tokens, positions, states, last, slots)     # in the target's forward: what it verified
drafter.draft(num_reqs * 6, num_reqs, 6)                 # then proposals.tokens has the next drafts

The draft keeps keys and values of its own, on the same pages and slots as the target's. What a refused draft left
there lies beyond its request's length, and the next round writes over it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend, attending
from simplegraph.attention.metadata.reading import Ints
from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.batch.dispatch import Dispatch
from simplegraph.batch.sizes import default_sizes
from simplegraph.config import CudaGraphMode
from simplegraph.errors import ConfigError, InputError
from simplegraph.graph.breaks.marks import eager_break
from simplegraph.graph.device import GraphPool
from simplegraph.manager.jobs import CaptureSummary
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.spec_decode.advance import follow, upcoming
from simplegraph.spec_decode.buffers import DraftBuffers, Proposals, at_least_one
from simplegraph.spec_decode.model import DraftModel

_MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


class EagleDrafter:
    """Drafts K tokens for each request after the target's step.

    The draft's prefill runs over what the target just computed: K + 1 tokens of each request in a uniform full graph,
    or any batch. It gives the first draft. The K - 1 others come from one graph that decodes so many times, advancing
    positions, slots and lengths on the device; where the attention plans on the host, from one graph replayed for each.

    Args:
        model: the draft, on its device.
        prefill: attention over the draft's cache and the metadata of the target's step.
        decode: attention over the draft's cache and metadata of its own.
        proposals: where the drafts go.
        num_draft_tokens: K.
        mode: of the graphs: NONE, PIECEWISE, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.
        capture_sizes: in requests, of decode steps and of a prefill of K + 1 tokens each; the library's default ones up
            to the most that there can be.
        mixed_capture_sizes: in tokens, of a piecewise prefill; the library's default ones.
        pool: memory to share with the target's manager, or with other drafters.
        progress: show a bar while capturing.

    Attributes:
        prefill_manager, decode_manager: of the two kinds of graphs; no decode_manager for K = 1.
        num_draft_tokens: K.

    Raises:
        ConfigError: K is below 1 or beyond what the metadata or `proposals` hold; the backends do not fit each other.
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
            # Of one token each, requests are tokens where the graphs are piecewise, too.
            self.decode_manager = make(decode, 1, mode, mixed_capture_sizes=None, pool=self.prefill_manager.pool)

    @property
    def chained(self) -> bool:
        """True if all decode steps are one graph: the attention goes by the lengths on the device."""
        return self._decode_backend.reads_lengths_on_device

    def capture(self) -> list[CaptureSummary]:
        """Capture every graph; a summary of each kind.

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
        """How the draft's prefill of a batch will run; set the target's metadata to at least its shape."""
        return self.prefill_manager.dispatch(num_tokens, num_reqs, uniform_query_len)

    def padded_reqs(self, num_reqs: int) -> int:
        """Requests, padding included, that the draft's decode steps read: set the target's metadata to so many."""
        manager = self.decode_manager
        return num_reqs if manager is None else manager.dispatch(num_reqs, num_reqs, 1).descriptor.num_tokens

    def load(self, input_ids: Tensor, positions: Tensor, states: Tensor, last: Tensor, slots: Tensor) -> None:
        """Take what the target computed; graph-safe, so that it can be the end of the target's graph.

        Args:
            input_ids: (T,) int64, the token that came after each position: the step's tokens, shifted by one.
            positions: (T,) int64.
            states: (T, state_size), the target's states there.
            last: (R,) int64, for each request the row of its last token that counts. Rows after it are ignored.
            slots: (R,) int64, each request's row of `Proposals.tokens`.

        Raises:
            InputError: the states are not those that the draft was made for, or there are too many rows.
        """
        self._buffers.load(input_ids, positions, states, last, slots)

    def draft(
        self, num_tokens: int, num_reqs: int, uniform_query_len: int | None, seq_lens: Ints | None = None
    ) -> None:
        """Draft for the batch that was loaded, into `proposals`; waits for nothing.

        Args:
            num_tokens: of the target's step, as its dispatcher got it.
            num_reqs: as `num_tokens`.
            uniform_query_len: as `num_tokens`.
            seq_lens: (num_reqs,) tokens of each request that count, refused drafts not among them; only where not
                `chained`. By default those of the target's step.

        Raises:
            InputError: the target's step has another shape, or was set without room for the drafts; `seq_lens` is
                missing where the attention plans on the host.
        """
        if seq_lens is None and not self.chained and uniform_query_len is not None:
            raise InputError(
                f"{self._decode_backend.name} plans on the host; pass seq_lens, each request's tokens after acceptance."
            )
        live = self._prefill_backend.metadata.batch
        if uniform_query_len is not None and not live.has_query_len(uniform_query_len):
            raise InputError(
                f"requests of {uniform_query_len} tokens each are to be drafted for, but the target's step has "
                f"requests of {sorted(live.query_lens)}. Run prompts in a step of their own, without uniform_query_len."
            )
        manager = self.decode_manager
        batch = None if manager is None else manager.dispatch(num_reqs, num_reqs, 1)
        more, rows = self.num_draft_tokens - 1, num_reqs if batch is None else batch.descriptor.num_tokens
        if live.ahead < more or (self.chained and live.padded_reqs < rows):
            raise InputError(
                f"the target's step was set with ahead={live.ahead} and {live.padded_reqs} requests, padding included; "
                f"the draft's steps need ahead={more} and num_reqs={rows} at least. Pass them to BatchMetadata.set."
            )
        self.prefill_manager.run(self.dispatch(num_tokens, num_reqs, uniform_query_len), self._prefill)
        if manager is None or batch is None:
            return
        if self.chained:
            self._metadata.follow(live, rows, more)
            manager.run(batch, self._decode)
            return
        lengths = np.asarray(live.seq_lens if seq_lens is None else seq_lens, np.int64)
        for ahead in range(1, more + 1):
            most = np.minimum(lengths + ahead, self._metadata.max_model_len)
            self._metadata.set(1, most, live.block_table, num_tokens=rows, num_reqs=rows)
            manager.run(batch, self._decode)

    def reset(self) -> None:
        """Drop every graph."""
        for manager in (self.prefill_manager, self.decode_manager):
            if manager is not None:
                manager.reset()

    def _prefill(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Run the draft over what the target computed, for the first draft of each request."""
        buffers, rows = self._buffers, descriptor.num_tokens
        with attending(self._prefill_backend, mode, descriptor):
            fused = self.model.fuse(buffers.states[:rows])
            found, hidden = self.model(buffers.input_ids[:rows], buffers.positions[:rows], fused)
        self._begin(found, hidden)

    # A piecewise graph does not know how many requests its rows are of.
    @eager_break
    def _begin(self, found: Tensor, hidden: Tensor) -> None:
        """Choose the first drafts, of a full graph's requests or else of the real ones."""
        buffers, seq_lens = self._buffers, self._prefill_backend.live.seq_lens
        last = buffers.last_rows(seq_lens)
        tokens = self.model.choose(found.index_select(0, last))
        buffers.begin(tokens)
        buffers.keep(tokens, buffers.positions.index_select(0, last), hidden.index_select(0, last))
        buffers.publish(seq_lens)

    def _decode(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Run the steps after the first draft: all of them, or where not `chained` one."""
        buffers, metadata, rows = self._buffers, self._metadata, descriptor.num_tokens
        steps, found = self.num_draft_tokens - 1 if self.chained else 1, []
        with attending(self._decode_backend, mode, descriptor):
            live, most = metadata.view(rows, rows), metadata.max_model_len
            limits = live.seq_lens
            if self.chained:
                limits = follow(live, self._prefill_backend.metadata.view(rows, rows), steps, most)
            last = buffers.last_positions[:rows]
            ids, hidden = buffers.tokens[:rows], buffers.hidden[:rows]
            ahead = upcoming(last, limits, live.block_table, metadata.page_size, steps, most)
            for positions, slots, seq_lens in zip(*ahead, strict=True):
                live.slot_mapping.copy_(slots)
                live.seq_lens.copy_(seq_lens)
                out, hidden = self.model(ids, positions, hidden)
                ids = self.model.choose(out)
                found.append(ids)
        buffers.add(torch.stack(found, dim=1))
        if not self.chained:
            buffers.keep(ids, positions, hidden)
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
    """Refuse backends and numbers of drafts that do not fit each other."""
    target, own = prefill.metadata, decode.metadata
    at_least_one("num_draft_tokens", drafts)
    most = min(target.max_model_len, target.max_num_tokens) - 1
    if drafts > most:
        raise ConfigError(
            f"num_draft_tokens is {drafts}; expected at most {most}: a request's step of {drafts + 1} tokens must "
            f"fit into max_model_len={target.max_model_len} and max_num_tokens={target.max_num_tokens}."
        )
    if drafts > proposals.num_draft_tokens:
        raise ConfigError(f"num_draft_tokens is {drafts}; proposals holds {proposals.num_draft_tokens}.")
    if decode.cache is not prefill.cache:
        raise ConfigError("prefill and decode read different caches; both are the draft's own.")
    if own is target:
        raise ConfigError("prefill and decode share one BatchMetadata; decode steps need one of their own.")
    if own.max_model_len != target.max_model_len:
        raise ConfigError(
            f"max_model_len of decode's metadata is {own.max_model_len}, prefill's is {target.max_model_len}; expected "
            "the same."
        )
    if own.max_num_reqs < target.max_num_reqs:
        raise ConfigError(
            f"max_num_reqs of decode's metadata is {own.max_num_reqs}, below prefill's {target.max_num_reqs}."
        )
