"""The base class of attention backends, and the function by which a model's layers call them."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from simplegraph.attention.cache import PagedKVCache
from simplegraph.attention.layers import LayerBackend, current_backend
from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.metadata.step_arrays import check_layer
from simplegraph.base.errors import ConfigError, InputError
from simplegraph.program.breaks.marks import eager_break


class Scores(TypedDict, total=False):
    """Keyword arguments of every backend that say how scores are computed; see `AttentionBackend`."""

    scale: float | None
    softcap: float | None
    sinks: Mapping[int, Tensor] | None


class AttentionBackend(LayerBackend, abc.ABC):
    """Base class of attention over a paged cache. Add it to the manager as hooks: it prepares each capture and replay.

    A subclass declares in its own body which of windows, soft caps and sinks it computes (`features`), which is not
    inherited, as `support` is not.

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

    metadata: BatchMetadata
    features: ClassVar[Collection[str]] = ()
    reads_lengths_on_device: bool = False

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
        super().__init__(metadata)
        self.cache, self.num_heads = cache, num_heads
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
                given = "missing" if sinks is None else f"{tuple(sinks.shape)} on {sinks.device}"
                raise ConfigError(
                    f"sinks of layer {layer} are {given}; expected ({self.num_heads},) on {self.cache.device}."
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
    backend: AttentionBackend = current_backend("attend", layer, AttentionBackend)
    live = backend.live
    shape = (live.num_tokens, backend.num_heads, backend.cache.head_dim)
    if q.shape != shape or q.dtype is not backend.cache.dtype:
        raise InputError(f"q is {tuple(q.shape)} of {q.dtype}; expected {shape} of {backend.cache.dtype}.")
    check_layer(layer, backend.cache.layers)
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


@eager_break(padded=True)
def _run(backend: AttentionBackend, layer: int, q: Tensor, out: Tensor) -> None:
    # Every replay of the break runs this, so `live` is the metadata of that replay's step.
    result: object = backend.run(layer, q, out, backend.live)
    if result is not None:
        raise ConfigError(f"{type(backend).__name__}.run returned {type(result).__name__}; it must write into `out`.")


# Checks that an installed library has the functions that a backend calls, by their signatures.


def missing_argument(module: Any, needed: Mapping[str, Iterable[str]]) -> str | None:
    """Say which of these functions, or of their arguments, a module lacks; None if it has all.

    Args:
        module: or a class.
        needed: functions, and the names of arguments of each.
    """
    for name, arguments in needed.items():
        function = getattr(module, name, None)
        if function is None:
            return f"has no {name}"
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # a compiled function may not tell its arguments
            continue
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        missing = next((argument for argument in arguments if argument not in parameters), None)
        if missing is not None:
            return f"has a {name} without the argument {missing}"
    return None


def check_arguments(module: Any, needed: Mapping[str, Iterable[str]]) -> None:
    """Refuse a module without these functions and arguments; see `missing_argument`.

    Raises:
        ConfigError: one is missing.
    """
    problem = missing_argument(module, needed)
    if problem is not None:
        raise ConfigError(f"the installed {module.__name__} {problem}; install a newer build, or use another backend.")
