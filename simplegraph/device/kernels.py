"""Tell by a kernel's name in the driver who launches it, and how to show it."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from simplegraph.device.inventory import Inventory, KnownMemory, MemoryKind, Touch

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
    own = _OF_TORCH.search(kernel) if kernel.startswith("_Z") else _NAMED.match(kernel)
    return bool(own or _OF_LIBRARIES.search(kernel))


@functools.cache
def readable(kernel: str) -> str:
    """Return a kernel's name without what a template was made for, and without its arguments."""
    text, depth, shown = _demangle(kernel) if kernel.startswith("_Z") else kernel, 0, ""
    if text == kernel:
        return kernel
    text = text.replace("(anonymous namespace)::", "")
    for at, letter in enumerate(text):
        if letter == "(" and depth == 0 and not text.startswith("operator()", max(0, at - 8)):
            break
        depth -= letter == ">"
        shown += letter if depth == 0 and letter != "<" and letter != ">" else ""
        depth += letter == "<"
    return shown.removeprefix("void ").strip()


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
