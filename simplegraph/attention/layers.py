"""The base class of a model's backends, groups of them, and the context through which layers reach their own."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import ConfigError, ReplayError
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.manager.table import GraphHooks


class LayerBackend(GraphHooks):
    """Base class of the backends of attention and of recurrent layers: prepares each capture and replay for a step.

    A subclass declares in its own body what it can do inside a full graph (`support`), and its `name`. Neither is
    inherited (torchtitan #3668).

    Args:
        metadata: the persistent buffers of the step.
    """

    support: AttentionCGSupport
    name: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Only abstract subclasses may leave it out; one that can be instantiated may not, even if it inherits `run`.
        missing = [name for name in ("support", "name") if name not in vars(cls)]
        if missing and not inspect.isabstract(cls):
            raise ConfigError(
                f"{cls.__name__} does not declare {' and '.join(missing)}; every backend declares in its own "
                "body what it can do inside a full graph, since a subclass may do less."
            )

    def __init__(self, metadata: BatchMetadata) -> None:
        self.metadata = metadata
        self.device = metadata.graphs
        self._live: CommonMetadata | None = None
        self._ran = 0  # version of the step that ran last
        self._announced: tuple[CudaGraphMode, BatchDescriptor] | None = None  # what the manager is about to capture

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        """Plan the step. Called outside any graph before every eager run, dummy run, capture and replay.

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
            num_reqs = batch.num_reqs  # the backend runs in the breaks of such a graph, on the real requests
        elif query_len is not None and not batch.has_query_len(query_len):
            raise ReplayError(
                f"the graph is for requests of {query_len} tokens each, but the batch has requests of "
                f"{sorted(batch.query_lens)}; dispatch it without uniform_query_len."
            )
        view = self.metadata.live(num_tokens, num_reqs)
        if batch.version == self._ran:
            raise ReplayError(
                "this step ran already, and would write to the cache again. Call BatchMetadata.set before every "
                "step; BatchMetadata.repeat lets the same step run once more."
            )
        self._prepare(mode, descriptor, view)
        self._ran = batch.version

    def undo_step(self) -> None:
        self._ran = 0

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

    def of_layer(self, layer: int) -> Any:
        """Return the backend of a layer, which is this one; see `BackendGroup.of_layer`."""
        return self

    @property
    def members(self) -> list[LayerBackend]:
        """List this backend, as `BackendGroup.members` lists several."""
        return [self]

    def _prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, view: CommonMetadata) -> None:
        self._live = None  # in case `prepare` raises
        self.prepare(mode, descriptor, view)
        self._live = view

    def _shape(self, descriptor: BatchDescriptor) -> tuple[int, int]:
        """Return the tokens and requests of a graph; if its key leaves the requests open, the most possible."""
        return descriptor.num_tokens, descriptor.num_reqs or min(descriptor.num_tokens, self.metadata.max_num_reqs)


class BackendGroup(GraphHooks):
    """Several backends in one model, by layer. Its `support` and `max_num_reqs` are the lowest of theirs.

    Layers with a window, layers without and recurrent layers have a cache and a metadata for each kind, hence pages and
    a block table, or state slots, of their own. Every metadata is set to the same step.

    Args:
        backends: layer index -> its backend, whose cache has that layer.

    Attributes:
        members: the backends, each once, in the order of `backends`.

    Raises:
        ConfigError: `backends` is empty or no mapping.
    """

    def __init__(self, backends: Mapping[int, LayerBackend]) -> None:
        if not isinstance(backends, Mapping):
            raise ConfigError(f"backends is {type(backends).__name__}; expected a mapping of layers to backends.")
        self.support = minimum_support(backends.values())
        self.backends = dict(backends)
        self.device = next(iter(backends.values())).device
        self.members = list({id(backend): backend for backend in backends.values()}.values())
        bounds = [backend.max_num_reqs for backend in self.members if backend.max_num_reqs is not None]
        self.max_num_reqs = min(bounds, default=None)

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        for backend in self.members:
            backend.before_capture(mode, descriptor)

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._check_step()
        for backend in self.members:
            backend.before_replay(mode, descriptor)

    def undo_step(self) -> None:
        for backend in self.members:
            backend.undo_step()

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        for backend in self.members:
            backend.end_of_forward(mode, descriptor)

    def enter(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Call `LayerBackend.enter` of each backend."""
        if mode is CudaGraphMode.NONE:
            self._check_step()
        for backend in self.members:
            backend.enter(mode, descriptor)

    def _check_step(self) -> None:
        first = self.members[0].metadata.batch
        for backend in self.members:
            batch = backend.metadata.batch
            if batch.num_reqs != first.num_reqs or batch.num_tokens != first.num_tokens:
                raise ReplayError(
                    f"one metadata of the group is set to {first.num_reqs} requests and {first.num_tokens} tokens, "
                    f"another to {batch.num_reqs} and {batch.num_tokens}; set every one to the same step."
                )

    def of_layer(self, layer: int) -> Any:
        """Return the backend of a layer, of attention or recurrent as the layer is.

        Raises:
            ConfigError: no backend serves it.
        """
        if layer not in self.backends:
            raise ConfigError(f"no backend serves layer {layer}; the group serves {sorted(self.backends)}.")
        return self.backends[layer]


def minimum_support(backends: Iterable[LayerBackend]) -> AttentionCGSupport:
    """Return the support of a model that uses all these backends, which is the lowest of theirs.

    Raises:
        ConfigError: `backends` is empty.
    """
    supports = [backend.support for backend in backends]
    if not supports:
        raise ConfigError("no attention backend was given.")
    return min(supports)


class _AttendingThread(threading.local):
    attention: LayerBackend | BackendGroup | None = None


_THREAD = _AttendingThread()


@contextlib.contextmanager
def serving_layers(attention: LayerBackend | BackendGroup) -> Iterator[None]:
    """Let layers in here call these backends, prepared or not."""
    before, _THREAD.attention = _THREAD.attention, attention
    try:
        yield
    finally:
        _THREAD.attention = before


@contextlib.contextmanager
def attending(
    attention: LayerBackend | BackendGroup, mode: CudaGraphMode, descriptor: BatchDescriptor
) -> Iterator[None]:
    """Wrap an engine's forward, so that its layers can call `attend` and `recur`.

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
    with serving_layers(attention):
        attention.enter(mode, descriptor)
        yield


def current_backend(caller: str, layer: int, kind: type) -> Any:
    """Return the backend of a layer that calls `attend` or `recur`.

    Raises:
        ReplayError: called outside `attending`.
        ConfigError: no backend serves the layer, or one of another kind.
    """
    attention = _THREAD.attention
    if attention is None:
        raise ReplayError(f"{caller} was called outside `with attending(backend, mode, descriptor):`.")
    backend = attention.of_layer(layer)
    if not isinstance(backend, kind):
        raise ConfigError(
            f"{caller} was called for layer {layer}, which {backend.name} serves; expected an {kind.__name__}."
        )
    return backend
