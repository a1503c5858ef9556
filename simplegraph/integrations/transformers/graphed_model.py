"""Base classes of generation and encoding: the handle that a user gets, and the module that graphs run."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import GenerationMixin

from simplegraph.base.errors import ConfigError
from simplegraph.base.patches import subclass
from simplegraph.base.reasons import Reason
from simplegraph.integrations.handle import Handle
from simplegraph.integrations.transformers.overrides import Method, original_class, override_methods, restore_methods
from simplegraph.manager.stats import GraphReport, GraphStats

# Replacements for texts of reasons that advise settings of `wrap`, which these handles do not have.
_TEXTS = {
    Reason.OPAQUE_ARGUMENT: "graphs of this model do not support an argument",
    Reason.TOO_MANY_SIGNATURES: "calls come in more kinds (lengths, flags, inputs) than graphs are kept for",
    Reason.AMBIGUOUS_BATCH_DIM: "it is ambiguous which dimension of an input is the batch",
    Reason.BATCH_DIM_UNCONFIRMED: "only one batch size was seen, so which dimensions follow it is a guess; no padding",
    Reason.PADDING_SHOWS: "padding rows change the output; add these sizes to capture_sizes",
    Reason.SIZE_NOT_CAPTURED: "the forward draws random numbers, and padding would change the next; capture this size",
    Reason.BATCH_MISMATCH: "inputs disagree on the number of rows",
}
logger = logging.getLogger("simplegraph")


class GraphedModel(Handle):
    """Handle of a model whose calls go through graphs: has its counters, and `remove` to undo it.

    As a context manager it calls `remove` at the end.

    Args:
        model: the model.
        step: a wrapped `ModelStep` of the model, which has the graphs.
        methods: method name -> the function that replaces it.
    """

    def __init__(self, model: Any, step: Any, methods: Mapping[str, Method]) -> None:
        self.model = model
        self._step = step
        self.stats.name = type(model).__name__
        self.stats.texts.update(_TEXTS)
        self.stats.capture_method, self.stats.reset_method = "capture", "reset"
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

    def __repr__(self) -> str:
        """Show the class of the model and what came of its calls."""
        return f"<{type(self).__name__} of {self.stats.name}: {self.stats.summary}>"

    @property
    def graphed(self) -> Iterable[Any]:
        """The wrapped step of the model."""
        return (self._step,)

    def put_back(self) -> None:
        """Restore the model's own methods; a second call does nothing."""
        restore_methods(self.model, self)

    def give_way(self) -> None:
        """Remove these graphs for later ones of the same model, and say so in the log and in `report`."""
        logger.warning(
            "simplegraph: this %s had graphs already, which are dropped for the new ones; their handle counts no more "
            "calls. Call remove() on it first, or go on with it.",
            self.stats.name,
        )
        self.stats.name += ", replaced by later graphs"
        self.remove()


class ModelStep(nn.Module):
    """A module whose calls are captured, and run the model's own forward.

    Args:
        model: the model. The `forward` of its original class is called, before methods were overridden.

    Attributes:
        cache_name: name of the model's argument and output that holds its cache.
    """

    takes_settings = False  # users who see its messages cannot set its mode or mark breaks in it
    _simplegraph_unhooked = "model"  # the child whose `forward` alone runs here: its own hooks run around calls

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.cache_name = _cache_name(model)
        self.run_model = functools.partial(original_class(model).forward, model)
        self.training = False  # only the model's own `training` counts


def _cache_name(model: Any) -> str:
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
        return "cache"  # of all models, from transformers 5.24 on
    names = inspect.signature(type(model).forward).parameters
    return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"


@functools.cache
def named(kind: Any, name: str) -> Any:
    """Derive a class named after the model, so that messages and the report show that name."""
    return subclass(kind, {"__qualname__": name}, name=name)


def check_counts(name: str, values: Sequence[int]) -> None:
    """Raise an error unless a setting is a list of sizes or lengths.

    Raises:
        ConfigError: the list is empty, or an entry is no whole number of at least 1.
    """
    if not values or not all(isinstance(value, int) and value > 0 for value in values):
        raise ConfigError(
            f"{name} is {values!r}; expected a list of whole numbers of at least 1, such as [64, 128, 256]."
        )
