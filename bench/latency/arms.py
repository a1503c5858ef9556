"""The ways in which a module is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.arms.libraries import NamedArm, load_cuda
from bench.optimized import rows as optimized
from bench.optimized.rows import Inputs, Step
from bench.optimized.shapes import ComparedModel
from bench.tools.lean_capture import LeanCapture
from simplegraph.call.call import CallLayout
from simplegraph.call.plan import Plan

EAGER, OURS, STATIC, UNGUARDED, BARE = "eager", "simplegraph", "static", "no-guards", "bare-graph"
CALLABLES, TENSORDICT, COMPILED = "make-graphed-callables", "tensordict-cudagraph", optimized.COMPILED
OPTIMIZED = optimized.STATIC


def _static(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs]) -> Step:
    wrapped: Step = sg.wrap(module, capture_sizes=[len(batches[0][0])], outputs="static", progress=False)
    return wrapped


def _bare(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs]) -> Step:
    """Capture the module; a call copies its inputs, all in one launch, and replays."""
    lean, inputs = LeanCapture(), tuple(each.clone() for each in batches[0])
    with lean.on_stream():
        module(*inputs)
    with lean.session():
        graph, output = lean.capture(module, *inputs)
    replay, copy_all, single = graph.replay, torch._foreach_copy_, inputs[0] if len(inputs) == 1 else None

    def step(*given: Tensor, kept: nn.Module = module) -> Tensor:
        if single is not None:
            single.copy_(given[0], True)
        else:
            copy_all(inputs, given, True)
        replay()
        return output  # type: ignore[no-any-return]

    return step


# Called with the entry, the module and a list of one batch.
ARMS: dict[str, NamedArm] = {
    EAGER: optimized.ARMS[optimized.EAGER],
    OURS: optimized.ARMS[optimized.GRAPH],
    STATIC: NamedArm(_static, ours=True),
    UNGUARDED: NamedArm(_static, ours=True),
    BARE: NamedArm(_bare, load_cuda),
    **{name: optimized.ARMS[name] for name in (CALLABLES, TENSORDICT, OPTIMIZED, COMPILED)},
}
USUAL = tuple(name for name, arm in ARMS.items() if not arm.compiles)


def plans(wrapped: Any) -> Iterator[tuple[CallLayout, Plan]]:
    """Yield the plans that serve calls of a wrapper, each with the layout of its calls."""
    for layout in wrapped._graph_runner._calls.layouts:
        for plan in layout.plans.values():
            if isinstance(plan, Plan):
                yield layout, plan


class _AlwaysHold:
    """Stands for what checks settings, plain values and what graphs read, and takes all as unchanged.

    Args:
        key: of the values.
    """

    shows_releases = False

    def __init__(self, key: object = None) -> None:
        self.key = key

    def hold(self) -> bool:
        return True

    def holds(self, *_: object) -> bool:
        return True

    def read_if_in_place(self, _: object) -> tuple[()]:
        return ()


def remove_guards(wrapped: Any) -> None:
    """Let the graphs of a wrapper serve calls without looking at the module or at settings of torch.

    Raises:
        RuntimeError: no graph serves calls yet, or the guards are elsewhere.
    """
    found = list(plans(wrapped))
    if not found or not all(hasattr(plan.state, "reading") and hasattr(at.settings, "hold") for at, plan in found):
        raise RuntimeError("found no guards to leave out; `remove_guards` must know where a call asks for them.")
    unchanged: Any = _AlwaysHold()
    for layout, plan in found:
        layout.settings = plan.state.reading = unchanged
    present: Any = wrapped._graph_runner._calls.plain.present
    present.check = _AlwaysHold(present.check.key)
