"""Arms for any module at one batch size, by name: eager, graphs of several libraries, the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.arms.libraries import load_compiler, load_cuda, load_nothing, load_tensordict

Step = Callable[..., Tensor]
SIZES = (1, 2, 4)  # sizes that simplegraph captures in addition to the measured batch, each at its first use
# The last call before its capture; the next one, the third, replays.
_TENSORDICT_WARMUP = 2


@dataclasses.dataclass(frozen=True)
class ModelArm:
    """One way to run a module.

    Args:
        make: called with the module and a call's tensors; returns a callable for calls like it.
        load: imports its libraries before any timing starts; raises `NotAvailable` if it cannot run.
        compiles: True if it compiles, which takes a minute or more per model.
        ours: True for simplegraph's arms, which must work at every batch size up to the largest of `SIZES`.
    """

    make: Callable[[nn.Module, tuple[Tensor, ...]], Step]
    load: Callable[[torch.device], None] = load_nothing
    compiles: bool = False
    ours: bool = False


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


ARMS: dict[str, ModelArm] = {
    "eager": ModelArm(_eager, ours=True),
    "simplegraph": ModelArm(_simplegraph, ours=True),
    "simplegraph-static": ModelArm(_simplegraph_static, ours=True),
    "compiled-reduce-overhead": ModelArm(_compiled, load_compiler, compiles=True),
    "make-graphed-callables": ModelArm(_graphed_callables, load_cuda),
    "tensordict-cudagraph": ModelArm(_tensordict, load_tensordict),
}
QUICK = tuple(name for name, arm in ARMS.items() if not arm.compiles)
