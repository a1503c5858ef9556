"""Arms for any module at one batch size, by name: eager, graphs of several libraries, the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.arms.base import NotAvailable, require_cuda
from bench.tools import compiler
from simplegraph.errors import install_command

Step = Callable[..., Tensor]
SIZES = (1, 2, 4)  # sizes that simplegraph captures in addition to the measured batch, each at its first use
# The last call before its capture; the next one, the third, replays.
_TENSORDICT_WARMUP = 2


def _nothing(device: torch.device) -> None:
    return None


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
    load: Callable[[torch.device], None] = _nothing
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


def _load_compiler(device: torch.device) -> None:
    require_cuda(device, "it")
    compiler.load_cold()


def _compiled(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    compiled: Step = torch.compile(module, mode="reduce-overhead")
    return compiled


def _graphed_callables(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    # It replaces the forward of a module, so it gets a function: the eager module must not change.
    graphed: Step = torch.cuda.make_graphed_callables(lambda *tensors: module(*tensors), inputs)
    return graphed


def _load_tensordict(device: torch.device) -> None:
    require_cuda(device, "it")
    try:
        import tensordict.nn  # noqa: F401
    except ImportError as error:
        raise NotAvailable(f"needs tensordict ({error}); {install_command('bench-models')}") from error


def _tensordict(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    from tensordict.nn import CudaGraphModule

    graphed: Step = CudaGraphModule(module, warmup=_TENSORDICT_WARMUP, device=inputs[0].device)
    return graphed


ARMS: dict[str, ModelArm] = {
    "eager": ModelArm(_eager, ours=True),
    "simplegraph": ModelArm(_simplegraph, ours=True),
    "simplegraph-static": ModelArm(_simplegraph_static, ours=True),
    "compiled-reduce-overhead": ModelArm(_compiled, _load_compiler, compiles=True),
    "make-graphed-callables": ModelArm(_graphed_callables, lambda device: require_cuda(device, "it")),
    "tensordict-cudagraph": ModelArm(_tensordict, _load_tensordict),
}
QUICK = tuple(name for name, arm in ARMS.items() if not arm.compiles)
