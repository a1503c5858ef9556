"""Imports the libraries that arms measure before any timing starts; raises `NotAvailable` if one cannot run here."""

from __future__ import annotations

import torch

from bench.arms.base import NotAvailable, require_cuda
from bench.tools import compiler
from simplegraph.errors import install_command


def load_nothing(device: torch.device) -> None:
    """Do nothing: the arm needs torch alone, and runs on any device."""


def load_cuda(device: torch.device) -> None:
    """Import nothing, for arms that need a GPU and torch alone."""
    require_cuda(device, "it")


def load_compiler(device: torch.device) -> None:
    """Import the compiler, with its caches off."""
    require_cuda(device, "it")
    compiler.load_cold()


def load_tensordict(device: torch.device) -> None:
    """Import tensordict, which has graphs of its own."""
    require_cuda(device, "it")
    try:
        import tensordict.nn  # noqa: F401
    except ImportError as error:
        raise NotAvailable(f"needs tensordict ({error}); {install_command('bench-models')}") from error
