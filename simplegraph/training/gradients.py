"""Gradients: the leaves that get gradients, preparations for the capture of a backward, and the memory of gradients."""

from __future__ import annotations

import collections
import contextlib
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from simplegraph.base.errors import CaptureError
from simplegraph.base.modes import outside_modes
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import has_address, lies_at, storage_key, storage_uses
from simplegraph.device.protocol import GraphDevice

_grad = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")
KEPT = True  # stands for a gradient that a step does not touch
_SHARED = (
    "the gradient of a parameter of shape {} is held elsewhere, too, and is another one at every call, so a graph can "
    "add to it only in a copy: make the gradients, or the buffer that they are views of, once, before the first step"
)
_MAX_BUFFERS = 3  # replacements of a user's gradient after which it is assumed to be a new one at every call
_REPLICA = (
    "DistributedDataParallel reduces gradients between ranks by hooks that no replay runs; "
    "wrap the module in it: DistributedDataParallel(wrap(module, training=True))"
)


@contextlib.contextmanager
def noted_calls(register: Callable[[Callable[..., None]], Any]) -> Iterator[list[Any]]:
    """Yield a list to which each module or optimizer that this thread calls in the block is added.

    Args:
        register: registers a hook and returns its handle; the hook's first argument is the module or optimizer.
    """
    thread, calls = threading.get_ident(), list[Any]()

    def hook(called: Any, *_: Any) -> None:
        if threading.get_ident() == thread:
            calls.append(called)

    handle = register(hook)
    try:
        yield calls
    finally:
        handle.remove()


@contextlib.contextmanager
def replicas_refused(binding: Any) -> Iterator[None]:
    """Refuse graphs for a binding's calls if the run in the block calls a `DistributedDataParallel` anywhere.

    Autograd itself reduces its gradients between ranks. A failed capture would leave that half done, and the next
    forward of the module would raise.
    """
    with noted_calls(register_module_forward_pre_hook) as called:
        try:
            yield
        finally:
            if any(isinstance(module, DistributedDataParallel) for module in called):
                binding.refuse(CannotBind(Reason.UNTRAINABLE, _REPLICA))


