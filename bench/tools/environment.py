"""Describes the machine, the versions and the commit that figures were measured with."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# Packages whose version can change a figure; those that are not installed are null in the JSON.
LIBRARIES = (
    *("torch", "triton", "transformers", "timm", "torchvision", "diffusers", "peft", "tensordict", "simple-cuda-graph"),
    *("vllm", "vllm-flash-attn", "flash-attn", "flash-attn-3", "flashinfer-python"),
    *("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "cuda-bindings"),
    "numpy",
)
# Packages of FlashAttention-3's kernels, which may lie beside others, or in vLLM, without a version.
KERNELS = ("vllm_flash_attn", "flash_attn_interface", "vllm/vllm_flash_attn")
GIT_SECONDS = 10


def describe() -> dict[str, Any]:
    """Describe the environment of this process, ready for JSON. Starts CUDA, where there is a GPU."""
    return {
        "gpu": gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "versions": versions(),
        "kernels": kernels(),
    }


def missing(machine: Mapping[str, Any]) -> list[str]:
    """Say what a description lacks that figures need to be repeated; nothing for one that `describe` made."""
    gpu: Mapping[str, Any] = machine.get("gpu") or {}
    found = [
        name for name in ("gpu", "torch", "cuda", "python", "commit", "versions", "kernels") if name not in machine
    ]
    if gpu:
        found += [f"gpu.{name}" for name in ("name", "driver") if gpu.get(name, "unknown") == "unknown"]
    if machine.get("commit") == "unknown":
        found.append("commit")
    return found + [f"versions.{name}" for name in LIBRARIES if name not in machine.get("versions", {})]


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


@functools.cache
def driver() -> str:
    """Return the driver's version, from nvidia-smi or the kernel module."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.is_file() else "unknown"


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the versions of `LIBRARIES`; None for those that are not installed."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def kernels() -> dict[str, dict[str, int]]:
    """Return the libraries of the installed `KERNELS` with their bytes, by which builds without a version are told."""
    found = {}
    for name in KERNELS:
        package, *inside = name.split("/")
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent.joinpath(*inside)
            files = sorted(folder.glob("*.so")) if spec.submodule_search_locations else []
            found[name] = {file.name: file.stat().st_size for file in files}
    return found


@functools.cache
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
