"""`graph_generation`: a model's `generate` decodes through graphs, until it is undone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from simplegraph.batch.dispatch import Reason
from simplegraph.errors import ConfigError
from simplegraph.graph.device import GraphPool
from simplegraph.integrations.transformers.decoder import Decoder, doubling
from simplegraph.report import GraphReport
from simplegraph.stats import GraphStats
from simplegraph.wrapper import CudaGraphWrapper


class GraphedGeneration:
    """What `graph_generation` did to a model: its counters, and `remove`, which a context manager calls at its end."""

    def __init__(self, model: Any, decoder: Decoder) -> None:
        self.model = model
        self._decoder = decoder
        self._reached = threading.local()

    @property
    def stats(self) -> GraphStats:
        """The counters behind `report`."""
        return self._decoder.stats

    def report(self) -> GraphReport:
        """Captures, replays and what ran eagerly, with the reasons; a refused generation counts once."""
        return self._decoder.report()

    def reset(self) -> None:
        """Drop graphs and cache; later calls make them anew."""
        self._decoder.reset()

    def remove(self) -> None:
        """Let the model's `generate` be what it was, and drop graphs and cache. Twice does no harm."""
        if graphs_of(self.model) is self:
            self.model.__class__ = type(self.model)._simplegraph_original
        self._decoder.reset()

    def __enter__(self) -> GraphedGeneration:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    # What the model's methods do.

    def generate(self, generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A whole generation, which is counted if it never came to `_sample`."""
        self._reached.sample = False
        result = generate(*args, **kwargs)
        if not self._reached.sample:
            self._decoder.refuse(Reason.DECODING_MODE)
        return result

    def sample(self, sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Greedy decoding or sampling."""
        self._reached.sample = True
        with self._decoder.decoding(kwargs.get("generation_config"), kwargs):
            return sample(*args, **kwargs)

    def forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model: a step of a generation, or anything else."""
        session = self._decoder.session_of(kwargs.get("past_key_values"))
        return forward(*args, **kwargs) if session is None else session.forward(forward, args, kwargs)


def graph_generation(
    model: Any,
    *,
    max_batch_size: int = 8,
    max_length: int = 2048,
    max_source_length: int | None = None,
    capture_sizes: Sequence[int] | None = None,
    pool: GraphPool | None = None,
) -> GraphedGeneration:
    """From now on `model.generate(...)` decodes through CUDA graphs, without a compiler; results are the same.

    The prefill runs as it does; from there on every step of greedy decoding or sampling replays a graph, on
    a cache of fixed addresses that one generation at a time uses. Everything else about `generate` is as it
    was: stopping criteria, streamers, logits processors, masks, and the cache that it returns. What graphs cannot
    serve (beam search, a longer sequence, offloaded models) runs as before, with the reason in `report`.

        with graph_generation(model, max_batch_size=8, max_length=2048) as graphs:
            model.generate(**inputs, max_new_tokens=128)
            print(graphs.report())

    Memory: keys and values of `max_batch_size` sequences of `max_length` tokens, from the first generation on.
    Copies and pickles of the model are without graphs.

    Args:
        model: a model of transformers that can generate, decoder-only or encoder-decoder.
        max_batch_size: rows of the largest batch, beams and return sequences included.
        max_length: tokens of the longest sequence, prompt included.
        max_source_length: tokens of the longest encoder output; None takes the config's `max_source_positions`,
            or `max_length`.
        capture_sizes: batch sizes to capture, which others are padded to; None doubles up to `max_batch_size`.
        pool: graph memory to share with other wrappers; see `graph_pool`.

    Returns:
        A handle with `report`, `stats` and `remove`; as a context manager it removes itself at the end.

    Raises:
        ConfigError: this is no such model, or a size is invalid.
    """
    _check(model, max_batch_size=max_batch_size, max_length=max_length)
    earlier = graphs_of(model)
    if earlier is not None:
        earlier.remove()
    original = type(model)
    source = max_source_length or getattr(model.config, "max_source_positions", None) or max_length
    decoder = Decoder(
        model,
        original.forward,
        max_batch_size=max_batch_size,
        max_length=max_length,
        max_source_length=source,
        capture_sizes=list(capture_sizes) if capture_sizes is not None else doubling(1, max_batch_size),
        pool=pool,
    )
    graphs = GraphedGeneration(model, decoder)
    model.__class__ = _graphed(original, graphs)
    return graphs


def graphs_of(model: Any) -> GraphedGeneration | None:
    """The handle of a model that `graph_generation` was called on; None for another."""
    return getattr(type(model), "_simplegraph_generation", None)


def _check(model: Any, **sizes: int) -> None:
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ConfigError(
            f"graph_generation got a {type(model).__name__}; expected a model of transformers that can generate, such "
            "as AutoModelForCausalLM gives. Use simplegraph.wrap for other modules."
        )
    if isinstance(model, CudaGraphWrapper):
        raise ConfigError("graph_generation got a model that is wrapped already; pass simplegraph.unwrap(model).")
    if not hasattr(GenerationMixin, "_sample"):
        raise ConfigError("this release of transformers has no GenerationMixin._sample; transformers 5 is supported.")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{name} is {size!r}; expected a whole number of at least 1.")


def _blank(kind: Any) -> Any:
    """What a copy of a model is filled into."""
    return kind.__new__(kind)


def _graphed(original: Any, graphs: GraphedGeneration) -> Any:
    """A subclass for one model, whose generation goes through its graphs.

    The model itself holds nothing of them, so that whoever looks through its attributes finds what was there.
    """

    @functools.wraps(original.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return graphs.generate(functools.partial(original.generate, self), args, kwargs)

    @functools.wraps(original._sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        return graphs.sample(functools.partial(original._sample, self), args, kwargs)

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return graphs.forward(functools.partial(original.forward, self), args, kwargs)

    def reduce(self: Any, protocol: Any = None) -> tuple[Any, ...]:
        _, _, *rest = original.__reduce_ex__(self, max(protocol, 2))
        return _blank, (original,), *rest

    namespace = {
        "generate": generate,
        "_sample": _sample,
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_simplegraph_original": original,
        "_simplegraph_generation": graphs,
    }
    return type(original)(original.__name__, (original,), namespace)
