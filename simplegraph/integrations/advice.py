"""Trials of `advise` for models of transformers, and for models of which only parts can have graphs."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from simplegraph.base.nested import flatten
from simplegraph.doctor.advise import Advisor
from simplegraph.doctor.trials import Trial, copied, measure, observe, trying
from simplegraph.doctor.turns import Way
from simplegraph.integrations.handle import Handle

_LENGTHS = 64  # a generation's longest sequence is rounded up to a multiple


class _Name(str):
    """A name in code, which advice shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


_INPUTS = _Name("inputs")

Make = Callable[[Any, Callable[[], Any]], tuple[Handle, dict[str, Any]]]


def advisor(sg: Any) -> Advisor:
    """Make an advisor that tries all that this package, `sg`, has."""
    entries = {"generate": functools.partial(try_generation, sg), "": functools.partial(try_encoder, sg)}
    return Advisor(sg, entries, functools.partial(try_parts, sg))


def _of_transformers(sg: Any) -> Any:
    """Return this package's part for transformers, which is installed where a model of it is called."""
    return importlib.import_module(f"{sg.__name__}.integrations.transformers")


def _is_transformers(model: Any) -> bool:
    library: Any = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _try_handle(way: str, make: Make, model: nn.Module, method: str, args: Any, kwargs: Mapping[str, Any]) -> Trial:
    """Try a function that gives a model graphs in place, on a copy.

    Args:
        way: the function's name in code.
        make: called with the copy and its call; returns the handle, and the settings that it chose.
        model: the model.
        method: the method that is called; empty for the model itself.
        args: of the call.
        kwargs: of the call.
    """
    trial = Trial()
    with trying(trial):
        plain = copied((model, args, dict(kwargs)))
        eager = Way(_call(method, *plain))
        observe(trial, eager, plain)
        trial_model, args, kwargs = copied((model, args, dict(kwargs)))  # with graphs in place, no call would be eager
        graphs, settings = make(trial_model, _call(method, trial_model, args, kwargs))
        target = "{2}" if method else "{0}"
        trial.way = f"{way}({target}{''.join(f', {name}={value!r}' for name, value in settings.items())})"
        with graphs:
            served = _call(method, trial_model, args, kwargs)  # a method may have been replaced
            measure(trial, served, lambda: [part.graph_stats for part in graphs.graphed], eager)
    return trial


def _call(method: str, model: Any, args: Any, kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    return functools.partial(getattr(model, method) if method else model, *args, **kwargs)


def try_generation(sg: Any, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trial | None:
    """Try `graph_generation` for a call of `generate`; None if it is not one of transformers."""
    if not _is_transformers(model):
        return None

    def make(trial_model: Any, eager: Callable[[], Any]) -> tuple[Handle, dict[str, Any]]:
        tokens = next(leaf for leaf in flatten(eager())[0] if isinstance(leaf, Tensor))
        length = _LENGTHS * -(-(tokens.shape[1] + 1) // _LENGTHS)
        settings: dict[str, Any] = {"max_batch_size": tokens.shape[0], "max_length": length}
        return _of_transformers(sg).graph_generation(trial_model, **settings), settings

    given = {name: value for name, value in kwargs.items() if value is not None}
    return _try_handle("simplegraph.integrations.transformers.graph_generation", make, model, "generate", args, given)


def try_encoder(sg: Any, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trial | None:
    """Try `graph_encoder` for a call with an attention mask; None if it is no encoder of transformers."""
    mask, config = kwargs.get("attention_mask"), getattr(model, "config", None)
    if not _is_transformers(model) or not isinstance(mask, Tensor) or getattr(config, "is_encoder_decoder", False):
        return None
    if any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):
        return None

    def make(trial_model: Any, eager: Callable[[], Any]) -> tuple[Handle, dict[str, Any]]:
        settings: dict[str, Any] = {"max_batch_size": mask.shape[0]}
        return _of_transformers(sg).graph_encoder(trial_model, **settings), settings

    return _try_handle("simplegraph.integrations.transformers.graph_encoder", make, model, "", args, kwargs)


def try_parts(sg: Any, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trial | None:
    """Try `wrap_parts` for a model whose call can have no graph as a whole; None while it trains."""
    if model.training:
        return None

    def make(trial_model: Any, eager: Callable[[], Any]) -> tuple[Handle, dict[str, Any]]:
        return sg.wrap_parts(trial_model, (), call=eager), {"inputs": _INPUTS}

    return _try_handle("sg.wrap_parts", make, model, "", args, kwargs)
