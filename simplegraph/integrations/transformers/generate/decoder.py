"""The graphs of one model's decode steps, and the store that they read."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.batch.sizes import mixed_sizes
from simplegraph.config import CudaGraphConfig
from simplegraph.graph.device import GraphPool
from simplegraph.graph.failures import user_location
from simplegraph.integrations.transformers.generate.decode_step import ROW_INPUTS, DecodeStep, masks_source
from simplegraph.integrations.transformers.generate.served import Session
from simplegraph.integrations.transformers.generate.store import LayerLayout, Layout, Store
from simplegraph.integrations.transformers.kernels.usable import triton_runs
from simplegraph.integrations.transformers.overrides import named
from simplegraph.integrations.transformers.refusals import check_generation, check_model, choices
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats
from simplegraph.module.compare import difference
from simplegraph.module.mixin import wrap
from simplegraph.module.signature import CannotBind
from simplegraph.reasons import Reason

_SMALLEST_SPAN = 256  # positions; attending to fewer costs about the same
_SMALLEST_SOURCE = 64
_ALIGNMENT = 16  # positions; attention copies a mask of another length in every layer
_MAX_SIGNATURES = 64  # spans times encoder lengths times flags


class Decoder:
    """Decodes with graphs, for one generation at a time.

    Args:
        model: the model; forward: its own forward, called with the model first.
        max_batch_size: rows of the largest batch; max_length: tokens of the longest sequence, prompt included.
        max_source_length: tokens of the longest encoder output.
        capture_sizes: batch sizes to capture.
        pool: graph memory to share with others; None for its own.
        fused_kernels: whether steps run rotary embeddings, RMS norms and cache writes as a kernel each.

    Attributes:
        ids_name: the argument that a step's tokens are passed in.
        trusted: whether a step from the store was seen to answer as one from the model's own cache.
        stays_eager: whether the last step ran eagerly, and the next one would too; the report has the reason.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        *,
        max_batch_size: int,
        max_length: int,
        max_source_length: int,
        capture_sizes: Sequence[int],
        pool: GraphPool | None,
        fused_kernels: bool,
    ) -> None:
        self.stats = GraphStats(type(model).__name__)
        self.ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        self.trusted = self.stays_eager = False
        self._progress = 0
        self._model, self._forward = model, forward
        # Sizes may come from the environment, and a padded batch needs its rows.
        sizes = mixed_sizes(CudaGraphConfig(capture_sizes=capture_sizes).from_env())
        self._rows, self._length, self._source_length = max(max_batch_size, *sizes), max_length, max_source_length
        self._spans = doubling(_SMALLEST_SPAN, -(-max_length // _ALIGNMENT) * _ALIGNMENT)
        self._sources = doubling(_SMALLEST_SOURCE, max_source_length) if masks_source(model) else []
        self._sizes, self._pool, self._fused_kernels = capture_sizes, pool, fused_kernels
        self._step: Any = None  # a wrapped DecodeStep, made for the first cache that comes
        self._session: Session | None = None
        self._busy = threading.Lock()
        self._choices: Hashable = None

    # Around a generation.

    @contextlib.contextmanager
    def decoding(self, config: Any, kwargs: Mapping[str, Any], *, cache_is_kept: bool) -> Iterator[bool]:
        """In here the model's steps go through graphs, if they can; whether they are to is what it yields.

        Args:
            config: the generation config.
            kwargs: what `_sample` was passed.
            cache_is_kept: whether anybody looks at the cache afterwards.
        """
        if not self._taken_for(config, kwargs):
            yield False
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._release)
            self.stays_eager = False
            self._drop_if_chosen_otherwise()
            session = self._session = Session(self, kwargs["past_key_values"], kept=cache_is_kept)
            stack.callback(session.close)
            yield True

    def _drop_if_chosen_otherwise(self) -> None:
        before, self._choices = self._choices, choices(self._model)
        if before != self._choices:
            self.reset()

    def _taken_for(self, config: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether the generation can have the graphs, and nobody else has them."""
        try:
            check_model(self._model)
            check_generation(config, kwargs)
        except CannotBind as error:
            self.refuse(error.reason, error.detail)
            return False
        if not self._busy.acquire(blocking=False):
            self.refuse(Reason.BUSY)
            return False
        return True

    def _release(self) -> None:
        self._session = None
        self._busy.release()

    def session_of(self, cache: Any) -> Session | None:
        """The generation that `cache` belongs to, if it is the one being served."""
        session = self._session
        if session is None or session.cache is cache:
            return session
        session.note_other_cache()
        return None

    def refuse(self, reason: Reason, detail: str = "") -> None:
        """Count a generation, or the rest of one, that runs as it would without graphs."""
        self.stats.ran_eagerly(reason, detail)

    # For a session.

    @property
    def first(self) -> int:
        """The layer of self-attention that stands for all."""
        return int(self._step.store.first)

    def load(self, cache: Any, rows: int, length: int, kwargs: Mapping[str, Any]) -> int:
        """Take over a prefilled cache; returns the padded length of the encoder's outputs, 0 without an encoder.

        Raises:
            CannotBind: it does not fit.
        """
        if rows > self._rows:
            raise CannotBind(Reason.BATCH_TOO_LARGE, f"{rows} rows, max_batch_size is {self._rows}")
        self._span(length)
        own, cross = getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)
        hidden = None if cross is None else _hidden(kwargs)
        source = 0 if hidden is None else self._padded_source(hidden.shape[1])
        store = self._store_for(own, cross, hidden)
        store.load(own, _mask(kwargs, cross is not None, (rows, length)), length)
        if hidden is not None:
            store.load_source(cross, _source_mask(kwargs, hidden) if self._sources else None, hidden)
        return source

    def step(self, length: int, source: int, inputs: dict[str, Any]) -> Tensor:
        """Logits of the token at position `length`; valid until the next step.

        Raises:
            CannotBind: the cache is full.
        """
        span, step = self._span(length), self._step
        step.store.position.fill_(length)
        logits: Tensor = step(span, source, **inputs)
        if step.ran:
            step.ran = False
            before, self._progress = self._progress, self._progressed()
            self.stays_eager = self._progress == before
        return logits

    def compare(self, length: int, source: int, inputs: dict[str, Any], expected: Tensor) -> str | None:
        """What is different between `expected`, from the model's own cache, and a step from the store; None if nothing.

        A step that fails is different too: many models count on Python knowing how long their cache is.
        """
        try:
            logits = self.step(length, source, inputs)
        except Exception as error:
            return f"{type(error).__name__}: {error} at {user_location(error)}"
        found = [text for text in map(difference, logits, expected) if text is not None]
        # In half precision, rounding may send a row to another expert.
        allowed = len(logits) // 2 if expected.dtype in (torch.float16, torch.bfloat16) else 0
        self.trusted = len(found) <= allowed
        return None if self.trusted else found[0]

    def _progressed(self) -> int:
        """A count that grows with every step that ran eagerly on its way to a graph, and with every graph."""
        return self.stats.captures + sum(self.stats.eager[reason] for reason in _ON_THE_WAY)

    def show_length(self, cache: Any, rows: int, length: int) -> Any:
        """Let the cache say how long the sequence is; returns what the first layer holds from now on."""
        return self._step.store.show_length(cache, rows, length)

    def hand_back(self, cache: Any, rows: int, length: int) -> None:
        """Fill the cache with the tokens up to `length`."""
        self._step.store.hand_back(cache, rows, length)

    # Sizes.

    def _span(self, length: int) -> int:
        """Positions that a step attends to which writes its token at `length`."""
        if length >= self._length:
            raise CannotBind(Reason.CACHE_FULL, f"max_length is {self._length}")
        return self._spans[bisect.bisect_left(self._spans, length + 1)]

    def _padded_source(self, source: int) -> int:
        if source > self._source_length:
            raise CannotBind(
                Reason.CACHE_FULL, f"the encoder gave {source}, max_source_length is {self._source_length}"
            )
        return self._sources[bisect.bisect_left(self._sources, source)] if self._sources else source

    # Graphs.

    def _store_for(self, own: Any, cross: Any, hidden: Tensor | None) -> Store:
        layout = Layout(
            tuple(LayerLayout.of(layer) for layer in own.layers),
            () if cross is None else tuple(LayerLayout.of(layer) for layer in cross.layers),
            None if hidden is None else (hidden.shape[2], hidden.dtype),
        )
        if self._step is None or self._step.store.layout != layout:
            self.reset()
            length = self._source_length if hidden is not None else 0
            try:
                store = Store(layout, self._rows, self._spans[-1], length, triton=self._may_use_triton(layout))
            except torch.OutOfMemoryError:
                shape = f"{self._rows} sequences of {self._length} tokens; lower max_batch_size or max_length"
                raise CannotBind(Reason.CACHE_FULL, f"no memory for {shape}") from None
            self._step = self._wrapped(store)
        known: Store = self._step.store
        return known

    def _may_use_triton(self, layout: Layout) -> bool:
        _, elements, dtype = layout.first_layer.key
        return self._fused_kernels and triton_runs(layout.device, dtype, elements)

    def _wrapped(self, store: Store) -> Any:
        kind = named(DecodeStep, type(self._model).__name__)
        step: Any = wrap(
            kind(self._model, self._forward, store, fused_kernels=self._fused_kernels),
            pool=self._pool,
            capture_sizes=self._sizes,
            batch_dims=ROW_INPUTS,
            max_signatures=_MAX_SIGNATURES,
            # generate copies the logits before its next step, but others who share the pool replay when they like.
            outputs="static" if self._pool is None else "clone",
            progress=False,
        )
        step._graph_runner.stats = self.stats
        return step

    def reset(self) -> None:
        """Drop the graphs and the store; they are made anew when needed."""
        if self._step is not None:
            self._step.reset_graphs()
        self._step = None
        self.trusted = False

    def report(self) -> GraphReport:
        """Captures, replays and what ran eagerly, with the reasons."""
        if self._step is not None:
            return self._step.graph_report()  # type: ignore[no-any-return]
        return GraphReport(self.stats, str(self._model.device))


_ON_THE_WAY = (Reason.FIRST_CALL, Reason.WARMUP, Reason.OUTPUT_SHAPE_UNKNOWN)


def doubling(smallest: int, largest: int) -> list[int]:
    """`smallest`, twice that and so on, up to `largest` itself."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 2
    return [*sizes, largest]


def _mask(kwargs: Mapping[str, Any], encoder_decoder: bool, shape: tuple[int, int]) -> Tensor | None:
    name = "decoder_attention_mask" if encoder_decoder else "attention_mask"
    mask = kwargs.get(name)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is not a mask of rows and tokens")
    return mask


def _source_mask(kwargs: Mapping[str, Any], hidden: Tensor) -> Tensor | None:
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != hidden.shape[:2]):
        raise CannotBind(Reason.OPAQUE_ARGUMENT, "attention_mask is not a mask of the encoder's rows and tokens")
    return mask


def _hidden(kwargs: Mapping[str, Any]) -> Tensor:
    outputs = kwargs.get("encoder_outputs")
    hidden = outputs[0] if outputs is not None else None
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, "encoder_outputs without hidden states")
    return hidden
