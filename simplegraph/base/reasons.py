"""Reasons why a batch ran the way it did, which counters count and the report explains."""

from __future__ import annotations

import enum

DOCUMENTATION = "https://simple-cuda-graph.readthedocs.io/en/latest/"


class Reason(str, enum.Enum):
    """Explains how a batch ran. The value is for counters and JSON, `text` for people.

    Attributes:
        text: one line saying what was found and, where there is a remedy, what to do.
        link: the part of the documentation about it.
    """

    text: str

    EXACT = "exact", "a graph of exactly this size"
    PADDED = "padded", "padded to the next captured size"
    # The dispatcher's own.
    MODE_NONE = "mode_none", "mode is NONE: graphs are switched off"
    BATCH_TOO_LARGE = "batch_too_large", "the batch is above every captured size"
    SIZE_NOT_CAPTURED = "size_not_captured", "padding is off and this size is not in capture_sizes"
    MIXED_BATCH = "mixed_batch", "not a uniform decode batch, and the mode has no graphs for mixed ones"
    FULL_NOT_ALLOWED = "full_not_allowed", "the caller ruled out a full graph, and the mode has no piecewise ones"
    LORA_COUNT = "lora_count", "more LoRAs are active than any captured case holds"
    EMPTY_BATCH = "empty_batch", "the batch has no rows"
    # Capturing.
    FIRST_CALL = "first_call", "the first call with such arguments: it runs eagerly, as it is"
    WARMUP = "warmup", "a warmup run: the size is captured after it"
    PROOF = "proof", "a call that proves a graph: it runs eagerly, and replays are compared with it"
    CAPTURE_FAILED = "capture_failed", "capturing this size failed before"
    NOT_CAPTURED_UPFRONT = "not_captured_upfront", "capture='upfront' and capture_graphs did not capture this size"
    CAPTURED_OTHERWISE = "captured_otherwise", "graphs were captured for such calls, but not as this one is"
    STALE_TOO_OFTEN = "stale_too_often", "what the graphs read keeps moving; keep weights and buffers in place"
    TOO_MANY_SIGNATURES = (
        "too_many_signatures",
        "max_signatures are captured already; raise it, pass changing values as tensors, or let the others be flushed",
    )
    OTHER_RANKS = "other_ranks", "what another rank runs in this step decided the mode or the size"
    # What is going on around the call.
    TRAINING = "training", "the module is in training mode; call .eval() first, or wrap it with training=True"
    GRAD = (
        "grad",
        "grad mode is on and inputs or parameters require grad; call under torch.inference_mode() or torch.no_grad()",
    )
    GRAD_MODE = "grad_mode", "a training step was called with grad mode off; call it outside of torch.no_grad()"
    OPTIMIZER = "optimizer", "a training step calls an optimizer or scheduler that no graph can hold"
    NO_BACKWARD = "no_backward", "no backward of such a call was seen yet: training graphs are captured after one"
    BACKWARD_PENDING = (
        "backward_pending",
        "two earlier forwards still wait for their backward, and there are two sets of training graphs",
    )
    OUTPUT_KEPT = (
        "output_kept",
        "an output of the call before is in use, in the memory of its graph; outputs are copies from now on",
    )
    UNTRAINABLE = "untrainable", "training graphs cannot stand for such a call"
    EAGER_CONTEXT = "eager_context", "inside simplegraph.eager()"
    NESTED = "nested", "an outer graph owns this call"
    TRANSFORMED = (
        "transformed",
        "the call is traced, transformed or observed: vmap, jvp, dual numbers, jit.trace, make_fx, operator modes",
    )
    CAPTURING_ELSEWHERE = "capturing_elsewhere", "the stream is being captured by someone else"
    WRONG_DEVICE = "wrong_device", "an input is on another device than the module"
    ALLOCATOR = "allocator", "torch's CUDA allocator cannot tell what memory a capture made; use backend:native"
    # What the call passes and returns.
    AMBIGUOUS_BATCH_DIM = "ambiguous_batch_dim", "the batch dimension of an input is not clear; name it in batch_dims"
    BATCH_MISMATCH = (
        "batch_mismatch",
        "inputs disagree on the batch size; check batch_dims, or use exact_shapes=True if their sizes are independent",
    )
    ALIASED_INPUTS = "aliased_inputs", "inputs share memory that the forward writes to; pass tensors of their own"
    ALIASED_OUTPUTS = (
        "aliased_outputs",
        "outputs share memory with an input, or each other, in a way that a replay cannot repeat; return clones",
    )
    CHANGED_ARGUMENTS = (
        "changed_arguments",
        "the forward sets items or fields of its arguments, or gives them another shape or memory; return results",
    )
    OPAQUE_ARGUMENT = (
        "opaque_argument",
        "an argument holds an object that may change inside; name it in trusted_args if it never does",
    )
    UNSUPPORTED_OUTPUT = (
        "unsupported_output",
        "the output holds an object a replay cannot return; return tensors in lists, tuples, dicts or dataclasses",
    )
    PADDING_SHOWS = "padding_shows", "padding rows change the answer; declare pad_values, or capture these sizes"
    RANDOM_PADDING = (
        "random_padding",
        "the forward draws random numbers: padding would change the next ones; capture this size, or set pad_random",
    )
    BATCH_DIM_UNCONFIRMED = (
        "batch_dim_unconfirmed",
        "one batch size was seen, so the batch dimensions are a guess: call another, use capture_graphs or batch_dims",
    )
    OUTPUT_SHAPE_UNKNOWN = "output_shape_unknown", "how the output's shape follows the batch size is not clear"
    PYTHON_STATE = (
        "python_state",
        "the forward changes numbers, flags or settings in Python, which no replay does",
    )
    # Generation by a library beside this one.
    DECODING_MODE = (
        "decoding_mode",
        "assisted decoding and custom loops rearrange caches; graphs serve greedy decoding, sampling and beam search",
    )
    CACHE_KIND = "cache_kind", "the cache is of a kind that decode graphs cannot stand in for; leave it to generate"
    FIXED_CACHE = "fixed_cache", "from a cache of fixed length, the model answers otherwise than from its own"
    CACHE_FULL = "cache_full", "the sequence is longer than the static cache; raise max_length"
    LENGTH_LEARNT = (
        "length_learnt",
        "a first call of its length: it runs as it is, and what the padded call gives is compared with it",
    )
    LENGTH_MISMATCH = "length_mismatch", "inputs disagree on the length, or none has one; check length_dims"
    LENGTH_TOO_LARGE = "length_too_large", "the sequence is above every captured length; add to lengths"
    ATTENTION = "attention", "the attention implementation cannot be in a graph; use 'sdpa' or 'eager'"
    HOOKS = (
        "hooks",
        "hooks, on submodules, on all modules or of autograd, that a replay would not call; remove them for graphs",
    )
    SPREAD_MODEL = "spread_model", "the model is offloaded, or spread over devices; graphs need it on one"
    LENGTH_PADDING = "length_padding", "padded to a captured length, the model answers otherwise"
    ONE_TOKEN = "one_token", "graphs of one token served a generation, though tokens_per_launch asks for more"
    BUSY = "busy", "another thread decodes with these graphs at the moment"

    def __new__(cls, value: str, text: str) -> Reason:
        """A member with the value for machines and the text for people."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member

    @property
    def link(self) -> str:
        return f"{DOCUMENTATION}troubleshooting.html#{self.value.replace('_', '-')}"

    def __str__(self) -> str:
        return str(self.value)


class CannotBind(Exception):
    """This call cannot be served by a graph; internal, becomes a counted eager call.

    Attributes:
        reason, detail: why.
        size: the batch's size, if a graph of another size could serve the call.
    """

    def __init__(self, reason: Reason, detail: str, size: int | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.size = size

    def again(self) -> CannotBind:
        """Return an equal one to raise: an error that is raised keeps the frames it passed, and their tensors."""
        return CannotBind(self.reason, self.detail, self.size)

    @property
    def explained(self) -> str:
        """Return the reason, what it is about, and where the documentation has it, as the end of a message."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.reason.text}{detail}.\n  See {self.reason.link}"
