"""Runs the steps of speculative decoding: rounds that verify drafts and make new ones, and prompts beside them.

A round runs three graphs: the target over the last token and the drafts of every request, acceptance included; the
draft's prefill over the same; the draft's decode steps. Accepted tokens are copied to the host while the draft runs.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.engine.config import require
from bench.engine.request import Request
from bench.engine.sampling import sample, to_host
from bench.engine.scheduler import Int64s, StepPlan
from bench.engine.spec_buffers import Arriving, RoundResults, StepInputs, last_rows
from bench.engine.spec_config import SpecConfig
from bench.engine.spec_graphs import drafters, target_managers
from bench.engine.spec_scheduler import RoundPlan, join
from bench.engine.spec_verifier import Verifier
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama
from bench.models.serving import ServingLlama
from simplegraph import BatchDescriptor, CudaGraphMode, Dispatch
from simplegraph.attention import TritonDecodeBackend, attending
from simplegraph.device.protocol import GraphPool
from simplegraph.spec_decode import Accepted, EagleDrafter, Proposals, advance_step


class Computed(NamedTuple):
    """The target's outputs in steps that are not a whole round: its final states, and the draft's input."""

    hidden: Tensor
    states: Tensor


class RoundShape(NamedTuple):
    """The target's graph for a number of requests, and the padded shape that fits both draft and target."""

    batch: Dispatch
    padding: dict[str, int]


