"""Mamba2: a causal convolution of a few tokens, then a linear recurrence of a matrix for each head."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch
from torch import Tensor

from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.recurrent.backend import RecurrentBackend
from simplegraph.attention.recurrent.mamba2_layer import Mamba2Shape, Mamba2Weights, scan_tokens
from simplegraph.attention.recurrent.states import StateCache, StateMetadata
from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import ConfigError, InputError
from simplegraph.batch.sizes import BatchDescriptor


class Mamba2Backend(RecurrentBackend):
    """Mamba2 for any batch in any graph: two Triton kernels on a GPU, torch's operators elsewhere.

    A layer calls ``recur(layer, xbc, dt, out=y)``, with xbc (T, channels): x, B and C before the convolution, dt
    (T, num_heads) before its bias, and y (T, num_heads * head_dim) in the dtype of xbc. Sums are in float32.

    A prompt is scanned token by token, which kernels for long prompts do faster in chunks.

    Args:
        cache: with the states of `shape`.
        metadata: the persistent buffers of the step.
        shape: of every layer.
        weights: layer index -> its weights. Graphs read these tensors.

    Raises:
        ConfigError: states or weights do not have the shape.

    Source: state space duality, Mamba-2 (arXiv 2405.21060).
    """

    support = AttentionCGSupport.ALWAYS
    name = "Mamba2"

    def __init__(
        self, cache: StateCache, metadata: StateMetadata, *, shape: Mamba2Shape, weights: Mapping[int, Mamba2Weights]
    ) -> None:
        super().__init__(cache, metadata)
        self.shape, self.weights = shape, dict(weights)
        if shape.conv_width < 2 or shape.num_heads % shape.num_groups:
            raise ConfigError(f"{shape}: expected conv_width of 2 or more, and num_groups that divides num_heads.")
        self._check_states()
        for layer in cache.layers:
            self._check_weights(layer)
        self._fused = cache.device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self._longest = 1  # tokens of a request in the step, at most

    def _check_states(self) -> None:
        expected = {name: tuple(state.shape) for name, state in self.shape.states(torch.float32).items()}
        states = {name: tuple(state.shape) for name, state in self.cache.states.items()}
        if states != expected:
            raise ConfigError(f"the cache has states {states}; expected {expected}. Make it with shape.states().")

    def _check_weights(self, layer: int) -> None:
        shape, heads = self.shape, (self.shape.num_heads,)
        if layer not in self.weights:
            raise ConfigError(f"weights of layer {layer} are missing; expected those of {self.cache.layers}.")
        expected = ((shape.channels, shape.conv_width), (shape.channels,), heads, heads, heads)
        for name, tensor, size in zip(Mamba2Weights._fields, self.weights[layer], expected, strict=True):
            if tensor is None and name == "conv_bias":
                continue
            placed = None if tensor is None else (tensor.shape, tensor.device, tensor.is_contiguous())
            if placed != (size, self.cache.device, True):
                given = "None" if tensor is None else f"{tuple(tensor.shape)} on {tensor.device}"
                raise ConfigError(
                    f"{name} of layer {layer} is {given}; expected {size} on {self.cache.device}, contiguous."
                )

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        if mode is CudaGraphMode.FULL:  # the graph serves every batch of its key
            self._longest = descriptor.uniform_query_len or descriptor.num_tokens
        else:
            self._longest = metadata.batch.max_query_len

    def run(self, layer: int, inputs: tuple[Tensor, ...], out: Tensor, metadata: CommonMetadata) -> None:
        xbc, dt = self._check_inputs(inputs, out)
        conv, scan = self.cache.state(layer, "conv"), self.cache.state(layer, "scan")
        if self._fused:
            from simplegraph.attention.kernels.mamba2 import convolve, scan_heads

            single = self._longest == 1
            if metadata.batch.capturing and not self.device.is_capturing():
                # Loads the kernel that other graphs take, which no capture may do. This dummy step writes no state.
                convolve(xbc, self.weights[layer], conv, metadata, single=not single)
            mixed = convolve(xbc, self.weights[layer], conv, metadata, single=single)
            scan_heads(mixed, dt, self.weights[layer], self.shape, scan, metadata, out)
        else:
            scan_tokens(xbc, dt, self.weights[layer], self.shape, conv, scan, metadata, self._longest, out)

    def _check_inputs(self, inputs: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, Tensor]:
        widths = (self.shape.channels, self.shape.num_heads, self.shape.num_heads * self.shape.head_dim)
        columns = [tuple(tensor.shape[1:]) for tensor in (*inputs, out)]
        if columns != [(width,) for width in widths] or any(tensor.stride(1) != 1 for tensor in (*inputs, out)):
            raise InputError(
                f"xbc, dt and out have columns {columns}; expected {widths}, one after the other in memory."
            )
        xbc, dt = inputs
        if xbc.dtype is not self.cache.states["conv"].dtype or out.dtype is not xbc.dtype:
            raise InputError(
                f"xbc is {xbc.dtype}, out is {out.dtype}; expected {self.cache.states['conv'].dtype}, as the states."
            )
        return xbc, dt
