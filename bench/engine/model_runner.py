"""Runs planned steps: buffers, graphs, attention, sampling, without synchronizing.

A uniform decode step in a full graph reads its tokens where the previous step left them, and chooses the
next ones greedily, all inside the graph. All other steps sample after the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.engine.config import EngineConfig, require
from bench.engine.sampling import sample, to_host
from bench.engine.scheduler import StepPlan
from bench.models.llama import Llama
from bench.models.serving import ServingLlama
from simplegraph import BatchDescriptor, CudaGraphManager, CudaGraphMode, Dispatch, RankGroup
from simplegraph.attention import AttentionBackend, BackendGroup, RecurrentBackend, TwoBatchOverlap, attending
from simplegraph.batch.sizes import default_sizes
from simplegraph.fused.torch_operators import most_likely
from simplegraph.spec_decode.advance import upcoming


class Sampled(NamedTuple):
    """The outputs of a decode graph: logits, (T, vocab_size), and each row's most likely token, (T,) int64."""

    logits: Tensor
    tokens: Tensor


class Launched(NamedTuple):
    """A launched step, or several: the plan, and the host memory that receives the tokens."""

    plan: StepPlan
    tokens: Tensor
    done: Any

    def wait(self) -> list[list[int]]:
        """Wait for the device, and return the tokens of each request of the plan, one for each step."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.view(len(self.plan.requests), -1).tolist()


class _Inputs:
    """A step's tokens, positions and rows at fixed addresses, filled by one copy per step.

    Attributes:
        ids, positions: (max_num_tokens,) int64.
        slots: (max_num_seqs,) int64, each request's slot; padding has the scratch slot.
        last: (max_num_seqs,) int64, each request's last row.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int, device: torch.device) -> None:
        self._sizes = (max_num_tokens, max_num_tokens, max_num_seqs, max_num_seqs)
        self._scratch_slot = max_num_seqs
        self._words = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self.ids, self.positions, self.slots, self.last = self._words.split(self._sizes)

    def load(self, plan: StepPlan) -> None:
        """Copy a plan's numbers to the device."""
        # A new pinned tensor each time: the allocator does not reuse memory whose copy is still running.
        host = torch.zeros(len(self._words), dtype=torch.int64, pin_memory=self._words.is_cuda)
        parts = [part.numpy() for part in host.split(self._sizes)]
        parts[2].fill(self._scratch_slot)
        kept = np.where(plan.samples, plan.slots, self._scratch_slot)
        values = (plan.ids, plan.positions, kept, np.cumsum(plan.query_lens) - 1)
        for part, value in zip(parts, values, strict=True):
            part[: len(value)] = value
        self._words.copy_(host, non_blocking=True)


