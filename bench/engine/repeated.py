"""One step of an engine, repeated, so that it can be timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.engine.engine import Engine
from bench.engine.scheduler import StepPlan
from bench.tools import text
from simplegraph import BatchDescriptor, CudaGraphMode


class RepeatedStep:
    """A step that writes the same keys and values each time: as a graph, and eagerly.

    Args:
        engine: with its graphs.
        count: requests of the step.
        length: tokens in each one's cache, the step's included.
        query: tokens that the step computes of each.
    """

    def __init__(self, engine: Engine, count: int, length: int, query: int = 1) -> None:
        self._runner = runner = engine.runner
        self._count, self._query = count, query
        page = engine.config.page_size
        pages = -(-length // page)
        tables = []
        for backend in runner.backends:
            gone = max(0, length - (backend.window or length)) // page  # pages before the window
            table = torch.zeros(count, pages, dtype=torch.int32)
            table[:, gone:] = 1 + torch.arange(count * (pages - gone), dtype=torch.int32).view(count, -1)
            tables.append(table.numpy())
        positions = torch.arange(length - query, length).repeat(count)
        ids = text.token_ids(count * query, runner.llama.config.vocab_size)
        numbers = torch.arange(count).numpy(), torch.full((count,), length).numpy(), ids.numpy(), positions.numpy()
        self.batch = runner.manager.dispatch(count * query, count, 1 if query == 1 else None)
        runner.describe(StepPlan([], [query] * count, [False] * count, *numbers, tables), self.batch)

    def run(self) -> Any:
        """Run it once more; return the outputs of its graph."""
        self._runner.repeat()
        return self._runner.manager.run(self.batch, self._runner.forward)

    def logits(self) -> Tensor:
        """Run it, and return the logits of each request's last token."""
        found = self.run()
        return self._head(found) if isinstance(found, Tensor) else found.logits[: self._count].clone()

    def tokens(self) -> Tensor:
        """Run it, and return each request's most likely token."""
        found = self.run()
        # A piecewise graph gives hidden states.
        return self._head(found).argmax(dim=-1) if isinstance(found, Tensor) else found.tokens[: self._count]

    def eager_tokens(self) -> Tensor:
        """Do as `tokens`, eagerly."""
        self._runner.repeat()
        rows = self.batch.descriptor.num_tokens
        hidden = self._runner.forward(CudaGraphMode.NONE, BatchDescriptor(rows, rows, 1))
        if not isinstance(hidden, Tensor):
            raise TypeError("an eager step gave what a graph gives")
        return self._head(hidden).argmax(dim=-1)

    def _head(self, hidden: Tensor) -> Tensor:
        return self._runner.llama.head(hidden[self._query - 1 :: self._query][: self._count])