class SpecRunner:
    """Runs the steps of a target and its draft.

    Args:
        llama: the target, on its device, with lm_head.
        draft: its draft model.
        config: the engine's limits.
        pool: memory to share with other engines, whose steps then never run at the same time.

    Attributes:
        managers: of the target's graphs, by K; drafters: by K. All share one pool.
        cache, draft_cache: keys and values.
        waited: seconds that the host has waited for tokens.
        logits: (max_num_seqs, 1 + num_draft_tokens, vocab_size), of the last round, if the config keeps them.

    Raises:
        EngineError: no attention backend works on this machine, or the model has no lm_head.
    """

    def __init__(self, llama: Llama, draft: Eagle | Eagle3, config: SpecConfig, pool: GraphPool | None = None) -> None:
        require(llama.lm_head is not None, "lm_head", None, "a model that returns logits")
        self.config, self.llama, self.draft = config, llama, draft
        recurrent = [layer.index for layer in llama.model.recurrences]
        rejected = "none: a state cannot go back to where it was before rejected tokens"
        require(not recurrent, "recurrent layers", recurrent, rejected)
        windows = {layer.window for layer in llama.model.attentions} - {None}
        require(not windows, "sliding_window", windows, "None: rounds advance their steps on the device")
        draft.tabulate(config.max_model_len + 2 * max(config.drafts))
        weight = llama.model.embed_tokens.weight
        self.device = weight.device
        most = max(config.drafts)
        shape, small = llama.model.layers[0].self_attn, draft.layers[0].self_attn
        # Verified and drafted tokens may lie beyond a request's limit; such tokens are never returned.
        self.metadata, self._decode_metadata = (
            config.metadata(tokens, config.max_model_len + 2 * most, self.device)
            for tokens in (config.max_num_tokens, config.max_num_seqs)
        )
        self.cache = config.cache(range(len(llama.model.layers)), shape, weight)
        self.draft_cache = config.cache(range(1), small, weight)
        self.backend = config.backend(self.cache, self.metadata, shape.num_heads)
        self.backends = [self.backend]
        prefill, decode = (
            config.backend(self.draft_cache, metadata, small.num_heads)
            for metadata in (self.metadata, self._decode_metadata)
        )
        if not decode.reads_lengths_on_device:  # all decode steps of the draft are one graph
            decode = TritonDecodeBackend(self.draft_cache, self._decode_metadata, num_heads=small.num_heads)
        self._draft_backends = [prefill, decode]
        self.model = ServingLlama(llama, self.backend, config.max_num_tokens, fused=config.fused)
        self.proposals = Proposals(config.max_num_seqs, most, self.device)
        self._inputs = StepInputs(config.max_num_tokens, config.max_num_seqs, self.device)
        self._rows = torch.arange(config.max_num_tokens, device=self.device)
        self._results = RoundResults(config.max_num_seqs, most + 1, self.device)
        self._verifier = Verifier(config, self._results, llama.config.vocab_size, weight.dtype)
        self.logits = self._verifier.logits
        self.waited = 0.0
        self._shapes: dict[tuple[int, int], RoundShape] = {}
        self._ran: tuple[int, int] | None = None  # the last round's number, and the version of its metadata
        self._forwards = {count: functools.partial(self.forward, count) for count in config.drafts}
        self.managers = target_managers(config, self.backend, pool)
        self.drafters = drafters(config, draft, self._draft_backends, self.proposals, self.managers)

    @torch.inference_mode()
    def capture(self) -> list[Any]:
        """Capture every graph and return the managers' summaries."""
        self._inputs.forget()
        self._ran = None  # the device's state of the last round is overwritten
        summaries = [manager.capture(self._forwards[count]) for count, manager in self.managers.items()]
        for drafter in self.drafters.values():
            summaries += drafter.capture()
        return summaries

    @torch.inference_mode()
    def launch_prompts(self, plan: StepPlan, beside: RoundPlan | None) -> tuple[Arriving, Arriving | None]:
        """Launch a step of prompts or parts of prompts, and draft for those that are complete.

        Args:
            plan: the prompts.
            beside: a round that the same step verifies and drafts for.

        Returns:
            The prompts' tokens, and the round's.
        """
        first = self.config.drafts[0]
        count, rows, drafting = first, 0, 0
        if beside is not None:
            count, drafting, plan = beside.num_draft_tokens, len(beside.requests), join(beside, plan)
            rows = drafting * (count + 1)
        tokens, reqs, drafter = len(plan.ids), len(plan.requests), self.drafters[count]
        batch = self.managers[first].dispatch(tokens, reqs)
        shape = self._padding(drafter, reqs, batch, drafter.dispatch(tokens, reqs, None))
        self.metadata.set(plan.query_lens, plan.seq_lens, plan.block_tables[0], ahead=count - 1, **shape)
        ends = last_rows(plan.query_lens)
        shifted = np.append(plan.ids[1:], 0)
        shifted[ends] = [_token_after(request) for request in plan.requests]
        samples = np.array(plan.samples, np.int64)
        inputs, self._ran = self._inputs, None
        inputs.load_prompts(plan.slots, plan.ids, plan.positions, shifted, ends, samples)
        inputs.ids[:rows].view(drafting, count + 1)[:, 1:].copy_(self._drafts(count, drafting))
        found = self.managers[first].run(batch, self._forwards[first])
        last, slots, after = inputs.last[:reqs], inputs.slots[:reqs], inputs.shifted[:tokens]
        logits = self.llama.head(found.hidden.index_select(0, torch.cat((self._rows[:rows], last[drafting:]))))
        verified = None
        if drafting:
            self._verifier.draw()
            accepted = self._verify(count, drafting, logits[:rows])
            after[:rows].copy_(accepted.tokens.clamp(min=0).view(-1))
            last[:drafting].copy_(self._rows[:drafting] * (count + 1) + accepted.counts)
            verified = self._results.send(drafting, count + 1)
        params = [request.params for request in plan.requests[drafting:]]
        chosen = sample(logits[rows:], params, plan.seq_lens[drafting:].tolist())
        self._verifier.set_temperatures(slots[drafting:], params)
        known = after.index_select(0, last[drafting:])
        after.index_copy_(0, last[drafting:], torch.where(inputs.samples[drafting:reqs] > 0, chosen, known))
        drafter.load(after, inputs.positions[:tokens], found.states[:tokens], last, slots)
        arrived, done = to_host(chosen[:, None])
        drafter.draft(tokens, reqs, None)
        return Arriving(arrived.numpy(), done), verified

    @torch.inference_mode()
    def launch_round(self, plan: RoundPlan) -> Arriving:
        """Launch a round: verify the drafts, and make new ones."""
        count, reqs = plan.num_draft_tokens, len(plan.requests)
        query_len, drafter = count + 1, self.drafters[count]
        batch, padding = self._round_shape(count, reqs)
        lengths, ran, self._ran = plan.starts + query_len, self._ran, None
        if ran == (plan.follows, self.metadata.batch.version):
            # The device has lengths, slots and last tokens from the previous round.
            self.metadata.advance(lengths, ahead=count - 1)
        else:
            ahead = int(np.minimum.reduce(plan.reach - lengths))
            self.metadata.set(query_len, lengths, plan.block_table, ahead=ahead, **padding)
            self._inputs.load_round(plan.slots, plan.last_tokens)
        self._verifier.draw()
        # A piecewise graph covers neither this nor acceptance.
        if batch.descriptor.uniform_query_len is None:
            self._write_round(count, reqs)
        found = self.managers[count].run(batch, self._forwards[count])
        if found is not None:
            self._accept(count, reqs, Computed(*(part[: reqs * query_len] for part in found)))
        arriving = self._results.send(reqs, query_len)
        drafter.draft(reqs * query_len, reqs, query_len)
        self._ran = plan.number, self.metadata.batch.version
        return arriving

    def wait(self, arriving: Arriving) -> Int64s:
        """Wait for a step's tokens; see `Arriving.wait`."""
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

    def _round_shape(self, count: int, reqs: int) -> RoundShape:
        found = self._shapes.get((count, reqs))
        if found is None:
            query_len, drafter = count + 1, self.drafters[count]
            asked = (reqs * query_len, reqs, query_len)
            batch = self.managers[count].dispatch(*asked)
            padding = self._padding(drafter, reqs, batch, drafter.dispatch(*asked))
            found = self._shapes[count, reqs] = RoundShape(batch, padding)
        return found

    @staticmethod
    def _padding(drafter: EagleDrafter, reqs: int, target: Dispatch, draft: Dispatch) -> dict[str, int]:
        """Return the padded shape of a step that the target and all of the draft's steps can read."""
        shapes = [batch.descriptor for batch in (target, draft)]
        return {
            "num_tokens": max(shape.num_tokens for shape in shapes),
            "num_reqs": max(drafter.padded_reqs(reqs), *(shape.num_reqs or 0 for shape in shapes)),
        }

    def forward(self, count: int, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Computed | None:
        """Run the target on the step's inputs; a whole round also accepts drafts, into the buffers."""
        rows, whole = descriptor.num_tokens, descriptor.uniform_query_len == count + 1
        if whole:
            self._write_round(count, rows // (count + 1))
        ids, positions = self._inputs.ids[:rows], self._inputs.positions[:rows]
        taps: list[Tensor] = []
        layers = self.draft.aux_layers

        def tap(layer: int, hidden: Tensor) -> None:
            taps.extend([hidden.clone()] * layers.count(layer))

        with attending(self.backend, mode, descriptor):
            hidden = self.model(ids.clamp(min=0), positions, tap if layers else None)
        found = Computed(hidden, torch.cat(taps, dim=-1) if layers else hidden)
        if not whole:
            return found
        self._accept(count, rows // (count + 1), found)
        return None

    def _write_round(self, count: int, reqs: int) -> None:
        """Write each request's last token and drafts, and their positions, to the target's inputs."""
        query_len = count + 1
        rows, inputs = reqs * query_len, self._inputs
        torch.cat(
            (inputs.tokens[:reqs, None], self._drafts(count, reqs)), dim=1, out=inputs.ids[:rows].view(reqs, query_len)
        )
        step = self.metadata.view(rows, reqs)
        positions = advance_step(step, inputs.grown[:reqs], query_len, self.config.page_size)
        inputs.positions[:rows].copy_(positions.view(-1))

    def _drafts(self, count: int, reqs: int) -> Tensor:
        """Return the drafts of a step's first requests, (reqs, count) int64."""
        return self.proposals.tokens.index_select(0, self._inputs.slots[:reqs])[:, :count]

    def _accept(self, count: int, reqs: int, found: Computed) -> None:
        """Accept drafts, and prepare the next drafting and the next round of the same requests."""
        accepted = self._verify(count, reqs, self.llama.head(found.hidden))
        self._inputs.keep(accepted.tokens, accepted.counts)
        last = self._rows[:reqs] * (count + 1) + accepted.counts
        positions, slots = self._inputs.positions[: reqs * (count + 1)], self._inputs.slots[:reqs]
        self.drafters[count].load(accepted.tokens.clamp(min=0).view(-1), positions, found.states, last, slots)

    def _verify(self, count: int, reqs: int, logits: Tensor) -> Accepted:
        """Accept drafts of a step's first requests by the logits of their rows, and store the tokens."""
        drafts = self._inputs.ids[: reqs * (count + 1)].view(reqs, count + 1)[:, 1:]
        return self._verifier.verify(drafts, logits, self._inputs.slots[:reqs])


def _token_after(request: Request) -> int:
    """Return the token after the computed ones, if the host knows it."""
    known = request.prompt + request.output
    return known[request.num_computed] if request.num_computed < len(known) else 0
