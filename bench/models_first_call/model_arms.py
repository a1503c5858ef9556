"""Arms for any module at one batch size, by name: eager, graphs of several libraries, the compiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.arms.libraries import NamedArm, load_compiler, load_cuda, load_tensordict

Step = Callable[..., Tensor]
SIZES = (1, 2, 4)  # sizes that simplegraph captures in addition to the measured batch, each at its first use
# The last call before its capture; the next one, the third, replays.
_TENSORDICT_WARMUP = 2


def _eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return module


def _sizes(inputs: tuple[Tensor, ...]) -> list[int]:
    return sorted({*SIZES, inputs[0].shape[0]})


def _simplegraph(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return sg.wrap(module, capture_sizes=_sizes(inputs), progress=False)


def _simplegraph_static(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return sg.wrap(module, capture_sizes=_sizes(inputs), progress=False, outputs="static")


def _compiled(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    compiled: Step = torch.compile(module, mode="reduce-overhead")
    return compiled


def _graphed_callables(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    # It replaces the forward of a module, so it gets a function: the eager module must not change.
    graphed: Step = torch.cuda.make_graphed_callables(lambda *tensors: module(*tensors), inputs)
    return graphed


def _tensordict(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    from tensordict.nn import CudaGraphModule

    graphed: Step = CudaGraphModule(module, warmup=_TENSORDICT_WARMUP, device=inputs[0].device)
    return graphed


ARMS: dict[str, NamedArm] = {
    "eager": NamedArm(_eager, ours=True),
    "simplegraph": NamedArm(_simplegraph, ours=True),
    "simplegraph-static": NamedArm(_simplegraph_static, ours=True),
    "compiled-reduce-overhead": NamedArm(_compiled, load_compiler, compiles=True),
    "make-graphed-callables": NamedArm(_graphed_callables, load_cuda),
    "tensordict-cudagraph": NamedArm(_tensordict, load_tensordict),
}
QUICK = tuple(name for name, arm in ARMS.items() if not arm.compiles)
