"""`graph_generation`: a model's `generate` decodes through graphs, until it is undone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from simplegraph.errors import ConfigError
from simplegraph.graph.device import GraphPool
from simplegraph.integrations.transformers.generate.ahead import may_run_late, with_late_check
from simplegraph.integrations.transformers.generate.decoder import Decoder, doubling
from simplegraph.integrations.transformers.overrides import give_methods, owner_of, take_back
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats
from simplegraph.module.mixin import CudaGraphWrapper
from simplegraph.reasons import Reason


class GraphedGeneration:
    """What `graph_generation` did to a model: its counters, and `remove`, which a context manager calls at its end."""

    def __init__(self, model: Any, decoder: Decoder) -> None:
        self.model = model
        self._decoder = decoder
        self._call = threading.local()

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
        take_back(self.model, self)
        self._decoder.reset()

    def __enter__(self) -> GraphedGeneration:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    # What the model's methods do.

    def generate(self, generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A whole generation, which is counted if it never came to `_sample`."""
        self._call.sampled = False
        self._call.cache_is_kept = kwargs.get("past_key_values") is not None
        result = generate(*args, **kwargs)
        if not self._call.sampled:
            self._decoder.refuse(Reason.DECODING_MODE)
        return result

    def sample(self, sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Greedy decoding or sampling."""
        self._call.sampled = True
        config = kwargs.get("generation_config")
        hooks = self.model._forward_hooks or self.model._forward_pre_hooks  # these are passed the cache
        given = getattr(self._call, "cache_is_kept", True)
        kept = bool(given or hooks or getattr(config, "return_dict_in_generate", True))
        with self._decoder.decoding(config, kwargs, cache_is_kept=kept) as served:
            late = served and may_run_late(config, kwargs, cache_is_kept=kept)
            return (with_late_check(sample) if late else sample)(*args, **kwargs)

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
    fused_kernels: bool = True,
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
        capture_sizes: batch sizes to capture, which others are padded to; None doubles up to `max_batch_size`. The
            cache has rows for the largest.
        pool: graph memory to share with other wrappers; see `graph_pool`.
        fused_kernels: let captured steps run kernels that do what several of the model's own do, where these are
            known by their text: rotary embeddings and writes to the cache, which are exact to the bit, and RMS norms,
            which are exact but for rounding: once, where the model's text in half precision rounds twice. False keeps
            the model's text.

    Returns:
        A handle with `report`, `stats` and `remove`; as a context manager it removes itself at the end.

    Raises:
        ConfigError: this is no such model, or a size is invalid.
    """
    _check(model, max_batch_size=max_batch_size, max_length=max_length)
    earlier = owner_of(model)
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
        fused_kernels=fused_kernels,
    )
    graphs = GraphedGeneration(model, decoder)
    give_methods(model, graphs, {"generate": graphs.generate, "_sample": graphs.sample, "forward": graphs.forward})
    return graphs


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
