"""Run a scene, and print how much of the package it enters: ``python tests/support/traced.py module``."""

from __future__ import annotations

import inspect
import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import simplegraph as sg

ROOT = Path(sg.__file__).resolve().parent.parent
PACKAGE = f"{ROOT / 'simplegraph'}/"


class Trace:
    """Notes the package's functions that are called while it is entered.

    Comprehensions, lambdas and the bodies of classes, which run where their file is first imported, are not counted.
    """

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.calls: set[tuple[str, str]] = set()  # from one file to another

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
            return
        self.functions.add(code)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.calls.add((caller.f_code.co_filename, code.co_filename))

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).eval()


def module() -> Trace:
    """A three-layer MLP, from `wrap` to its first replays."""
    with torch.inference_mode(), Trace() as trace:
        model = sg.wrap(mlp(), capture_sizes=[1, 2, 4], progress=False)
        model.capture_graphs(torch.randn(4, 8))
        for rows in (4, 2, 1, 4, 2, 1):
            model(torch.randn(rows, 8))
    if not model.graph_stats.replays:
        raise RuntimeError(str(model.graph_report()))
    return trace


def replay() -> Trace:
    """A steady replay."""
    with torch.inference_mode():
        model = sg.wrap(mlp(), capture_sizes=[4], progress=False)
        for _ in range(8):
            model(torch.randn(4, 8))
        before = model.graph_stats.replays
        with Trace() as trace:
            model(torch.randn(4, 8))
    if model.graph_stats.replays != before + 1:
        raise RuntimeError(str(model.graph_report()))
    return trace


def step() -> Trace:
    """A training step, from `train_step` to its first replays."""
    trained = mlp().train()
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = trained(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with Trace() as trace:
        graphed = sg.train_step(train, optimizers=optimizer)
        for _ in range(8):
            graphed(torch.randn(4, 8))
    if not graphed.graph_stats.replays:
        raise RuntimeError(str(graphed.graph_report()))
    return trace


SCENES: dict[str, Callable[[], Trace]] = {scene.__name__: scene for scene in (module, replay, step)}


def main(name: str) -> None:
    logging.getLogger("simplegraph").setLevel(logging.ERROR)
    trace = SCENES[name]()
    files = {code.co_filename for code in trace.functions}
    calls = [[str(Path(file).relative_to(ROOT)) for file in pair] for pair in sorted(trace.calls)]
    print(json.dumps({"functions": len(trace.functions), "files": len(files), "calls": calls}))


if __name__ == "__main__":
    main(sys.argv[1])
