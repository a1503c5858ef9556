"""Read a kernel's name in the driver: the library that launches it, and a readable form."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch

# Names of C++ functions contain the length of each part: "_ZN2at6native13reduce_kernel...".
_OF_TORCH = re.compile("N(2at|3c10|5torch|7cutlass|3cub|6thrust|5flash|13pytorch_flash)")
_OF_LIBRARIES = re.compile(
    "cublas|cudnn|cusparse|cusolver|cufft|magma|xmma|nvjet|nccl|cask|convolve|winograd|regular_fft|vector_fft|"
    "trs[mv]_|potr[fsi]|getr[fsi]|geqrf|or[gm]qr|larf|syev|gesvd"
)
# Names of other kernels begin with the name of their architecture or library.
_NAMED = re.compile(r"(cutlass|ampere|volta|turing|hopper|maxwell|sm\d+)_")
# Private to torch. Without it, names are shown as they are.
_demangle: Callable[[str], str] = getattr(torch._C, "_demangle", str)


@functools.cache
def launched_by_torch(kernel: str) -> bool:
    """True for kernels of torch, and of libraries that torch calls: torch's dispatcher shows their tensors.

    Such libraries leave old values in arguments that a kernel does not use, or pass addresses of the host.
    """
    is_torchs = _OF_TORCH.search(kernel) if kernel.startswith("_Z") else _NAMED.match(kernel)
    return bool(is_torchs or _OF_LIBRARIES.search(kernel))


@functools.cache
def readable(kernel: str) -> str:
    """Return a kernel's name without its template arguments and its parameters."""
    text, replaced = _demangle(kernel) if kernel.startswith("_Z") else kernel, 1
    if text == kernel:
        return kernel
    text = text.replace("(anonymous namespace)::", "")
    while replaced:
        text, replaced = re.subn("<[^<>]*>", "", text)
    return re.sub(r"(?<!operator)\(.*", "", text).removeprefix("void ").strip()
