"""Serves a model of the table as its user does: one line each of the integration that its entry names."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import simplegraph as sg
from bench.model_table.builders.model import Call
from bench.model_table.entries import ENCODER, GENERATION, PIPELINE, WRAP, TableEntry
from bench.tools.replays import report_of, stats_of
from simplegraph import Reason
from simplegraph.manager.stats import GraphStats

ROWS = 4  # of the largest batch
NEW_TOKENS = 8
MAX_LENGTH = {True: 64, False: 320}  # of a generation, at the tiny shape and the real one


@dataclasses.dataclass
class Counts:
    """Replays by mode, and eager calls by reason, of all graphs of a served model up to now."""

    replays: collections.Counter[str]
    eager: collections.Counter[Reason]

    def since(self, before: Counts) -> Counts:
        """Return what came after an earlier moment."""
        return Counts(self.replays - before.replays, self.eager - before.eager)


@dataclasses.dataclass
class ServedModel:
    """A model with its graphs.

    Attributes:
        call: calls it; by: what has the graphs: a wrapper, or an integration's handle.
        parts: the names of the parts that have graphs, if the whole has none.
        encoder: the language model in a sentence encoder, below Python of its own.
    """

    call: Callable[..., Any]
    by: Any
    parts: tuple[str, ...] = ()
    encoder: Any = None

    @property
    def stats(self) -> list[GraphStats]:
        """The counters of its graphs."""
        return list(stats_of(self.by))

    def report(self) -> str:
        """Return what the user is told of its graphs."""
        return report_of(self.by)

    def counts(self) -> Counts:
        """Count replays and eager calls up to now."""
        modes: collections.Counter[str] = collections.Counter()
        for stats in self.stats:
            known = collections.Counter({graph.label: 0 for graph in stats.graphs.values()})
            for graph in list(stats.graphs.values()):
                modes[graph.mode] += graph.replays
                known[graph.label] += graph.replays
            modes["dropped"] += stats.replays - known.total()
        return Counts(modes, sum((stats.eager for stats in self.stats), collections.Counter()))

    def explained(self, reason: Reason) -> str:
        """Return what the latest eager call of a reason was about, or why a capture failed."""
        for stats in self.stats:
            if reason is Reason.CAPTURE_FAILED and stats.failures:
                return next(iter(stats.failures.values()))
            if stats.details.get(reason):
                return stats.details[reason]
        return ""


def caller(entry: TableEntry, model: Any) -> Callable[..., Any]:
    """Return what a user of the model calls, graphs or not."""
    if entry.integration == GENERATION:
        model.generation_config.eos_token_id = None
        greedy = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        return lambda *args, **kwargs: model.generate(*args, **(greedy | kwargs))
    if entry.category == "sentence-transformers":
        name = "predict" if hasattr(model, "predict") else "encode"
        return lambda *args, **kwargs: getattr(model, name)(*args, **kwargs)
    return lambda *args, **kwargs: model(*args, **kwargs)


@contextlib.contextmanager
def serve(
    entry: TableEntry, model: Any, *, tiny: bool, part: str = "", settings: Mapping[str, Any] | None = None
) -> Iterator[ServedModel]:
    """Serve the model, or the named part of it, as its entry says."""
    settings = dict(settings or {})
    if entry.integration == WRAP:
        sizes: Any = {"capture_sizes": [1, 2, ROWS], "progress": False} | settings
        wrapped: Any = sg.wrap(model, **sizes)
        yield ServedModel(caller(entry, wrapped), wrapped)
        wrapped.reset_graphs()
        return
    with _graphs(entry, getattr(model, part) if part else model, tiny, settings) as graphs:
        encoder = graphs.model if entry.category == "sentence-transformers" else None
        yield ServedModel(caller(entry, model), graphs, encoder=encoder)


def inner_call(served: ServedModel, args: Any, kwargs: Any) -> Call:
    """Return the arguments that a sentence encoder's language model gets in a call."""
    forward, seen = served.encoder.forward, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return forward(*args, **kwargs)

    vars(served.encoder)["forward"] = recorded
    try:
        served.call(*args, **kwargs)
    finally:
        del vars(served.encoder)["forward"]
    found: Call = seen[-1]
    return found


@contextlib.contextmanager
def serve_parts(entry: TableEntry, model: Any, calls: Sequence[Call]) -> Iterator[ServedModel]:
    """Give graphs to parts of the model, found by example calls."""
    plain = caller(entry, model)
    inputs, *others = calls
    with sg.wrap_parts(model, inputs, others=others, call=lambda args, kwargs: plain(*args, **kwargs)) as graphs:
        yield ServedModel(caller(entry, model), graphs, tuple(graphs.parts))


def _graphs(entry: TableEntry, model: Any, tiny: bool, settings: dict[str, Any]) -> Any:
    if entry.integration == GENERATION:
        from simplegraph.integrations.transformers import graph_generation

        sizes = {"max_batch_size": ROWS, "max_length": MAX_LENGTH[tiny]}
        return graph_generation(model, **(sizes | settings))
    if entry.integration == ENCODER or entry.category == "sentence-transformers":
        from simplegraph.integrations.transformers import graph_encoder

        return graph_encoder(model, **({"max_batch_size": ROWS} | settings))
    if entry.integration == PIPELINE:
        from simplegraph.integrations.diffusers import graph_pipeline

        return graph_pipeline(model, **({"max_batch_size": 2 * ROWS} | settings))
    raise ValueError(f"{entry.name}: {entry.integration!r} serves no model of the table.")