class ModelRunner:
    """Runs the model's steps.

    Args:
        llama: on its device, with lm_head.
        config: the engine's limits.
        ranks: the ranks that run the model together.

    Attributes:
        manager: of the graphs; backends: attention of each group of layers; states: those of recurrent layers, or None.
        overlap: runs steps as two micro-batches; None if `two_batch_overlap` is "off".
        several: manager of the graphs of several decode steps; None if `tokens_per_launch` is 1.
        backend: all of them together; metadata: that of the first group of attention.
        observe: called with each step's plan and logits, (requests, vocab_size), which the next step may overwrite.

    Raises:
        EngineError: no attention backend works on this machine, or the model has no lm_head or no attention.
    """

    def __init__(self, llama: Llama, config: EngineConfig, ranks: RankGroup | None = None) -> None:
        require(llama.lm_head is not None, "lm_head", None, "a model that returns logits")
        attentions, recurrences = llama.model.attentions, llama.model.recurrences
        require(bool(attentions), "layers", "recurrent", "some with attention")
        self.config, self.llama = config, llama
        weight = llama.model.embed_tokens.weight
        self.device = weight.device
        self.backends = config.backends(attentions, weight)
        self.states = config.states(recurrences, weight) if recurrences else None
        self.metadata = self.backends[0].metadata
        self.backend = _joined(self.backends, self.states)
        emulated = self.device.type == "cpu" and config.mode != "NONE"
        require(not (config.compiled and emulated), "compiled", True, "False: emulated graphs cannot see compiled code")
        self.model = ServingLlama(
            llama, self.backend, config.max_num_tokens, fused=config.fused, compiled=config.compiled
        )
        self.manager = CudaGraphManager(
            mode=config.mode,
            device=self.device,
            support=self.backend.support,
            capture_sizes=config.capture_sizes,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_tokens,
            progress=config.progress,
            name="engine",
            ranks=ranks,
        )
        self.overlap = None if config.two_batch_overlap == "off" else self._two_batch_overlap()
        if self.overlap is None:
            self.manager.add_hooks(self.backend)
        self.several = None if config.tokens_per_launch == 1 else self._manager_of_several(ranks)
        self.observe: Callable[[StepPlan, Tensor], None] | None = None
        self._inputs = _Inputs(config.max_num_tokens, config.max_num_seqs, self.device)
        self._last_tokens = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def capture(self) -> Any:
        """Compile if `compiled` is set, capture every graph, and return a summary of all."""
        if self.config.compiled:
            most = self.config.max_num_tokens
            self.forward(CudaGraphMode.PIECEWISE, BatchDescriptor(most, min(most, self.config.max_num_seqs)))
        summary = self.manager.capture(self.forward)
        if self.several is None:
            return summary
        more = self.several.capture(self.forward_several)
        totals = {name: getattr(summary, name) + getattr(more, name) for name in ("captured", "seconds", "bytes")}
        return dataclasses.replace(summary, failed=summary.failed | more.failed, **totals)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor | Sampled:
        """Run the model on the step's inputs; return hidden states, or in a full decode graph logits and tokens."""
        rows = descriptor.num_tokens
        ids, positions = self._ids(rows), self._inputs.positions
        if self.overlap is not None and self.overlap.split(mode, descriptor):
            halves = self.overlap.run(mode, descriptor, lambda half: self.model.stages(ids[half], positions[half]))
            hidden = torch.cat(halves)
        else:
            with attending(self.backend, mode, descriptor):
                hidden = self.model(ids, positions[:rows])
        if mode is not CudaGraphMode.FULL or descriptor.uniform_query_len != 1:
            return hidden
        logits = self.llama.head(hidden)
        tokens = most_likely(logits)
        self._last_tokens.index_copy_(0, self._inputs.slots[:rows], tokens)
        return Sampled(logits, tokens)

    def forward_several(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        """Take `tokens_per_launch` greedy decode steps, each after the last; return their tokens, (R, steps) int64.

        Lengths and slots advance on the device. A request must have pages for all steps.
        """
        rows, more, metadata = descriptor.num_tokens, self.config.tokens_per_launch - 1, self.metadata
        live, positions, ids = metadata.view(rows, rows), self._inputs.positions[:rows], self._ids(rows)
        limits = torch.where(live.seq_lens > 0, live.seq_lens + more, 0)
        found = []
        with attending(self.backend, mode, descriptor):
            later = upcoming(positions, limits, live.block_table, metadata.page_size, more, metadata.max_model_len)
            for step in range(more + 1):
                if step:
                    positions = later.positions[step - 1]
                    live.slot_mapping.copy_(later.slots[step - 1])
                    live.seq_lens.copy_(later.seq_lens[step - 1])
                ids = most_likely(self.llama.head(self.model(ids, positions)))
                found.append(ids)
        self._last_tokens.index_copy_(0, self._inputs.slots[:rows], ids)
        return torch.stack(found, dim=1)

    def _ids(self, rows: int) -> Tensor:
        """Return the step's tokens; those that the host does not know are where the previous step left them."""
        ids = self._inputs.ids[:rows]
        return torch.where(ids < 0, self._last_tokens[(-1 - ids).clamp_(min=0)], ids)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Put a step, or several that are one graph, on the device's queue."""
        if plan.steps > 1:
            return self._launch_several(plan)
        batch = self.manager.dispatch(len(plan.ids), len(plan.requests), plan.uniform_query_len)
        self.describe(plan, batch)
        found = self.manager.run(batch, self.forward)
        count = len(plan.requests)
        logits = found.logits[:count] if isinstance(found, Sampled) else self._logits(found, count)
        if self.observe is not None:
            self.observe(plan, logits)
        if isinstance(found, Sampled) and all(request.params.greedy for request in plan.requests):
            tokens = found.tokens[:count]
        else:
            tokens = sample(logits, [request.params for request in plan.requests], plan.seq_lens.tolist())
            self._last_tokens.index_copy_(0, self._inputs.slots[:count], tokens)
        return Launched(plan, *to_host(tokens))

    def _launch_several(self, plan: StepPlan) -> Launched:
        manager: Any = self.several
        count = len(plan.requests)
        batch = manager.dispatch(count, count, 1)
        self.describe(plan, batch)
        return Launched(plan, *to_host(manager.run(batch, self.forward_several)[:count]))

    def _manager_of_several(self, ranks: RankGroup | None) -> CudaGraphManager:
        config, steps = self.config, self.config.tokens_per_launch
        expected = "1 without full graphs, with attention that plans on the host, sliding windows or recurrent layers"
        backend, *others = self.backends
        able = CudaGraphMode.parse(config.mode).has_full() and backend.reads_lengths_on_device
        alone = not others and self.states is None and self.metadata.window is None
        require(able and alone, "tokens_per_launch", steps, expected)
        most = config.max_num_seqs
        manager = CudaGraphManager(
            mode=CudaGraphMode.FULL_DECODE_ONLY,
            device=self.device,
            pool=self.manager.pool,
            support=backend.support,
            capture_sizes=sorted({min(size, most) for size in config.capture_sizes or default_sizes(most)}),
            max_num_seqs=most,
            max_num_tokens=most,
            progress=config.progress,
            name=f"engine, {steps} tokens",
            ranks=ranks,
        )
        manager.add_hooks(self.backend)
        return manager

    def _two_batch_overlap(self) -> TwoBatchOverlap:
        config, states = self.config, self.states
        micro = [
            _joined(config.micro_batch(self.backends), None if states is None else config.micro_states(states))
            for _ in range(2)
        ]
        sizes = config.two_batch_overlap
        return TwoBatchOverlap(self.manager, self.backend, micro, sizes=None if isinstance(sizes, str) else sizes)

    def describe(self, plan: StepPlan, batch: Dispatch) -> None:
        """Write a step to the device, for the attention of every group, for recurrent layers and for the model."""
        if self.overlap is not None:
            tables = [*plan.block_tables, *([] if self.states is None else [plan.slots + 1])]
            self.overlap.set(batch, plan.query_lens, plan.seq_lens, tables)
        else:
            self._describe_whole(plan, batch)
        self._inputs.load(plan)

    def _describe_whole(self, plan: StepPlan, batch: Dispatch) -> None:
        full = batch.mode is CudaGraphMode.FULL
        reqs = batch.descriptor.num_reqs if full else len(plan.slots)
        padded = {"num_tokens": batch.descriptor.num_tokens, "num_reqs": reqs}
        for backend, table in zip(self.backends, plan.block_tables, strict=True):
            backend.metadata.set(plan.query_lens, plan.seq_lens, table, **padded, ahead=plan.steps - 1)
        if self.states is not None:  # slot 0 is for padding
            self.states.metadata.set(plan.query_lens, plan.seq_lens, plan.slots + 1, **padded)

    def repeat(self) -> None:
        """Allow the step that was described last to run once more."""
        if self.overlap is not None:
            self.overlap.repeat()
            return
        for backend in (*self.backends, *([] if self.states is None else [self.states])):
            backend.metadata.repeat()

    def _logits(self, hidden: Tensor, count: int) -> Tensor:
        return self.llama.head(hidden.index_select(0, self._inputs.last[:count]))


def _joined(
    attentions: Sequence[AttentionBackend], states: RecurrentBackend | None = None
) -> AttentionBackend | BackendGroup:
    """Join the backends of a model's layers where there are several."""
    each = [*attentions, *([] if states is None else [states])]
    return attentions[0] if len(each) == 1 else BackendGroup({layer: one for one in each for layer in one.cache.layers})
