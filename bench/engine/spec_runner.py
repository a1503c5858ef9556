"""Runs the steps of speculative decoding: prompts, and rounds that verify drafts and make new ones.

A round is three graphs: the target over the last token and the drafts of every request, acceptance included; the
draft's prefill over the same; the draft's decode steps. What was accepted goes to the host while the draft runs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.engine.request import Request
from bench.engine.runner import EngineConfig, attention_backend, require, to_host
from bench.engine.sampling import sample
from bench.engine.scheduler import Int64s, StepPlan
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama
from bench.models.serving import ServingLlama
from simplegraph import BatchDescriptor, CudaGraphManager, CudaGraphMode, Dispatch
from simplegraph.attention import BatchMetadata, PagedKVCache, attending
from simplegraph.batch.sizes import default_sizes
from simplegraph.spec_decode import (
    Accepted,
    EagleDrafter,
    Proposals,
    greedy_accept,
    rejection_sample,
    target_probabilities,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecConfig(EngineConfig):
    """An engine that drafts.

    Args:
        num_draft_tokens: K, or several, among which an engine can change at run time; the first is where it begins.
        draft_mode: of the draft's graphs, by name; the target's mode by default.
        acceptance: "greedy" takes the target's likeliest tokens; "rejection" samples with each request's temperature.
        seed: of what is sampled.
        mean_length: for benchmarks: in place of acceptance, so many tokens a round on average, the target's own
            included, whatever the drafts are.

    Raises:
        EngineError: a number is out of range.
    """

    num_draft_tokens: int | Sequence[int] = 5
    draft_mode: str | None = None
    acceptance: str = "greedy"
    seed: int = 0
    mean_length: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "at least 1; without drafts use Engine"
        require(bool(self.drafts), "num_draft_tokens", self.num_draft_tokens, expected)
        for count in self.drafts:
            require(isinstance(count, int) and count >= 1, "num_draft_tokens", count, expected)
        most = max(self.drafts)
        require(most < self.max_model_len, "num_draft_tokens", most, f"below max_model_len={self.max_model_len}")
        needed = self.max_num_seqs * (most + 1)
        what = f"at least max_num_seqs * (1 + num_draft_tokens) = {needed}"
        require(self.max_num_tokens >= needed, "max_num_tokens", self.max_num_tokens, what)
        require(self.acceptance in ("greedy", "rejection"), "acceptance", self.acceptance, "'greedy' or 'rejection'")
        length = self.mean_length
        what = f"from 1 to {1 + min(self.drafts, default=0)}"
        require(length is None or 1 <= length <= 1 + min(self.drafts), "mean_length", length, what)

    @property
    def drafts(self) -> tuple[int, ...]:
        """Every K, the first one first."""
        given = self.num_draft_tokens
        return tuple(given) if isinstance(given, Sequence) else (given,)


@dataclasses.dataclass(frozen=True, eq=False)
class RoundPlan:
    """A round of requests whose prompts are computed, K drafts each.

    Attributes:
        num_draft_tokens: K.
        last_tokens: (num_reqs,) int64, each request's last token, which is not in the cache yet.
        starts: (num_reqs,) int64, tokens in the cache.
        slots: (num_reqs,) int64.
        block_table: (num_reqs, n) int32, with pages for 2 K tokens more.
    """

    requests: list[Request]
    num_draft_tokens: int
    last_tokens: Int64s
    starts: Int64s
    slots: Int64s
    block_table: Any


class Arriving(NamedTuple):
    """A step's tokens on their way to the host."""

    tokens: Tensor
    done: Any

    def wait(self) -> Any:
        """(num_reqs, n) int64, -1 after each request's last; waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.numpy()


class Computed(NamedTuple):
    """What the target gives outside a graph of a whole round: its tokens, final states, and the draft's input."""

    ids: Tensor
    hidden: Tensor
    states: Tensor


