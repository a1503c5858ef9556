"""`Reason`, which explains how a batch ran: counters count reasons, and the report explains them."""

from __future__ import annotations

import enum


def explain_command(section: str) -> str:
    """Return the command that prints a section of the troubleshooting page."""
    return f"simplegraph explain {section}"


class Reason(str, enum.Enum):
    """Explains how a batch ran. The value is for counters and JSON, `text` for users.

    Attributes:
        text: one line with the cause and, if there is a remedy, what to do.
        command: the command that prints its section of the troubleshooting page.
    """

    text: str

    EXACT = "exact", "a graph of exactly this size"
    PADDED = "padded", "padded to the next captured size"
    # Reasons of the dispatcher.
    SWITCHED_OFF = "switched_off", "graphs are switched off by mode NONE, SIMPLEGRAPH_MODE=off or simplegraph.eager()"
    BATCH_TOO_LARGE = "batch_too_large", "the batch is larger than any captured size"
    SIZE_NOT_CAPTURED = (
        "size_not_captured",
        "this size is not in capture_sizes, and padding is off, or would change the random numbers that are drawn next",
    )
    MIXED_BATCH = (
        "mixed_batch",
        "not a uniform decode batch, or no full graph is allowed for it, and the mode has no other graphs",
    )
    EMPTY_BATCH = "empty_batch", "the batch has no rows"
    # Capturing.
    FIRST_CALL = (
        "first_call",
        "a first call with these shapes, dtypes and values, which runs eagerly and shows what the forward reads",
    )
    WARMUP = "warmup", "a warmup run before the capture"
    PROOF = "proof", "a call that proves a graph, which runs eagerly and is compared with replays"
    CAPTURE_FAILED = "capture_failed", "an earlier capture of this size, or of these shapes, failed"
    NOT_CAPTURED_UPFRONT = "not_captured_upfront", "such a call was not among those that were captured up front"
    STALE_TOO_OFTEN = "stale_too_often", "what the graphs read keeps moving; keep weights and buffers in place"
    TOO_MANY_SIGNATURES = (
        "too_many_signatures",
        "more signatures than max_signatures; raise it, pass changing values as tensors, or lengths by length_dims",
    )
    OTHER_RANKS = "other_ranks", "what another rank runs in this step decided the mode or the size"
    # The state around the call.
    TRAINING = "training", "the module is in training mode; call .eval() first, or wrap it with training=True"
    GRAD = (
        "grad",
        "grad mode is on and inputs or parameters require grad; call under torch.inference_mode() or torch.no_grad()",
    )
    BACKWARD_PENDING = (
        "backward_pending",
        "an earlier forward by training graphs still waits for its backward; run it first, or drop its outputs",
    )
    UNTRAINABLE = "untrainable", "graphs cannot train such a call, or its optimizer"
    NESTED = "nested", "an outer graph holds this call"
    TRANSFORMED = (
        "transformed",
        "the call is traced, transformed or observed by vmap, jvp, dual numbers, jit.trace, make_fx or operator modes",
    )
    BUSY = "busy", "the stream is being captured by someone else, or another thread generates with these graphs"
    WRONG_DEVICE = "wrong_device", "inputs and module are on different devices; a graph needs all of them on one"
    ALLOCATOR = "allocator", "torch's CUDA allocator cannot tell what memory a capture made; use backend:native"
    # Arguments and results of the call.
    AMBIGUOUS_BATCH_DIM = "ambiguous_batch_dim", "the batch dimension of an input is not clear; name it in batch_dims"
    BATCH_MISMATCH = (
        "batch_mismatch",
        "inputs disagree on the batch size or length; check batch_dims and length_dims, or use exact_shapes=True",
    )
    ALIASED = (
        "aliased",
        "inputs or outputs share memory in a way that a replay cannot repeat; pass or return clones",
    )
    CHANGED_ARGUMENTS = (
        "changed_arguments",
        "the forward sets items or fields of its arguments, or gives them another shape or memory; return results",
    )
    OPAQUE_ARGUMENT = (
        "opaque_argument",
        "an argument holds an object that may change inside; make it an attribute of the module if it never does",
    )
    UNSUPPORTED_OUTPUT = (
        "unsupported_output",
        "the output holds an object a replay cannot return; return tensors in lists, tuples, dicts or dataclasses",
    )
    PADDING_SHOWS = "padding_shows", "padding rows change the answer; set padding=False, or declare pad_values"
    BATCH_DIM_UNCONFIRMED = (
        "batch_dim_unconfirmed",
        "batch dimensions are a guess after one batch size; call another, or set batch_dims or exact_shapes=True",
    )
    OUTPUT_SHAPE_UNKNOWN = "output_shape_unknown", "how the output's shape follows the batch size is not clear"
    PYTHON_STATE = (
        "python_state",
        "numbers, flags, settings or other Python state keep changing, and a graph holds one value of each",
    )
    # Generation by another library.
    GENERATION = (
        "generation",
        "decode graphs serve greedy decoding, sampling and beam search on a cache that generate makes, not this one",
    )
    LENGTH_TOO_LARGE = (
        "length_too_large",
        "the sequence is longer than graphs are captured for",
    )
    ATTENTION = "attention", "the attention implementation cannot be in a graph; use 'sdpa' or 'eager'"
    HOOKS = (
        "hooks",
        "hooks, on submodules, on all modules or of autograd, that a replay would not call; remove them for graphs",
    )
    LENGTH_PADDING = "length_padding", "padded to a captured length, the model gives other answers"
    ONE_TOKEN = "one_token", "graphs of one token served a generation, though tokens_per_launch asks for more"

    def __new__(cls, value: str, text: str) -> Reason:
        """Make a member with the value for machines and the text for people."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member

    @property
    def command(self) -> str:
        return explain_command(self.value.replace("_", "-"))

    def __str__(self) -> str:
        return str(self.value)


# Reasons of first calls: later calls of the same kind replay.
SOON = frozenset(
    {
        *(Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF),
        *(Reason.OUTPUT_SHAPE_UNKNOWN, Reason.BATCH_DIM_UNCONFIRMED),
    }
)


class CannotBind(Exception):
    """No graph can serve a call. Internal: the call runs eagerly, and is counted.

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
        """Return an equal error to raise: an error that was raised keeps frames alive, and their tensors."""
        return CannotBind(self.reason, self.detail, self.size)

    @property
    def explained(self) -> str:
        """Return the reason, its detail, and the command for more information, as the end of a message."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.reason.text}{detail}.\n  See: {self.reason.command}"


class NoTensor(CannotBind):
    """A call has no tensor at all, which the reason's text, about several dimensions, does not say."""

    @property
    def explained(self) -> str:
        """Return the detail alone, and the command for more information."""
        return f"{self.detail}.\n  See: {self.reason.command}"
