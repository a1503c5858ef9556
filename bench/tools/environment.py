"""Which machine, which versions, which commit: what a figure is worth nothing without."""

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
    """The environment of this process, ready for JSON."""
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
    """Name, memory in bytes, compute capability and driver of the current GPU; None without one."""
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
    """The driver's version, as nvidia-smi or the kernel module gives it."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.is_file() else "unknown"


def versions() -> dict[str, str]:
    """The installed ones of `LIBRARIES`."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # optional, and its absence is the answer
            continue
    return found


def commit() -> str:
    """The commit of this checkout, marked when files differ from it; BENCH_COMMIT where git has none."""
    given = os.environ.get("BENCH_COMMIT")
    if given:
        return given
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head} (modified)" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """What git answers, or None where there is no git or no repository."""
    if not shutil.which("git"):
        return None
    answer = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else None
