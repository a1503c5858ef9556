"""Splits a trace at attention; its pieces are compiled one by one, then run in order or captured as a graph each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx.passes.split_module import split_module

from bench.tools.lean_capture import LeanCapture, alias

SPLIT_AT = ("bench::paged_attention", "bench::serving_attention", "bench::serving_recurrence")


class Pieces:
    """A traced model, split and compiled; runs as a whole, or records its pieces as graphs.

    Args:
        traced: Dynamo's graph.
        example_inputs: its inputs, fake or real, with a symbolic batch dimension.
    """

    def __init__(self, traced: fx.GraphModule, example_inputs: list[Any]) -> None:
        self.module = split_at_attention(traced)
        self.compiled: dict[str, Callable[..., Any]] = {}
        self._recorder: PieceRecorder | None = None
        fake_mode = detect_fake_mode(example_inputs)
        fakes = [fake_mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in example_inputs]
        with fake_mode:
            PieceCompiler(self.module, self.compiled).run(*fakes)

    def __call__(self, *args: Any) -> Any:
        return (self._recorder or PieceRunner(self.module, self.compiled)).run(*args)

    @contextlib.contextmanager
    def recording(self, lean: LeanCapture) -> Iterator[list[Callable[[], object]]]:
        """Capture calls in this context instead of running them; yield the list of steps that replay them."""
        steps: list[Callable[[], object]] = []
        self._recorder = PieceRecorder(self.module, self.compiled, lean, steps)
        try:
            yield steps
        finally:
            self._recorder = None


def split_at_attention(traced: fx.GraphModule) -> fx.GraphModule:
    """Split the graph into a chain of submodules, with each attention call in its own."""
    parts: dict[fx.Node, int] = {}
    part = 0
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        boundary = is_attention(node)
        part += boundary
        parts[node] = part
        part += boundary
    # The operator writes to its arguments, so the order of the parts must be kept.
    return split_module(traced, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]


def is_attention(node: fx.Node) -> bool:
    """True if a node calls the attention operator."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return node.op == "call_function" and getattr(packet, "_qualified_op_name", None) in SPLIT_AT


class PieceCompiler(fx.Interpreter):
    """Runs the split graph on fake tensors, and compiles every piece with the inputs it sees."""

    def __init__(self, module: fx.GraphModule, compiled: dict[str, Callable[..., Any]]) -> None:
        super().__init__(module)
        self._compiled = compiled

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = self.fetch_attr(target)
        if not any(is_attention(node) for node in piece.graph.nodes):
            self._compiled[target] = compile_piece(piece, args)
        return super().call_module(target, args, kwargs)


def compile_piece(piece: fx.GraphModule, fakes: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile one piece by Inductor, whose cache recognizes equal pieces."""
    from torch._inductor.compile_fx import compile_fx

    # A separate tracing context: the whole model's metadata must not mix with the piece's.
    fake_mode = detect_fake_mode(fakes)
    with tracing(TracingContext(fake_mode)):
        compiled = compile_fx(piece, list(fakes))
    single = not isinstance(_returned(piece), (tuple, list))
    return (lambda *args: compiled(*args)[0]) if single else compiled


def _returned(piece: fx.GraphModule) -> Any:
    """Return the arguments of the piece's output node: one node, or a sequence of them."""
    return next(iter(reversed(piece.graph.nodes))).args[0]


class PieceRunner(fx.Interpreter):
    """Runs the split graph with its pieces compiled."""

    def __init__(self, module: fx.GraphModule, compiled: dict[str, Callable[..., Any]]) -> None:
        super().__init__(module)
        self._compiled = compiled

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in self._compiled:
            return self.call_piece(self._compiled[target], args)
        return self.call_attention(self.fetch_attr(target), args)

    def call_piece(self, piece: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run one compiled piece."""
        return piece(*args)

    def call_attention(self, attention: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        """Run the attention operator between two pieces."""
        return attention(*args)


class PieceRecorder(PieceRunner):
    """Captures the pieces, and records the attention calls between them without running them."""

    def __init__(
        self,
        module: fx.GraphModule,
        compiled: dict[str, Callable[..., Any]],
        lean: LeanCapture,
        steps: list[Callable[[], object]],
    ) -> None:
        super().__init__(module, compiled)
        self._lean, self._steps = lean, steps

    def call_piece(self, piece: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        graph, result = self._lean.capture(piece, *args)
        self._steps.append(graph.replay)
        return result

    def call_attention(self, attention: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # Not owned: the previous piece rewrites these at every replay, and later pieces may reuse the memory.
        self._steps.append(_AttentionCall(attention, alias(args)))


class _AttentionCall:
    """One eager attention call with the arguments it was captured with."""

    def __init__(self, attention: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._forward, self._args = attention.forward, args

    def __call__(self) -> None:
        self._forward(*self._args)
