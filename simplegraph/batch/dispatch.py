"""The dispatcher: finds the graph that serves a batch."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simplegraph.base.config import AttentionCGSupport, CudaGraphConfig, CudaGraphMode
from simplegraph.base.errors import ConfigError
from simplegraph.base.reasons import Reason
from simplegraph.batch.sizes import DEFAULT_LARGEST, BatchDescriptor, mixed_sizes, padded_size, uniform_decode_sizes

logger = logging.getLogger("simplegraph")

# Answers cached before the cache is cleared: far more than real traffic needs, and a bound for unusual traffic.
_MAX_REMEMBERED = 1 << 16


class Dispatch(NamedTuple):
    """The dispatcher's answer for one batch.

    Attributes:
        mode: how to run it: NONE, PIECEWISE or FULL.
        descriptor: the padded shape, which is the graph's key; for NONE the shape without padding.
        reason: why the batch runs in this way.
        padding: padding rows, ``descriptor.num_tokens`` minus the batch's own.
    """

    mode: CudaGraphMode
    descriptor: BatchDescriptor
    reason: Reason
    padding: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Graphs:
    """All graphs of one kind: their mode, their sizes, and the batches that they serve."""

    mode: CudaGraphMode
    sizes: Sequence[int]
    uniform_query_len: int | None
    config: CudaGraphConfig

    def accept(self, batch: BatchDescriptor, *, allow_full: bool) -> int | Reason:
        """Return the padded size in tokens, or the reason why these graphs cannot serve the batch."""
        full, config = self.mode is CudaGraphMode.FULL, self.config
        if full and not (allow_full and self.uniform_query_len in (None, batch.uniform_query_len)):
            return Reason.MIXED_BATCH
        too_many = full and config.max_num_seqs is not None and (batch.num_reqs or 0) > config.max_num_seqs
        padded = padded_size(self.sizes, batch.num_tokens)
        if too_many or padded is None:
            return Reason.BATCH_TOO_LARGE
        return padded if config.padding or padded == batch.num_tokens else Reason.SIZE_NOT_CAPTURED

    def key(self, padded: int, lora_case: int, *, requests: bool) -> BatchDescriptor:
        """Return the key of the graph of `padded` tokens; `requests` is True if num_reqs is part of the key."""
        if self.uniform_query_len is not None:
            return BatchDescriptor(padded, padded // self.uniform_query_len, self.uniform_query_len, lora_case)
        if not requests or self.mode is not CudaGraphMode.FULL:
            return BatchDescriptor(padded, num_active_loras=lora_case)
        return BatchDescriptor(padded, min(padded, self.config.max_num_seqs or padded), num_active_loras=lora_case)


class Dispatcher:
    """Decides how each batch runs: by a FULL graph if there is one for it, else a PIECEWISE graph, else NONE.

    Args:
        config: modes, sizes and limits.
        support: the support level of the attention backend. A mode that needs more is lowered, with a warning that
            names the cost.
        lora_cases: the counts of active LoRAs to capture; a batch uses the smallest count that covers its own.
        requests: True if full graphs for mixed batches have the number of requests in their key, as attention
            metadata needs. None stands for True if `max_num_seqs` is set.

    Raises:
        ConfigError: `lora_cases` is empty, or not all entries are counts.

    Source: the order FULL, PIECEWISE, NONE and the keys' relaxation follow vLLM's CudagraphDispatcher.
    """

    def __init__(
        self,
        config: CudaGraphConfig,
        support: AttentionCGSupport = AttentionCGSupport.ALWAYS,
        *,
        lora_cases: Iterable[int] = (0,),
        requests: bool | None = None,
    ) -> None:
        self.config = config
        self._requests = config.max_num_seqs is not None if requests is None else requests
        self.lora_cases = tuple(sorted(set(lora_cases)))
        if not self.lora_cases or not all(isinstance(case, int) and case >= 0 for case in self.lora_cases):
            expected = "at least one count of active LoRAs, such as (0, 1, 4)"
            raise ConfigError(f"lora_cases is {lora_cases!r}; expected {expected}.")
        self.mode, message = resolve_mode(config.mode, support, config.uniform_query_len)
        if message is not None:
            logger.warning("simplegraph: %s", message)
        self._graphs: list[_Graphs] = []  # the kinds of graphs of the mode, in the order in which they are tried
        decode, mixed = self.mode.decode_mode(), self.mode.mixed_mode()
        if decode is CudaGraphMode.FULL and mixed is not decode:
            sizes = uniform_decode_sizes(config)
            self._graphs.append(_Graphs(CudaGraphMode.FULL, sizes, config.uniform_query_len, config))
        if mixed is not CudaGraphMode.NONE:
            self._graphs.append(_Graphs(mixed, mixed_sizes(config), None, config))
        self._answers: dict[tuple[int, int | None, int | None, int, bool], Dispatch] = {}

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform_query_len: int | None = None,
        num_active_loras: int = 0,
        *,
        allow_full: bool = True,
    ) -> Dispatch:
        """Decide how a batch runs. Answers are cached.

        Args:
            num_tokens: rows of the batch, or tokens of all its requests together.
            num_reqs: requests in the batch; None if their number is unknown or does not matter.
            uniform_query_len: tokens of each request if all have the same number, else None. Uniform decode graphs
                serve the batch if it equals the configuration's `uniform_query_len`.
            num_active_loras: LoRA adapters in use.
            allow_full: False if something in this batch (a cascade, a profiler) rules out a full graph.

        Raises:
            CaptureSizeError: the batch is empty.
            InputError: the numbers do not fit each other; see `BatchDescriptor`.
        """
        asked = (num_tokens, num_reqs, uniform_query_len, num_active_loras, allow_full)
        answer = self._answers.get(asked)
        if answer is not None:
            return answer
        answer = self._decide(BatchDescriptor(*asked[:4]), allow_full)
        if len(self._answers) >= _MAX_REMEMBERED:
            self._answers.clear()
        self._answers[asked] = answer
        return answer

    def agreed(self, mode: CudaGraphMode, size: int, num_active_loras: int, *, num_tokens: int) -> Dispatch:
        """Decide how ranks run a step after they agreed on a mode and a size: with the same key on each rank.

        Args:
            mode: the lowest mode that a rank needs.
            size: the largest padded size, in rows.
            num_active_loras: the most LoRA adapters that a rank has in use.
            num_tokens: rows of this rank's own batch; 0 if all of it is padding.

        Raises:
            CaptureSizeError: no rank has anything to run.
        """
        lora_case = next((case for case in self.lora_cases if case >= num_active_loras), None)
        chosen = CudaGraphMode.NONE, BatchDescriptor(size, num_active_loras=num_active_loras)
        for graphs in self._graphs:
            padded = padded_size(graphs.sizes, size)
            allowed = mode is not CudaGraphMode.NONE and graphs.mode in (mode, CudaGraphMode.PIECEWISE)
            if allowed and padded is not None and lora_case is not None:
                chosen = graphs.mode, graphs.key(padded, lora_case, requests=self._requests)
                break
        return Dispatch(*chosen, Reason.OTHER_RANKS, chosen[1].num_tokens - num_tokens)

    def descriptors(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        """List all graphs to capture as (FULL or PIECEWISE, key), largest first, so that the pool need not grow."""
        pairs = [
            (graphs.mode, graphs.key(size, lora_case, requests=self._requests))
            for graphs, lora_case in itertools.product(self._graphs, self.lora_cases)
            for size in graphs.sizes
        ]
        return sorted(pairs, key=lambda pair: pair[1], reverse=True)

    def advice(self, batch: Dispatch) -> str:
        """Describe a batch that no graph serves, and the setting that would change that, if there is one."""
        size, config = batch.descriptor.num_tokens, self.config
        if batch.reason is Reason.SIZE_NOT_CAPTURED:
            return f"batch size {size}: add {size} to capture_sizes"
        if batch.reason is not Reason.BATCH_TOO_LARGE:
            return f"batch size {size}"
        if batch.descriptor.num_active_loras > self.lora_cases[-1]:
            return f"{batch.descriptor.num_active_loras} active LoRAs: add that to lora_cases"
        requests = batch.descriptor.num_reqs or -(-size // (batch.descriptor.uniform_query_len or size))
        if config.max_num_seqs is not None and requests > config.max_num_seqs:
            return f"{requests} requests: raise max_num_seqs to {requests}"
        largest = max(graphs.sizes[-1] for graphs in self._graphs)
        changes = []
        if config.max_num_tokens is not None and size > config.max_num_tokens:
            changes.append(f"raise max_num_tokens to {size}")
        if self.mode.mixed_mode() is CudaGraphMode.NONE and config.decode_capture_sizes is not None:
            changes.append(f"add {size} to decode_capture_sizes")
        elif config.capture_sizes is not None:
            changes.append(f"add {size} to capture_sizes")
        elif size > DEFAULT_LARGEST:
            changes.append(f"set capture_sizes=simplegraph.default_sizes({size})")
        return f"batch size {size}, the largest is {largest}: {' and '.join(changes) or 'no setting allows it'}"

    def _decide(self, batch: BatchDescriptor, allow_full: bool) -> Dispatch:
        reason = Reason.SWITCHED_OFF
        lora_case = next((case for case in self.lora_cases if case >= batch.num_active_loras), None)
        for graphs in self._graphs:
            if lora_case is None:
                reason = Reason.BATCH_TOO_LARGE
                break
            padded = graphs.accept(batch, allow_full=allow_full)
            if not isinstance(padded, Reason):
                key = graphs.key(padded, lora_case, requests=self._requests)
                padding = padded - batch.num_tokens
                return Dispatch(graphs.mode, key, Reason.PADDED if padding else Reason.EXACT, padding)
            reason = padded
        return Dispatch(CudaGraphMode.NONE, batch, reason, 0)


def resolve_mode(
    mode: CudaGraphMode, support: AttentionCGSupport, uniform_query_len: int = 1
) -> tuple[CudaGraphMode, str | None]:
    """Lower a mode to the support level of the attention.

    Returns:
        The mode, and None; or a lower mode, and a message that names the change, its cause, its cost and alternatives.
        Piecewise runs are correct only if the attention is an eager break.

    Source: vLLM #49547, where a silent downgrade cost 16%. The named cost is that of an eager break on an H200.
    """
    single, uniform = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH
    if support is AttentionCGSupport.ALWAYS or not mode.has_full():
        return mode, None
    if support < (uniform if uniform_query_len > 1 else single):
        usable = CudaGraphMode.PIECEWISE
    elif mode is CudaGraphMode.FULL:
        usable = CudaGraphMode.FULL_AND_PIECEWISE
    else:
        return mode, None
    return usable, _downgrade_message(mode, usable, support, uniform_query_len)


def _downgrade_message(
    mode: CudaGraphMode, usable: CudaGraphMode, support: AttentionCGSupport, uniform_query_len: int
) -> str:
    lost = "mixed batches" if usable.has_full() else f"uniform decode batches of query length {uniform_query_len}"
    if not usable.has_full() and mode is CudaGraphMode.FULL:
        lost = "any batch"
    return (
        f"mode {mode.name} is lowered to {usable.name}: the attention declares {support.name}, which allows no full "
        f"graph for {lost}. Such batches run piecewise, at about 17 us for each attention call (H200), with the "
        "attention marked as an eager break. Use an attention backend with wider support, or accept it with "
        f"mode='{usable.name}'."
    )
