"""The base class of attention backends, and the context through which layers reach the current step."""

from __future__ import annotations

import abc
import contextlib
import inspect
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import ClassVar, TypedDict

import torch
from torch import Tensor

from simplegraph.attention.cache import PagedKVCache
from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.config import AttentionCGSupport, CudaGraphMode
from simplegraph.errors import ConfigError, InputError, ReplayError
from simplegraph.graph.breaks.marks import eager_break
from simplegraph.graph.select import graph_device
from simplegraph.manager.hooks import GraphHooks


class Scores(TypedDict, total=False):
    """Keyword arguments of every backend that say how scores are computed; see `AttentionBackend`."""

    scale: float | None
    softcap: float | None
    sinks: Mapping[int, Tensor] | None


class AttentionBackend(GraphHooks, abc.ABC):
    """Base class of attention over a paged cache. Add it to the manager as hooks: it prepares each capture and replay.

    A subclass declares in its own body what it can do inside a full graph (`support`), and which of windows, soft caps
    and sinks it computes (`features`). Neither is inherited (torchtitan #3668).

    Args:
        cache: keys and values of all layers.
        metadata: the persistent buffers of the step. Its window is that of the attention.
        num_heads: query heads, a multiple of the cache's key heads.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        softcap: bounds scores smoothly, ``softcap * tanh(score / softcap)`` (Gemma-2); None for no bound.
        sinks: layer -> (num_heads,) of any floating dtype, one more score for each head whose weight is dropped after
            the softmax (GPT-OSS); None for none. Graphs read these tensors.

    Attributes:
        features: those of "window", "softcap" and "sinks" that it computes.
        window: keys that a token sees, its own included; None for all before it.
        reads_lengths_on_device: True if `run` reads lengths and slots from the device, so that they may change there
            after `prepare`, up to the lengths that were set. A graph can then hold several consecutive steps.

    Raises:
        ConfigError: heads, page sizes, devices or sinks do not match, or the backend lacks a feature that is needed.
    """

    support: AttentionCGSupport
    name: ClassVar[str]
    features: ClassVar[Collection[str]] = ()
    reads_lengths_on_device: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Only abstract subclasses may leave it out; one that can be instantiated may not, even if it inherits `run`.
        missing = [name for name in ("support", "name") if name not in vars(cls)]
        if missing and not inspect.isabstract(cls):
            raise ConfigError(
                f"{cls.__name__} does not declare {' and '.join(missing)}; every attention backend declares in its own "
                "body what it can do inside a full graph, since a subclass may do less."
            )

    def __init__(
        self,
        cache: PagedKVCache,
        metadata: BatchMetadata,
        *,
        num_heads: int,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Mapping[int, Tensor] | None = None,
    ) -> None:
        if not isinstance(num_heads, int) or num_heads < 1 or num_heads % cache.num_kv_heads:
            raise ConfigError(
                f"num_heads is {num_heads!r}; expected a multiple of the cache's {cache.num_kv_heads} heads."
            )
        if cache.page_size != metadata.page_size:
            raise ConfigError(f"the cache has pages of {cache.page_size} tokens, the metadata of {metadata.page_size}.")
        if cache.device != metadata.device:
            raise ConfigError(f"the cache is on {cache.device}, the metadata on {metadata.device}.")
        # Backends may share the metadata: a page id must then exist in each of their caches.
        metadata.num_pages = min(cache.num_pages, metadata.num_pages or cache.num_pages)
        self.cache, self.metadata = cache, metadata
        self.num_heads = num_heads
        self.device = graph_device(cache.device)
        self._live: CommonMetadata | None = None
        self._ran = 0  # version of the step that ran last
        self._announced: tuple[CudaGraphMode, BatchDescriptor] | None = None  # what the manager is about to capture
        self.scale = cache.head_dim**-0.5 if scale is None else scale
        self.window, self.softcap, self.sinks = metadata.window, softcap, sinks
        self._check_features()

    def _check_features(self) -> None:
        for feature in ("window", "softcap", "sinks"):
            if getattr(self, feature) is not None and feature not in vars(type(self)).get("features", ()):
                raise ConfigError(
                    f"{self.name} has no {feature}; a backend that does lists it in its own `features`. Use another "
                    "backend for these layers."
                )
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ConfigError(f"softcap is {self.softcap!r}; expected a number above 0, or None.")
        if self.sinks is None:
            return
        for layer in self.cache.layers:
            sinks = self.sinks.get(layer)
            if sinks is None or sinks.shape != (self.num_heads,) or sinks.device != self.cache.device:
                found = "missing" if sinks is None else f"{tuple(sinks.shape)} on {sinks.device}"
                raise ConfigError(
                    f"sinks of layer {layer} are {found}; expected ({self.num_heads},) on {self.cache.device}."
                )

    @abc.abstractmethod
    def run(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> None:
        """Compute causal attention of the step's queries; the cache already holds this step's keys and values.

        Args:
            layer: index of the cache's layer.
            q: (T, num_heads, head_dim), the cache's dtype: the requests' tokens one after the other, then padding.
            out: written; as `q`, zeros before the call. Padding rows stay finite.
            metadata: the step, padded to T tokens.
        """

    def run_with_lse(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> Tensor:
        """Do as `run` and return each row's log-sum-exp, by which results over different keys are merged.

        Returns:
            (T, num_heads) float32, to the base e. Rows that see no key are undefined, here and in `out`.

        Raises:
            ConfigError: this backend does not compute it.
        """
        raise ConfigError(f"{self.name} does not give the log-sum-exp by which context parallel ranks merge.")

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        """Plan the step's attention. Called outside any graph before every eager run, dummy run, capture and replay.

        Args:
            mode: how the batch runs.
            descriptor: the graph's key, or for NONE the batch without padding.
            metadata: the view that `run` will get.
        """

    @property
    def live(self) -> CommonMetadata:
        """The metadata of the step that was prepared last.

        Raises:
            ReplayError: no step was prepared.
        """
        if self._live is None:
            raise ReplayError(
                f"{self.name} was not prepared for a batch; give it to the manager with add_hooks, and run the model "
                "inside `with attending(backend, mode, descriptor):`."
            )
        return self._live

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Prepare for a step of this shape that reads page 0 and writes nothing."""
        view = self.metadata.set_dummy(*self._shape(descriptor), descriptor.uniform_query_len, capturing=True)
        self._prepare(mode, descriptor, view)
        self._announced = (mode, descriptor)

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Prepare for the live step, padded to this shape."""
        batch = self.metadata.batch
        num_tokens, num_reqs = self._shape(descriptor)
        query_len = descriptor.uniform_query_len
        if mode is not CudaGraphMode.FULL:
            num_reqs = batch.num_reqs  # attention runs in the breaks of such a graph, on the real requests
        elif query_len is not None and not batch.has_query_len(query_len):
            raise ReplayError(
                f"the graph is for requests of {query_len} tokens each, but the batch has requests of "
                f"{sorted(batch.query_lens)}; dispatch it without uniform_query_len."
            )
        view = self.metadata.live(num_tokens, num_reqs)
        if batch.version == self._ran:
            raise ReplayError(
                "this step ran already, and would write its keys and values again. Call BatchMetadata.set before every "
                "step; BatchMetadata.repeat lets the same step run once more."
            )
        self._prepare(mode, descriptor, view)
        self._ran = batch.version

    def enter(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Prepare at the start of a forward if no hook has; `attending` calls this.

        Raises:
            ReplayError: a capture begins without a call of `before_capture`: the backend is none of the hooks.
        """
        if self.device.is_capturing():
            if self._announced != (mode, descriptor):
                raise ReplayError(
                    f"{self.name} is captured, but is none of the manager's hooks: replays would read a stale step. "
                    "Call manager.add_hooks(backend) before capture."
                )
        elif mode is CudaGraphMode.NONE:
            self.before_replay(mode, descriptor)
        else:
            self.before_capture(mode, descriptor)
            self._announced = None  # this was a warmup, and its capture is announced separately

    def of_layer(self, layer: int) -> AttentionBackend:
        """Return the backend of a layer, which is this one; see `BackendGroup.of_layer`."""
        return self

    def _prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, view: CommonMetadata) -> None:
        self._live = None  # in case `prepare` raises
        self.prepare(mode, descriptor, view)
        self._live = view

    def _shape(self, descriptor: BatchDescriptor) -> tuple[int, int]:
        """Return the tokens and requests of a graph; if its key leaves the requests open, the most possible."""
        return descriptor.num_tokens, descriptor.num_reqs or min(descriptor.num_tokens, self.metadata.max_num_reqs)


class BackendGroup(GraphHooks):
    """Several backends in one model, by layer. Its `support` is the lowest of theirs.

    Layers with a window and layers without have a cache and a `BatchMetadata` for each kind, hence pages and a block
    table of their own. Every metadata is set to the same step.

    Args:
        backends: layer index -> its backend, whose cache has that layer.

    Raises:
        ConfigError: `backends` is empty or no mapping.
    """

    def __init__(self, backends: Mapping[int, AttentionBackend]) -> None:
        if not isinstance(backends, Mapping):
            raise ConfigError(f"backends is {type(backends).__name__}; expected a mapping of layers to backends.")
        self.support = minimum_support(backends.values())
        self.backends = dict(backends)
        self.device = next(iter(backends.values())).device
        self._each = list({id(backend): backend for backend in backends.values()}.values())

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        for backend in self._each:
            backend.before_capture(mode, descriptor)

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._check_step()
        for backend in self._each:
            backend.before_replay(mode, descriptor)

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        for backend in self._each:
            backend.end_of_forward(mode, descriptor)

    def enter(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Call `AttentionBackend.enter` of each backend."""
        if mode is CudaGraphMode.NONE:
            self._check_step()
        for backend in self._each:
            backend.enter(mode, descriptor)

    def _check_step(self) -> None:
        first = self._each[0].metadata.batch
        for backend in self._each:
            batch = backend.metadata.batch
            if batch.num_reqs != first.num_reqs or batch.num_tokens != first.num_tokens:
                raise ReplayError(
                    f"one metadata of the group is set to {first.num_reqs} requests and {first.num_tokens} tokens, "
                    f"another to {batch.num_reqs} and {batch.num_tokens}; set every one to the same step."
                )

    def of_layer(self, layer: int) -> AttentionBackend:
        """Return the backend of a layer.

        Raises:
            ConfigError: no backend serves it.
        """
        if layer not in self.backends:
            raise ConfigError(f"no backend serves layer {layer}; the group serves {sorted(self.backends)}.")
        return self.backends[layer]


def minimum_support(backends: Iterable[AttentionBackend]) -> AttentionCGSupport:
    """Return the support of a model that uses all these backends, which is the lowest of theirs.

    Raises:
        ConfigError: `backends` is empty.
    """
    found = [type(backend).support for backend in backends]
    if not found:
        raise ConfigError("no attention backend was given.")
    return min(found)


class _AttendingThread(threading.local):
    attention: AttentionBackend | BackendGroup | None = None


_THREAD = _AttendingThread()


@contextlib.contextmanager
def attending(
    attention: AttentionBackend | BackendGroup, mode: CudaGraphMode, descriptor: BatchDescriptor
) -> Iterator[None]:
    """Wrap an engine's forward, so that its layers can call `attend`.

        def forward(mode, descriptor):
            with attending(backend, mode, descriptor):
                return model(ids[: descriptor.num_tokens], positions[: descriptor.num_tokens])

    Outside a capture this also prepares the backend: for the live step if `mode` is NONE; otherwise the forward is a
    graph's warmup, and the backend is prepared for a dummy step. The manager's hooks prepare captures and replays.

    Args:
        attention: the model's backend, or a group of backends.
        mode: as the manager passes it to the forward.
        descriptor: as the manager passes it to the forward.
    """
    before, _THREAD.attention = _THREAD.attention, attention
    try:
        attention.enter(mode, descriptor)
        yield
    finally:
        _THREAD.attention = before


def attend(q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, *, out: Tensor | None = None) -> Tensor:
    """Write the step's keys and values of one layer to the cache, then compute its causal attention.

    In a PIECEWISE graph the attention itself is an eager break; the write is part of the segment.

    Args:
        q: (T, num_heads, head_dim), the cache's dtype: the requests' tokens one after the other, then padding.
        k: (T, num_kv_heads, head_dim), the cache's dtype. None, as is `v`, if a kernel of the model has already written
            both to the cache, at ``backend.live.slot_mapping``.
        v: as `k`.
        layer: index of the cache's layer.
        out: a tensor for the result, with the shape and dtype of `q`; one buffer may serve every layer. It saves a fill
            with zeros: padding rows keep their old contents.

    Returns:
        (T, num_heads, head_dim), which is `out` if given. Padding rows are finite but meaningless.

    Raises:
        ReplayError: called outside `attending`, or no step was prepared.
        InputError: a shape or dtype does not match the step or the cache, or only one of k and v is None.
        ConfigError: no backend serves this layer.
    """
    attention = _THREAD.attention
    if attention is None:
        raise ReplayError("attend was called outside `with attending(backend, mode, descriptor):`.")
    backend = attention.of_layer(layer)
    live = backend.live
    shape = (live.num_tokens, backend.num_heads, backend.cache.head_dim)
    if q.shape != shape or q.dtype is not backend.cache.dtype:
        raise InputError(f"q is {tuple(q.shape)} of {q.dtype}; expected {shape} of {backend.cache.dtype}.")
    if layer not in backend.cache.layers:
        known = backend.cache.layers
        found = f"0 to {len(known) - 1}" if isinstance(known, range) else ", ".join(map(str, known))
        raise InputError(f"layer is {layer}; the cache has layers {found}.")
    if out is not None and (out.shape != shape or out.dtype is not q.dtype):
        raise InputError(f"out is {tuple(out.shape)} of {out.dtype}; expected {shape} of {q.dtype}.")
    if (k is None) != (v is None):
        raise InputError("one of k and v is None; give both, or neither if the cache holds them already.")
    if k is not None and v is not None:
        backend.cache.write(layer, k, v, live.slot_mapping)
    if out is None:
        out = torch.zeros_like(q)
    _run(backend, layer, q, out)
    return out


@eager_break
def _run(backend: AttentionBackend, layer: int, q: Tensor, out: Tensor) -> None:
    # Every replay of the break runs this, so `live` is the metadata of that replay's step.
    result: object = backend.run(layer, q, out, backend.live)
    if result is not None:
        raise ConfigError(f"{type(backend).__name__}.run returned {type(result).__name__}; it must write into `out`.")