class _Inputs:
    """A step's numbers at addresses that stay; one copy a step brings all of them.

    Attributes:
        ids: (max_num_tokens,) int64; a draft is -1 - its place in the flat `Proposals.tokens`.
        positions, shifted: (max_num_tokens,) int64; shifted: the token after each, where the host knows it.
        slots: (max_num_seqs,) int64; padding has the scratch slot.
        last: (max_num_seqs,) int64, each request's last row.
        samples: (max_num_seqs,) int64, 1 where the step gives a prompt its first token.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int, device: torch.device) -> None:
        sizes = {"ids": max_num_tokens, "positions": max_num_tokens, "slots": max_num_seqs}
        sizes |= {"shifted": max_num_tokens, "last": max_num_seqs, "samples": max_num_seqs}
        ends = np.cumsum(list(sizes.values()))
        self._starts = [0, *ends[:-1].tolist()]
        self._padding = slice(self._starts[2], self._starts[3])
        self._scratch_slot = max_num_seqs
        self._words = torch.zeros(int(ends[-1]), dtype=torch.int64, device=device)
        parts = self._words.split(list(sizes.values()))
        self.ids, self.positions, self.slots, self.shifted, self.last, self.samples = parts
        self.slots.fill_(self._scratch_slot)

    def load(self, *values: Int64s) -> None:
        """Bring a step's ids, positions and slots to the device; of prompts also shifted, last and samples."""
        # From the allocator of pinned memory each time: it gives none out whose copy is still under way.
        host = torch.zeros(len(self._words), dtype=torch.int64, pin_memory=self._words.is_cuda)
        array = host.numpy()
        array[self._padding] = self._scratch_slot
        for start, value in zip(self._starts, values, strict=False):
            array[start : start + len(value)] = value
        self._words.copy_(host, non_blocking=True)


