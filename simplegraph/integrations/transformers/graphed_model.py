"""Holds what generation and encoding share: the handle that a user gets, and the module that graphs run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from simplegraph.graph.subclass import subclass
from simplegraph.integrations.transformers.overrides import Method, original_class, override_methods, restore_methods
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats
from simplegraph.reasons import Reason

# Of reasons whose own texts advise settings of `wrap`, which these handles do not have.
_TEXTS = {
    Reason.OPAQUE_ARGUMENT: "an argument is one that graphs of this model do not take",
    Reason.TOO_MANY_SIGNATURES: "calls come in more kinds (lengths, flags, inputs given) than graphs are kept for",
    Reason.AMBIGUOUS_BATCH_DIM: "it is not clear which dimension of an input has the rows",
    Reason.BATCH_DIM_UNCONFIRMED: "only one batch size has been seen, so what follows it is a guess, and is not padded",
    Reason.PADDING_SHOWS: "padding rows change the answer; add these sizes to capture_sizes",
    Reason.RANDOM_PADDING: "the forward draws random numbers: padding would change the next ones; capture this size",
    Reason.BATCH_MISMATCH: "inputs disagree on the number of rows",
}
HandleType = TypeVar("HandleType", bound="GraphedModel")


class GraphedModel:
    """A model whose calls go through graphs: its counters, and `remove`, which a context manager calls at its end.

    Args:
        model: the model.
        step: a wrapped `ModelStep` of it, which has the graphs.
        methods: what the model's methods call from now on.
    """

    def __init__(self, model: Any, step: Any, methods: Mapping[str, Method]) -> None:
        self.model = model
        self._step = step
        self.stats.name = type(model).__name__
        self.stats.texts.update(_TEXTS)
        override_methods(model, self, methods)

    @property
    def stats(self) -> GraphStats:
        """The counters behind `report`."""
        return self._step.graph_stats  # type: ignore[no-any-return]

    def report(self) -> GraphReport:
        """Report captures, replays and what ran eagerly, with the reasons; a refused generation counts once."""
        if self._step.graph_manager is None:
            return GraphReport(self.stats, str(self.model.device))
        return self._step.graph_report()  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Drop the graphs and what they read; later calls capture again."""
        self._step.reset_graphs()

    def remove(self) -> None:
        """Give the model its own methods back and drop the graphs; a second call does nothing."""
        restore_methods(self.model, self)
        self.reset()

    def __enter__(self: HandleType) -> HandleType:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


class ModelStep(nn.Module):
    """The model's own forward as a module by itself, whose calls are captured.

    Args:
        model: the model; what its class had as `forward` before methods were overridden is called.
    """

    takes_settings = False  # nobody who sees its messages can set its mode, or mark breaks in it

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.run_model = functools.partial(original_class(model).forward, model)
        self.training = False  # the model itself says whether it is


@functools.cache
def named(kind: Any, name: str) -> Any:
    """Derive a class by the model's name, which messages and the report then call its instances."""
    return subclass(kind, {"__qualname__": name}, name=name)
