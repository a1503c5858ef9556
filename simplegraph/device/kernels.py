"""Tell by a kernel's name in the driver who launches it, and how to show it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch

# Names of C++ carry the length of each part: "_ZN2at6native13reduce_kernel...".
_OF_TORCH = re.compile("N(2at|3c10|5torch|7cutlass|3cub|6thrust|5flash|13pytorch_flash)")
_OF_LIBRARIES = re.compile(
    "cublas|cudnn|cusparse|cusolver|cufft|magma|xmma|nvjet|nccl|cask|convolve|winograd|regular_fft|vector_fft|"
    "trs[mv]_|potr[fsi]|getr[fsi]|geqrf|or[gm]qr|larf|syev|gesvd"
)
# Those of no language begin with what they were made for.
_NAMED = re.compile(r"(cutlass|ampere|volta|turing|hopper|maxwell|sm\d+)_")
# Private to torch; where it is absent, names are shown as they are.
_demangle: Callable[[str], str] = getattr(torch._C, "_demangle", str)


@functools.cache
def launched_by_torch(kernel: str) -> bool:
    """True for a kernel of torch, or of a library that torch calls: its dispatcher shows the tensors that it gets.

    Such libraries leave arguments that a kernel does not use as they were, or pass addresses of the host.
    """
    is_torchs = _OF_TORCH.search(kernel) if kernel.startswith("_Z") else _NAMED.match(kernel)
    return bool(is_torchs or _OF_LIBRARIES.search(kernel))


@functools.cache
def readable(kernel: str) -> str:
    """Return a kernel's name without what a template was made for, and without its arguments."""
    text, replaced = _demangle(kernel) if kernel.startswith("_Z") else kernel, 1
    if text == kernel:
        return kernel
    text = text.replace("(anonymous namespace)::", "")
    while replaced:
        text, replaced = re.subn("<[^<>]*>", "", text)
    return re.sub(r"(?<!operator)\(.*", "", text).removeprefix("void ").strip()
