"""Tell by a kernel's name in the driver who launches it, and how to show it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

from simplegraph.device.inventory import Inventory, KnownMemory, MemoryKind, Touch

# Names of C++ carry the length of each part: "_ZN2at6native13reduce_kernel...".
_OF_TORCH = re.compile("N(2at|3c10|5torch|7cutlass|3cub|6thrust|5flash|13pytorch_flash)")
_OF_LIBRARIES = re.compile(
    "cublas|cudnn|cusparse|cusolver|cufft|magma|xmma|nvjet|nccl|cask|convolve|winograd|regular_fft|vector_fft|"
    "trs[mv]_|potr[fsi]|getr[fsi]|geqrf|or[gm]qr|larf|syev|gesvd"
)
# Those of no language begin with what they were made for.
_NAMED = re.compile(r"(cutlass|ampere|volta|turing|hopper|maxwell|sm\d+)_")


@functools.cache
def launched_by_torch(kernel: str) -> bool:
    """True for a kernel of torch, or of a library that torch calls: its dispatcher shows the tensors that it gets.

    Such libraries leave arguments that a kernel does not use as they were, or pass addresses of the host.
    """
    own = _OF_TORCH.search(kernel) if kernel.startswith("_Z") else _NAMED.match(kernel)
    return bool(own or _OF_LIBRARIES.search(kernel))


@functools.cache
def readable(kernel: str) -> str:
    """Return a kernel's name without what a template was made for, and without its arguments."""
    text, depth, shown = _demangled(kernel), 0, ""
    if text is None:
        return kernel
    text = text.replace("(anonymous namespace)::", "")
    for at, letter in enumerate(text):
        if letter == "(" and depth == 0 and not text.startswith("operator()", max(0, at - 8)):
            break
        depth -= letter == ">"
        shown += letter if depth == 0 and letter != "<" and letter != ">" else ""
        depth += letter == "<"
    return shown.removeprefix("void ").strip()


def _demangled(kernel: str) -> str | None:
    """Return the signature that a name of C++ stands for; None if it is none, or nobody here can tell."""
    demangle = _demangler() if kernel.startswith("_Z") else None
    if demangle is None:
        return None
    status = ctypes.c_int()
    found = demangle(kernel.encode(), None, None, ctypes.byref(status))
    if not found:
        return None
    try:
        return ctypes.string_at(found).decode(errors="replace")
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(found))


@functools.cache
def _demangler() -> Any:
    """Find the function of C++'s runtime that reads mangled names; torch has loaded it."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    demangle.restype = ctypes.c_void_p
    return demangle


def report_lines(inventory: Inventory, names: Sequence[KnownMemory] = ()) -> Iterator[str]:
    """Yield one line for each kernel with what it touches, under its module's name, and what could not be read.

    A kernel belongs to the module whose memory it touches.

    Args:
        inventory: of a graph.
        names: of memory, better ones than the driver's reader had.
    """
    modules: dict[str, dict[str, dict[str, None]]] = {}
    for _, touches in itertools.groupby(inventory.touches, operator.attrgetter("number")):
        named = [(touch, _name(touch, names)) for touch in touches]
        owners = [name.rpartition(".")[0] for touch, name in named if name and touch.certain]
        kernels = modules.setdefault(max(owners, key=len, default=""), {})
        for touch, name in named:
            kernels.setdefault(readable(touch.node), {}).setdefault(_shown(touch, name))
    for module, kernels in modules.items():
        if module:
            yield f"{module}:"
        for kernel, shown in kernels.items():
            yield f"{'  ' * bool(module)}{kernel}: {', '.join(shown)}"
    for note, count in inventory.notes.items():
        yield f"not read: {count} x {note}"


def _name(touch: Touch, names: Sequence[KnownMemory]) -> str:
    if touch.place is MemoryKind.POOL:
        return ""
    return next((each.name for each in names if each.start <= touch.address < each.end), touch.name)


def _shown(touch: Touch, name: str) -> str:
    if touch.place is MemoryKind.POOL:
        return "pool"
    what = name or f"{touch.place.value} at {touch.address:#x}"
    return what if touch.certain else f"{what}?"
