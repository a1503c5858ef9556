"""Ways to run a training step, by name: eager, graphs of several libraries, the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import simplegraph as sg
from bench.arms.libraries import NamedArm, load_compiler, load_cuda, load_tensordict
from bench.tools.replays import Replays
from bench.training.workloads import Step, Task

WARMUP = 3  # eager steps of the graphs made by hand; torch's own recipe


@dataclasses.dataclass(frozen=True)
class TrainingArm(NamedArm):
    """One way to run a task's steps; `make` is called with the task, and its step with a batch.

    Args:
        capturable: the optimizer is made with the settings that a graph needs.
        graphs: returns what has the graphs: a wrapper of this library, or another object that counts its `replays`.
        each: replays of one step, of a wrapper of this library.
        whole: True if the optimizer is in the graph, too.
    """

    capturable: bool = True
    graphs: Callable[[Task, Step], Any] = lambda task, step: None
    each: int = 1
    whole: bool = False

    def replayed(self, task: Task, step: Step) -> int | None:
        """Count the replays of a task's step so far; None if it cannot tell."""
        graphs = self.graphs(task, step)
        replays: int | None = getattr(getattr(graphs, "graph_stats", graphs), "replays", None)
        return replays

    def replays(self, task: Task, step: Step, name: str) -> Replays:
        """Return what checks that our graphs serve the steps that are timed."""
        graphs = self.graphs(task, step)
        return Replays(graphs, name=name) if hasattr(graphs, "graph_stats") else Replays()


def _eager(task: Task) -> Step:
    return task.step


def _train_step(task: Task) -> Step:
    modules = [module for module in (task.model, task.target) if module is not None]
    step: Step = sg.train_step(task.step, optimizers=task.optimizer, modules=modules)
    return step


def _forward_backward(task: Task) -> Step:
    task.call = sg.wrap(task.model, training=True, progress=False)
    return task.step


def _step(task: Task, step: Step) -> Any:
    return step


class HandMade:
    """A whole step in one `torch.cuda.CUDAGraph`, as projects write it: eager steps, a capture, copies, replays."""

    def __init__(self, task: Task) -> None:
        self._task, self._graph, self._calls = task, torch.cuda.CUDAGraph(), 0
        self._inputs: tuple[Tensor, ...] = ()
        self._stream = torch.cuda.Stream()
        self.replays = 0

    def __call__(self, *batch: Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= WARMUP:
            return self._aside(batch)
        if self._calls == WARMUP + 1:
            self._capture(batch)
        torch._foreach_copy_(self._inputs, batch)
        self._graph.replay()
        self.replays += 1
        return self._loss

    def _aside(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Do an eager step on a stream of its own, so that gradients are accumulated on no default stream later."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._task.step(*batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(tensor.clone() for tensor in batch)
        self._task.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._loss = self._task.step(*self._inputs)


def _graphed_callables(task: Task) -> Step:
    # It refuses autocast's cache of casts, so the casts of this arm are in its graphs, without one.
    task.cache_casts = False
    model = task.model
    samples = task.batch()[:1]
    with task.autocast():
        task.call = torch.cuda.make_graphed_callables(model, samples)
    return task.step


def _tensordict(task: Task) -> Step:
    from tensordict.nn import CudaGraphModule

    graphed: Step = CudaGraphModule(task.step, warmup=WARMUP, device=task.device)
    return graphed


def _compiled(task: Task) -> Step:
    task.call = torch.compile(task.model, mode="reduce-overhead")
    return task.step


ARMS: dict[str, TrainingArm] = {
    "eager": TrainingArm(_eager, capturable=False, ours=True),
    "eager-capturable": TrainingArm(_eager, ours=True),
    "train-step": TrainingArm(_train_step, capturable=False, graphs=_step, ours=True, whole=True),
    "hand-made": TrainingArm(HandMade, load=load_cuda, graphs=_step, whole=True),
    "forward-backward": TrainingArm(
        _forward_backward, capturable=False, graphs=lambda task, step: task.call, each=2, ours=True
    ),
    "make-graphed-callables": TrainingArm(_graphed_callables, capturable=False, load=load_cuda),
    "tensordict-cudagraph": TrainingArm(_tensordict, load=load_tensordict, whole=True),
    "compiled-reduce-overhead": TrainingArm(_compiled, capturable=False, load=load_compiler, compiles=True),
}
