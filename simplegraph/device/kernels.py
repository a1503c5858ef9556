"""Tell by a kernel's name in the driver who launches it, how to show it, and which of its arguments it writes."""

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
_POINTER = re.compile(r"\*(?:\s*(?:const|__restrict__|restrict))*$")


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


@functools.cache
def accesses(kernel: str) -> tuple[str, ...]:
    """Return for each argument "reads" if it points to constants, "writes" to others, and "" if that is not told.

    Nothing for a kernel that is not of C++, such as Triton's.
    """
    text = _demangled(kernel)
    return tuple(map(_access, _arguments(text))) if text is not None else ()


def _access(argument: str) -> str:
    pointer = _POINTER.search(argument)
    if pointer is None:
        return ""
    to = argument[: pointer.start()].rstrip()
    return "reads" if to.endswith("const") or to.startswith("const ") else "writes"


def _arguments(text: str) -> list[str]:
    """Split the last parentheses of a signature at its commas."""
    if not text.endswith(")"):
        return []
    found, depth = [""], 0
    for letter in reversed(text):
        depth += letter in ")>]"
        if letter in "(<[":
            depth -= 1
            if depth == 0 and letter == "(":
                break
        if depth == 1 and letter == ",":
            found.append("")
        elif depth > 1 or letter != ")":
            found[-1] = letter + found[-1]
    return [argument.strip() for argument in reversed(found) if argument.strip()]


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
    modules: dict[str, dict[str, dict[str, dict[str, None]]]] = {}
    for _, touches in itertools.groupby(inventory.touches, operator.attrgetter("number")):
        named = [(touch, _name(touch, names)) for touch in touches]
        owners = [name.rpartition(".")[0] for touch, name in named if name and touch.certain]
        kernels = modules.setdefault(max(owners, key=len, default=""), {})
        for touch, name in named:
            shown = kernels.setdefault(readable(touch.node), {})
            shown.setdefault(_how(touch), {}).setdefault(_shown(touch, name))
    for module, kernels in modules.items():
        if module:
            yield f"{module}:"
        for kernel, shown in kernels.items():
            told = "; ".join(f"{how} {', '.join(places)}".strip() for how, places in shown.items())
            yield f"{'  ' * bool(module)}{kernel}: {told}"
    for note, count in inventory.notes.items():
        yield f"not read: {count} x {note}"


def _how(touch: Touch) -> str:
    """Return "reads" or "writes" where the name of the node tells."""
    if touch.parameter < 0:
        return "reads" if touch.node == "copy from" else "writes"
    told = accesses(touch.node)
    return told[touch.parameter] if touch.parameter < len(told) else ""


def _name(touch: Touch, names: Sequence[KnownMemory]) -> str:
    if touch.place is MemoryKind.POOL:
        return ""
    return next((each.name for each in names if each.start <= touch.address < each.end), touch.name)


def _shown(touch: Touch, name: str) -> str:
    if touch.place is MemoryKind.POOL:
        return "pool"
    what = name or f"{touch.place.value} at {touch.address:#x}"
    return what if touch.certain else f"{what}?"
