"""Captured backwards, and the ways that gradients take through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.manager.table import CapturedGraph
from simplegraph.training.handed import GraphGradients


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """A captured backward.

    Attributes:
        graph: what is replayed.
        outputs: the numbers of the outputs that it takes gradients of.
        places: for each gradient that it makes, the number of its leaf.
    """

    graph: CapturedGraph
    outputs: frozenset[int]
    places: Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Route:
    """The way of a backward: its graph, what that is given, and where the gradients that eager makes, too, go.

    Attributes:
        given: the numbers of the outputs that it is given gradients of.
        loaded: (number of an output, buffer of its gradient); zeroed: buffers of gradients that are missing.
        made: (place among the leaves, output of the graph) of all gradients.
        handed: those that may be handed out as they are; copied: the others; gradients: those, None if there are none.
    """

    graph: CapturedGraph
    given: frozenset[int]
    loaded: Sequence[tuple[int, Tensor]]
    zeroed: Sequence[Tensor]
    made: Sequence[tuple[int, Tensor]]
    handed: Sequence[tuple[int, Tensor]]
    copied: Sequence[tuple[int, Tensor]]
    gradients: GraphGradients | None

    def load(self, grads: Sequence[Any]) -> None:
        """Copy gradients of outputs to where the graph reads them; those that are missing count as zeros."""
        if len(self.loaded) == 1:
            number, buffer = self.loaded[0]
            buffer.copy_(grads[number])
        elif self.loaded:
            buffers = [buffer for _, buffer in self.loaded]
            torch._foreach_copy_(buffers, [grads[number] for number, _ in self.loaded])
        for buffer in self.zeroed:
            buffer.zero_()
