"""Shows an observer which tensors Triton's kernels are passed, since torch's dispatcher does not see their launches.

A graph of operators and such kernels reads nothing that neither was passed. Work of any other kind may read anything.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base import patches
from simplegraph.base.operators import innermost_mode, strided_tensors

_OWN = __name__.partition(".")[0]  # no kernel of this library takes an address as a number
_ADDRESSES = 1 << 32  # numbers from here on may be one
# Elements of other dtypes may be addresses, or parts of a descriptor that has one.
_NO_ADDRESSES = frozenset({torch.bool, torch.int16, torch.int32})


@contextlib.contextmanager
def showing_launches() -> Iterator[None]:
    """Show the launches of Triton's kernels in here, if Triton is loaded, to the innermost mode that has `launching`.

    That method is passed the tensors that a kernel can touch, None if they are not known, and surrounds the launch.
    """
    kernels: Any = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if kernels is None:
        yield
        return
    patches.hold(kernels, "run", _shown)
    try:
        yield
    finally:
        patches.release(kernels, "run")


def _shown(run: Callable[..., Any]) -> Callable[..., Any]:
    def shown(self: Any, *args: Any, **kwargs: Any) -> Any:
        launching = getattr(innermost_mode(), "launching", None)
        if launching is None:
            return run(self, *args, **kwargs)
        own = str(getattr(self, "module", "")).partition(".")[0] == _OWN
        # Beside the arguments of the kernel, `kwargs` has the grid and options of the compiler.
        given = [*args, *(value for name, value in kwargs.items() if name != "grid"), *_default_tensors(self)]
        with launching(_tensors_of(given, own=own)):
            return run(self, *args, **kwargs)

    return shown


def _default_tensors(kernel: Any) -> list[Tensor]:
    """List the tensors that a kernel is passed where its caller leaves an argument out."""
    parameters = getattr(getattr(kernel, "signature", None), "parameters", {})
    return [each.default for each in parameters.values() if isinstance(each.default, Tensor)]


def _tensors_of(args: Sequence[Any], *, own: bool) -> list[Tensor] | None:
    """List the tensors among a kernel's arguments; None if another argument, or an element, may be an address."""
    return strided_tensors(args) if own or all(map(_holds_no_address, args)) else None


def _holds_no_address(arg: Any) -> bool:
    if isinstance(arg, Tensor):
        if type(arg).data_ptr is not Tensor.data_ptr:  # of a class that names other memory than its own
            return False
        return arg.dtype in _NO_ADDRESSES or arg.is_floating_point()
    return abs(arg) < _ADDRESSES if isinstance(arg, int) else isinstance(arg, (float, str, torch.dtype, type(None)))