class SpecRunner:
    """A target and its draft, ready to run steps.

    Args:
        llama: the target, on its device, with lm_head.
        draft: made for it.
        config: what they must hold.

    Attributes:
        managers: of the target's graphs, by K; drafters: by K; all share one pool.
        cache, draft_cache: keys and values.
        waited: seconds in which the host waited for tokens.

    Raises:
        EngineError: no attention backend works here, or the model has no lm_head.
    """

    def __init__(self, llama: Llama, draft: Eagle | Eagle3, config: SpecConfig) -> None:
        require(llama.lm_head is not None, "lm_head", None, "a model that returns logits")
        self.config, self.llama, self.draft = config, llama, draft
        draft.tabulate(config.max_model_len + 2 * max(config.drafts))
        weight = llama.model.embed_tokens.weight
        self.device = weight.device
        most = max(config.drafts)
        shape, small = llama.model.layers[0].self_attn, draft.layers[0].self_attn
        # Verified and drafted tokens may lie beyond a request's limit; nobody gets to see them.
        self.metadata, self._decode_metadata = (
            BatchMetadata(
                max_num_tokens=tokens,
                max_num_reqs=config.max_num_seqs,
                max_model_len=config.max_model_len + 2 * most,
                page_size=config.page_size,
                device=self.device,
            )
            for tokens in (config.max_num_tokens, config.max_num_seqs)
        )
        self.cache, self.draft_cache = (
            PagedKVCache(
                layers,
                config.num_pages,
                config.page_size,
                attention.num_kv_heads,
                attention.head_dim,
                dtype=weight.dtype,
                device=self.device,
            )
            for layers, attention in ((len(llama.model.layers), shape), (1, small))
        )
        self.backend = attention_backend(config.attention, self.cache, self.metadata, shape.num_heads)
        self._draft_backends = [
            attention_backend(config.attention, self.draft_cache, metadata, small.num_heads)
            for metadata in (self.metadata, self._decode_metadata)
        ]
        self.model = ServingLlama(llama, self.backend, config.max_num_tokens, fused=config.fused)
        self.proposals = Proposals(config.max_num_seqs, most, self.device)
        self._inputs = _Inputs(config.max_num_tokens, config.max_num_seqs, self.device)
        rows = (config.max_num_seqs, most + 1)
        self._results = torch.full(rows, -1, dtype=torch.int64, device=self.device)
        self._noise = torch.zeros(rows, device=self.device)
        self._temperatures = torch.zeros(config.max_num_seqs + 1, device=self.device)
        self._generator = torch.Generator(self.device).manual_seed(config.seed)
        self.waited = 0.0
        self._build_graphs()

    def _build_graphs(self) -> None:
        self.managers: dict[int, CudaGraphManager] = {}
        self.drafters: dict[int, EagleDrafter] = {}
        for count in self.config.drafts:
            first = next(iter(self.managers.values()), None)
            self.managers[count] = manager = self._manager(count, first)
            self.drafters[count] = EagleDrafter(
                self.draft,
                *self._draft_backends,
                self.proposals,
                num_draft_tokens=count,
                mode=self._mode(self.config.draft_mode or self.config.mode, first=first is None),
                capture_sizes=self.config.capture_sizes,
                pool=manager.pool,
                progress=self.config.progress,
            )

    def _manager(self, count: int, first: CudaGraphManager | None) -> CudaGraphManager:
        config, query_len = self.config, count + 1
        mode = self._mode(config.mode, first=first is None)
        settings: dict[str, Any] = {}
        if mode.separate_routine():
            most = config.max_num_seqs
            sizes = {min(size, most) * query_len for size in config.capture_sizes or default_sizes(most)}
            settings = {"uniform_query_len": query_len, "decode_capture_sizes": sizes}
        manager = CudaGraphManager(
            mode=mode,
            device=self.device,
            pool=None if first is None else first.pool,
            support=self.backend.support,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_tokens,
            progress=config.progress,
            name=f"target, {count} drafts",
            **settings,
        )
        manager.add_hooks(self.backend)
        return manager

    @staticmethod
    def _mode(name: str, *, first: bool) -> CudaGraphMode:
        """Prompts run in the first K's graphs, so the others need none for mixed batches."""
        mode = CudaGraphMode.parse(name)
        return CudaGraphMode.FULL_DECODE_ONLY if mode is CudaGraphMode.FULL_AND_PIECEWISE and not first else mode

    @torch.inference_mode()
    def capture(self) -> list[Any]:
        """Capture every graph; the managers' summaries."""
        self._inputs.slots.fill_(self.config.max_num_seqs)  # a warmup's drafts are nobody's
        summaries = [manager.capture(self._forward(count)) for count, manager in self.managers.items()]
        for drafter in self.drafters.values():
            summaries += drafter.capture()
        return summaries

    @torch.inference_mode()
    def launch_prompts(self, plan: StepPlan) -> Arriving:
        """Put a step of prompts, or parts of some, on the device's queue; drafts for those that are through."""
        count, tokens, reqs = self.config.drafts[0], len(plan.ids), len(plan.requests)
        manager, drafter = self.managers[count], self.drafters[count]
        batch = manager.dispatch(tokens, reqs)
        self._set(plan.query_lens, plan.seq_lens, plan.block_table, batch, drafter.dispatch(tokens, reqs, None))
        ends = np.cumsum(plan.query_lens) - 1
        following = [_token_after(request) for request in plan.requests]
        shifted = np.append(plan.ids[1:], 0)
        shifted[ends] = following
        self._inputs.load(plan.ids, plan.positions, plan.slots, shifted, ends, np.array(plan.samples, np.int64))
        found = manager.run(batch, self._forward(count))
        inputs = self._inputs
        last, slots = inputs.last[:reqs], inputs.slots[:reqs]
        params, generators = zip(*((one.params, one.generator) for one in plan.requests), strict=True)
        chosen = sample(self.llama.head(found.hidden.index_select(0, last)), params, generators)
        if self.config.acceptance == "rejection":
            temperatures = torch.tensor([one.temperature for one in params], device=self.device)
            self._temperatures.index_copy_(0, slots, temperatures)
        after = inputs.shifted[:tokens]
        after.index_copy_(0, last, torch.where(inputs.samples[:reqs] > 0, chosen, after.index_select(0, last)))
        drafter.load(after, inputs.positions[:tokens], found.states[:tokens], last, slots)
        arriving = Arriving(*to_host(chosen[:, None]))
        drafter.draft(tokens, reqs, None, plan.block_table, plan.seq_lens)
        return arriving

    @torch.inference_mode()
    def launch_round(self, plan: RoundPlan) -> Arriving:
        """Put a round on the device's queue: verify the drafts, and make new ones."""
        count, reqs = plan.num_draft_tokens, len(plan.requests)
        query_len = count + 1
        tokens = reqs * query_len
        manager, drafter = self.managers[count], self.drafters[count]
        batch = manager.dispatch(tokens, reqs, query_len)
        lengths = plan.starts + query_len
        drafting = drafter.dispatch(tokens, reqs, query_len)
        self._set(np.full(reqs, query_len), lengths, plan.block_table, batch, drafting)
        places = plan.slots[:, None] * self.proposals.num_draft_tokens + np.arange(count)
        ids = np.concatenate((plan.last_tokens[:, None], -1 - places), axis=1)
        positions = plan.starts[:, None] + np.arange(query_len)
        self._inputs.load(ids.ravel(), positions.ravel(), plan.slots)
        if self._draws:
            # Outside the graph and in one shape, so that every mode and padding sees the same numbers.
            self._noise.uniform_(generator=self._generator)
        found = manager.run(batch, self._forward(count))
        if found is not None:
            self._accept(count, reqs, Computed(*(part[:tokens] for part in found)))
        arriving = Arriving(*to_host(self._results[:reqs]))
        known = None
        if not drafter.chained:
            known = plan.starts + (self.wait(arriving)[:, :query_len] >= 0).sum(axis=1)
        drafter.draft(tokens, reqs, query_len, plan.block_table, known)
        return arriving

    def wait(self, arriving: Arriving) -> Any:
        """A step's tokens; see `Arriving.wait`."""
        started = time.perf_counter()
        tokens = arriving.wait()
        self.waited += time.perf_counter() - started
        return tokens

    def reset(self) -> None:
        """Drop every graph."""
        for manager in self.managers.values():
            manager.reset()
        for drafter in self.drafters.values():
            drafter.reset()

    @property
    def _draws(self) -> bool:
        return self.config.acceptance == "rejection" or self.config.mean_length is not None

    def _set(self, query_lens: Any, seq_lens: Int64s, block_table: Any, target: Dispatch, draft: Dispatch) -> None:
        """Describe a step to the target and to the draft's prefill, in a shape that holds both."""
        most = self.config.max_num_seqs
        shapes = [batch.descriptor for batch in (target, draft)]
        rows = max(shape.num_tokens for shape in shapes)
        reqs = max(shape.num_reqs or min(shape.num_tokens, most) for shape in shapes)
        self.metadata.set(query_lens, seq_lens, block_table, num_tokens=rows, num_reqs=reqs)

    def _forward(self, count: int) -> Any:
        return functools.partial(self.forward, count)

    def forward(self, count: int, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Computed | None:
        """The target on the step's inputs; a whole round ends with what was accepted, in the buffers."""
        rows = descriptor.num_tokens
        ids = self._inputs.ids[:rows]
        ids = torch.where(ids < 0, self.proposals.tokens.view(-1)[(-1 - ids).clamp_(min=0)], ids)
        taps: list[Tensor] = []
        layers = self.draft.aux_layers

        def tap(layer: int, hidden: Tensor) -> None:
            taps.extend([hidden.clone()] * layers.count(layer))

        with attending(self.backend, mode, descriptor):
            hidden = self.model(ids.clamp(min=0), self._inputs.positions[:rows], tap if layers else None)
        found = Computed(ids, hidden, torch.cat(taps, dim=-1) if layers else hidden)
        if descriptor.uniform_query_len != count + 1:
            return found
        self._accept(count, rows // (count + 1), found)
        return None

    def _accept(self, count: int, reqs: int, found: Computed) -> None:
        query_len = count + 1
        drafts = found.ids.view(reqs, query_len)[:, 1:]
        logits = self.llama.head(found.hidden).view(reqs, query_len, -1)
        slots, noise = self._inputs.slots[:reqs], self._noise[:reqs, :query_len]
        if self.config.mean_length is not None:
            accepted = of_mean_length(drafts, logits.argmax(dim=-1), noise[:, 0], self.config.mean_length)
        elif self.config.acceptance == "greedy":
            accepted = greedy_accept(drafts, logits.argmax(dim=-1))
        else:
            probabilities = target_probabilities(logits, self._temperatures.index_select(0, slots))
            accepted = rejection_sample(drafts, probabilities, noise)
        self._results[:reqs, :query_len].copy_(accepted.tokens)
        last = torch.arange(reqs, device=self.device) * query_len + accepted.counts
        positions = self._inputs.positions[: reqs * query_len]
        self.drafters[count].load(accepted.tokens.clamp(min=0).view(-1), positions, found.states, last, slots)


def of_mean_length(drafts: Tensor, targets: Tensor, noise: Tensor, mean_length: float) -> Accepted:
    """As many tokens a round as asked for on average, for timing where drafts mean nothing."""
    extra = mean_length - 1
    counts = int(extra) + (noise < extra - int(extra)).long()
    place = torch.arange(drafts.shape[1], device=drafts.device)
    return Accepted.of(drafts, place < counts[:, None], targets)


def _token_after(request: Request) -> int:
    """The token after those that are computed, where the host knows it."""
    known = request.prompt + request.output
    return known[request.num_computed] if request.num_computed < len(known) else 0
