"""Compiled piecewise: one trace, split at attention, Inductor per piece, one graph per piece and size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from bench.arms.base import Setup
from bench.arms.compiled import Compiled, Replay, without_guards
from bench.models.workload import Batch
from bench.tools.lean_capture import LeanCapture, alias, can_alias
from bench.tools.pieces import Pieces


class CompiledPiecewise(Compiled):
    """Runs attention eagerly between graphs of compiled pieces, which engines call piecewise."""

    name = "compiled-piecewise"

    def __init__(self, setup: Setup) -> None:
        self._pieces: Pieces | None = None
        super().__init__(setup)

    def compile(self, model: torch.nn.Module) -> Callable[..., Tensor]:
        return torch.compile(model, fullgraph=True, backend=self._backend, options={"guard_filter_fn": without_guards})

    def _backend(self, traced: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        if self._pieces is not None:
            raise RuntimeError("the model was traced twice; one trace must serve every size.")
        self._pieces = Pieces(traced, example_inputs)
        return self._pieces

    def capture(self, lean: LeanCapture, views: Batch) -> Replay:
        if self._pieces is None:
            raise RuntimeError("the model was not compiled before its capture.")
        if not can_alias():
            self.notes.append("this torch cannot alias memory: pieces own their outputs")
        with self._pieces.recording(lean) as steps:
            output = alias(self._compiled(*views))
        return _PiecewiseReplay(steps, output)

    def details(self) -> dict[str, Any]:
        pieces = 0 if self._pieces is None else len(self._pieces.compiled)
        return super().details() | {"pieces": pieces}


class _PiecewiseReplay:
    """The steps of one size, and the output that the last of them writes."""

    def __init__(self, steps: list[Callable[[], object]], output: Tensor) -> None:
        self._steps, self._output = steps, output

    def __call__(self) -> Tensor:
        for step in self._steps:
            step()
        return self._output