def leaves_reached(outputs: Iterable[Tensor]) -> list[Tensor]:
    """List the leaves of the autograd graphs of outputs, each once; an output may be a leaf itself."""
    wanting = [output for output in outputs if output.requires_grad]
    leaves = {id(output): output for output in wanting if output.grad_fn is None}
    nodes: list[Any] = [output.grad_fn for output in wanting if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list(leaves.values())


def set_up_backwards(device: GraphDevice) -> None:
    """Make cuBLAS's workspaces for the thread that will run the backward on the capture stream."""
    with device.on_capture_stream(), torch.enable_grad():
        scratch = torch.zeros(1, device=device.torch_device, requires_grad=True)
        result = scratch.clone()
        result.register_hook(lambda _: device.keep_workspaces())  # type: ignore[no-untyped-call]  # in that thread
        torch.autograd.grad(result, scratch)


class Gradients:
    """The gradients of some parameters.

    A gradient that a graph makes is in the graphs' pool: each replay sets it, and the next replay of another graph
    overwrites it. A gradient that a graph reads at its start, to add to it, is at a fixed address
    outside of the pool, the same for all graphs. If anything else holds the user's own `.grad`, or a view of its
    memory, and the step leaves it in place, that address is used; else memory of ours, to which `.grad` is copied.

    Attributes:
        parameters: the parameters.
        devices: their devices, as text.
        entry: the `.grad` of each parameter when `state` was last called.
        refusal: why no graph can serve the next call, if a gradient is shared in an unsupported way; else empty.
    """

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.entry: list[Tensor | None] = []
        self.devices: list[str] = []
        self.refusal = ""
        self._fixed: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the parameter
        self._users: set[int] = set()  # ids of parameters whose fixed address is that of the user's own gradient
        self._replaced: collections.Counter[int] = collections.Counter()  # how often the user replaced that gradient
        self._counts: list[int] = []  # reference counts of the gradients in `entry`
        self._made: set[int] = set()  # storage keys of gradients that graphs make
        _OF_STEPS.add(self)
        self._wanting: list[bool] = []
        self._key: Hashable = ()

    def use(self, parameters: Iterable[Tensor]) -> None:
        """Manage the gradients of these parameters from now on."""
        distinct = list({id(parameter): parameter for parameter in parameters}.values())
        if list(map(id, distinct)) != list(map(id, self.parameters)):
            self.parameters = distinct
            self.entry = []
            self._wanting = []
            self.devices = sorted({str(parameter.device) for parameter in distinct})
            self._fixed = {id(p): self._fixed[id(p)] for p in distinct if id(p) in self._fixed}

    def state(self) -> Hashable:
        """Return which parameters have a gradient, and which require one; the same object as long as this is equal."""
        entry, wanting = list(map(_grad, self.parameters)), list(map(_requires_grad, self.parameters))
        is_same = len(entry) == len(self.entry) and all(map(operator.is_, entry, self.entry))
        if wanting != self._wanting or not is_same:
            self.entry, self._wanting = entry, wanting
            key = tuple(wanting), tuple(gradient is not None for gradient in entry), self._find_replaced()
            self._key = self._key if key == self._key else key
        return self._key

    def _find_replaced(self) -> tuple[int, ...]:
        """Release the user's gradients that were replaced, and refuse those that others hold; return the counts."""
        self.refusal = ""
        self._counts = list(map(sys.getrefcount, self.entry))
        for index, parameter in enumerate(self.parameters):
            fixed, gradient = self._fixed.get(id(parameter)), self.entry[index]
            if fixed is None or gradient is None or shows_the_same(gradient, fixed[1]):
                continue
            if id(parameter) in self._users:
                self._users.remove(id(parameter))
                del self._fixed[id(parameter)]
                self._replaced[id(parameter)] += 1
            adopts = id(parameter) not in self._fixed and self._replaced[id(parameter)] < _MAX_BUFFERS
            if not adopts and self._is_held(index):
                self.refusal = _SHARED.format(tuple(parameter.shape))
        return tuple(self._replaced.values())

    def note_made(self, gradients: Iterable[Tensor]) -> None:
        """Note gradients that graphs make, since another graph overwrites them."""
        self._made.update(map(storage_key, gradients))

    def passed(self) -> dict[int, list[int]]:
        """Return the indices of the present gradients by storage key; cuDNN makes several gradients in one buffer."""
        indices: dict[int, list[int]] = {}
        for index, gradient in enumerate(map(_grad, self.parameters)):
            if gradient is not None and gradient.layout is torch.strided:
                indices.setdefault(storage_key(gradient), []).append(index)
        return indices

    def fix(self, used: Iterable[int]) -> set[int]:
        """Make the tensors at fixed addresses for gradients that graphs read; return all their storage keys."""
        for index in used:  # a capture would make its own
            self._fixed_of(index)
        return {storage_key(tensor) for _, tensor in self._fixed.values()}

    def _fixed_of(self, index: int, *, makes: bool = True) -> Tensor:
        """Return the tensor at a fixed address for the gradient of one parameter."""
        parameter = self.parameters[index]
        fixed = self._fixed.get(id(parameter))
        if fixed is None or _kind(fixed[1]) != _kind(parameter):  # the parameter was converted or moved
            if not makes:
                cause = f"a parameter of shape {tuple(parameter.shape)} was converted or moved just before"
                raise CaptureError(f"capturing the step failed\n  {cause}.", cause=cause)
            gradient = parameter.grad
            if gradient is not None and fixed is None and self._is_users(index):
                self._users.add(id(parameter))
                self._fixed[id(parameter)] = parameter, gradient
                return gradient
            self._users.discard(id(parameter))
            with outside_modes():
                made = torch.empty_like(parameter if gradient is None else gradient, requires_grad=False)
            fixed = self._fixed[id(parameter)] = parameter, made
        return fixed[1]

    def _is_users(self, index: int) -> bool:
        """True if graphs may add to the user's own gradient in place: others hold it, and the step leaves it there."""
        parameter, gradient = self.parameters[index], self.entry[index] if index < len(self.entry) else None
        if gradient is None or gradient is not parameter.grad or gradient.requires_grad:
            return False
        plain = gradient.layout is torch.strided and _kind(gradient) == _kind(parameter)
        return plain and self._replaced[id(parameter)] < _MAX_BUFFERS and self._is_held(index)

    def _is_held(self, index: int) -> bool:
        """True if anything else holds the gradient of `entry`, or shares its memory, such as a flat buffer."""
        gradient: Any = self.entry[index]
        if not has_address(gradient):  # a sparse gradient
            return False
        key = storage_key(gradient)
        if any(key in gradients._made for gradients in list(_OF_STEPS)):  # by graphs of this step, or of another one
            return False
        sharing = sum(other is not None and has_address(other) and storage_key(other) == key for other in self.entry)
        base = gradient._base
        expected = sharing + 1 + (base is not None)  # with the storage as we read it, and what the views are of
        in_storage = storage_uses(gradient.untyped_storage()._cdata) > expected
        return in_storage or self._counts[index] > _HELD_ONCE or (base is not None and sys.getrefcount(base) > 2)

    def enter(self, used: Iterable[int]) -> None:
        """Move the gradients that a graph reads to the addresses that it reads."""
        with outside_modes():
            for index in used:
                parameter, fixed = self.parameters[index], self._fixed_of(index)
                gradient = parameter.grad
                if gradient is not None and not shows_the_same(gradient, fixed):
                    fixed.copy_(gradient)
                    parameter.grad = fixed

    def begin_capture(self, used: Iterable[int]) -> list[Tensor | None]:
        """Put gradients that the capture reads at their fixed address; return those to restore. Raises CaptureError."""
        before = list(map(_grad, self.parameters))
        for index in used:
            if before[index] is not None:
                self.parameters[index].grad = self._fixed_of(index, makes=False)
        return before

    def end_capture(self, before: Sequence[Tensor | None], used: Iterable[int]) -> list[Any]:
        """Return the gradients that a captured step left; call `put` afterwards to restore those from before.

        Returns:
            For each parameter: a tensor of the graph, the tensor at the fixed address, None, or `KEPT`.
        """
        gradients: list[Any] = []
        read = set(used)
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            kept = gradient is before[index] and gradient is not None and index not in read
            gradients.append(KEPT if kept else gradient)
        for gradient in gradients:
            if isinstance(gradient, Tensor) and (gradient.layout is not torch.strided or gradient.requires_grad):
                cause = "a gradient is sparse" if gradient.layout is not torch.strided else "a gradient requires grad"
                raise CaptureError(f"capturing the step failed\n  {cause}, which no graph can hand out.", cause=cause)
        return gradients

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Set every `.grad`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient


_OF_STEPS: weakref.WeakSet[Gradients] = weakref.WeakSet()


def shows_the_same(gradient: Tensor, other: Tensor) -> bool:
    """True if two gradients are one tensor, or equal views of the same memory; a sparse gradient has no memory."""
    return gradient is other or (has_address(gradient) and lies_at(gradient) == lies_at(other))


def _references() -> int:
    """Count the references to a gradient that only its parameter and a list hold; the count depends on torch."""
    parameter = torch.zeros(1)
    parameter.grad = torch.zeros(1)
    return next(map(sys.getrefcount, [parameter.grad]))


_HELD_ONCE = _references()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape
