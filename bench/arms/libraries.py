"""Describes arms that are listed by name, and imports the libraries they measure before any timing starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import simplegraph as sg
from bench.arms.base import NotAvailable, require_cuda
from bench.tools import compiler
from simplegraph.base.errors import install_command


def load_nothing(device: torch.device) -> None:
    """Do nothing: the arm needs torch alone, and runs on any device."""


def load_cuda(device: torch.device) -> None:
    """Import nothing, for arms that need a GPU and torch alone."""
    require_cuda(device, "it")


def load_compiler(device: torch.device) -> None:
    """Import the compiler, with its caches off."""
    require_cuda(device, "it")
    compiler.load_cold()


def load_warm_compiler(device: torch.device) -> None:
    """Import the compiler, with its caches on."""
    require_cuda(device, "it")
    compiler.load_warm()


def load_tensordict(device: torch.device) -> None:
    """Import tensordict, which has graphs of its own."""
    require_cuda(device, "it")
    try:
        import tensordict.nn  # noqa: F401
    except ImportError as error:
        raise NotAvailable(f"needs tensordict ({error}); {install_command('bench-models')}") from error


def load_optimizer(device: torch.device) -> None:
    """Import Triton, if it is there: torch's operators run in the place of its kernels without it."""
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    if device.type == "cuda":
        sg.preload(device).wait()  # starts Triton, for a compiler that comes after it, as well


@dataclasses.dataclass(frozen=True)
class NamedArm:
    """One way to run something.

    Args:
        make: called with what the benchmark runs; returns a callable for a step of it.
        load: imports its libraries before any timing starts; raises `NotAvailable` if it cannot run here.
        compiles: True if it compiles, which takes up to a minute or more.
        ours: True for simplegraph's arms and eager, which must work and be right.
    """

    make: Callable[..., Callable[..., Any]]
    load: Callable[[torch.device], None] = load_nothing
    compiles: bool = False
    ours: bool = False
