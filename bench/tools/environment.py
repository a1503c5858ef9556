"""Describes the machine, the versions and the commit that figures were measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "timm",
    "torchvision",
    "diffusers",
    "tensordict",
    "simple-cuda-graph",
    "vllm",
    "vllm-flash-attn",
    "flash-attn-3",
    "flashinfer-python",
    "nvidia-cublas",
    "numpy",
    "pytest-benchmark",
)
GIT_SECONDS = 10


def describe() -> dict[str, Any]:
    """Describe the environment of this process, ready for JSON."""
    return {
        "gpu": gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "versions": versions(),
    }


def gpu() -> dict[str, Any] | None:
    """Return name, memory in bytes, compute capability and driver of the current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver(),
    }


def driver() -> str:
    """Return the driver's version, from nvidia-smi or the kernel module."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.is_file() else "unknown"


def versions() -> dict[str, str]:
    """Return the versions of the installed `LIBRARIES`."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # optional; libraries that are missing are left out
            continue
    return found


def commit() -> str:
    """Return the commit of this checkout, marked if files differ from it; BENCH_COMMIT if git has none."""
    given = os.environ.get("BENCH_COMMIT")
    if given:
        return given
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head} (modified)" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """Run git and return its output; None without git or a repository."""
    if not shutil.which("git"):
        return None
    answer = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else None
