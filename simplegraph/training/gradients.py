"""Gradients: what leads to them, what captures of backwards prepare, and where those of a step lie."""

from __future__ import annotations

import collections
import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from simplegraph.base.errors import CaptureError
from simplegraph.base.modes import outside_modes
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import has_address, lies_at, storage_key
from simplegraph.device.protocol import GraphDevice

_grad = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")
# Private to torch; where it is absent, no gradient looks shared but one whose buffer the user holds.
_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
KEPT = True  # stands for a gradient that a step does not touch
_SHARED = (
    "the gradient of a parameter of shape {} is held elsewhere, too, and is another one at every call, so a graph can "
    "add to it only in a copy: make the gradients, or the buffer that they are views of, once, before the first step"
)
_MOST_BUFFERS = 3  # from which on gradients are taken for being elsewhere at every call
_REPLICA = (
    "DistributedDataParallel reduces gradients between ranks by hooks that no replay runs; "
    "wrap the module in it: DistributedDataParallel(wrap(module, training=True))"
)


@contextlib.contextmanager
def noted_calls(register: Callable[[Callable[..., None]], Any]) -> Iterator[list[Any]]:
    """Yield a list that each module or optimizer which this thread calls in here is added to.

    Args:
        register: registers a hook, which is called with what is called first, and returns its handle.
    """
    thread, found = threading.get_ident(), list[Any]()

    def hook(called: Any, *_: Any) -> None:
        if threading.get_ident() == thread:
            found.append(called)

    handle = register(hook)
    try:
        yield found
    finally:
        handle.remove()


@contextlib.contextmanager
def replicas_refused(binding: Any) -> Iterator[None]:
    """Let no graph serve a binding's calls if the run in here calls a `DistributedDataParallel`, whatever holds it.

    Autograd itself reduces its gradients between ranks. A capture that failed would leave that half done, and the next
    forward of the module would raise.
    """
    with noted_calls(register_module_forward_pre_hook) as called:
        try:
            yield
        finally:
            if any(isinstance(module, DistributedDataParallel) for module in called):
                binding.refuse(CannotBind(Reason.UNTRAINABLE, _REPLICA))


def leaves_reached(outputs: Iterable[Tensor]) -> list[Tensor]:
    """List the leaves that the histories of outputs end in, each once; an output may be one itself."""
    wanting = [output for output in outputs if output.requires_grad]
    found = {id(output): output for output in wanting if output.grad_fn is None}
    left: list[Any] = [output.grad_fn for output in wanting if output.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return list(found.values())


def set_up_backwards(device: GraphDevice) -> None:
    """Let cuBLAS have its workspaces for the thread that will run the backward on the capture stream."""
    with device.on_capture_stream(), torch.enable_grad():
        scratch = torch.zeros(1, device=device.torch_device, requires_grad=True)
        result = scratch.clone()
        result.register_hook(lambda _: device.keep_workspaces())  # type: ignore[no-untyped-call]  # in that thread
        torch.autograd.grad(result, scratch)


class Gradients:
    """The gradients of some parameters.

    A gradient that a graph makes lies in the graphs' pool: it is handed out after each replay, and the next replay of
    another graph overwrites it. One that a graph reads at its begin, to add to it, lies at a fixed address outside of
    the pool, the same for all graphs. That is where the user's own `.grad` lies, if anything else holds it or shows
    its memory, and the step leaves it there; else memory of ours, where what `.grad` holds is copied.

    Attributes:
        parameters: those whose gradients these are.
        devices: where they are, as text.
        entry: what `.grad` of each held when `state` last looked.
        refusal: why no graph can serve the next call, if one of them is seen elsewhere as well; else empty.
    """

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.entry: list[Tensor | None] = []
        self.devices: list[str] = []
        self.refusal = ""
        self._fixed: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the parameter
        self._users: set[int] = set()  # of the parameters whose fixed address is their user's own gradient's
        self._replaced: collections.Counter[int] = collections.Counter()  # how often that was replaced by others
        self._counts: list[int] = []  # of references to what `entry` has
        self._made: set[int] = set()  # storage keys of gradients that graphs make
        self._wanting: list[bool] = []
        self._key: Hashable = ()

    def use(self, parameters: Iterable[Tensor]) -> None:
        """Follow these parameters from now on."""
        found = list({id(parameter): parameter for parameter in parameters}.values())
        if list(map(id, found)) != list(map(id, self.parameters)):
            self.parameters = found
            self.entry = []
            self._wanting = []
            self.devices = sorted({str(each.device) for each in found})
            self._fixed = {id(p): self._fixed[id(p)] for p in found if id(p) in self._fixed}

    def state(self) -> Hashable:
        """Return which parameters have a gradient, and which want one: the very same object while that stays."""
        entry, wanting = list(map(_grad, self.parameters)), list(map(_requires_grad, self.parameters))
        is_same = len(entry) == len(self.entry) and all(map(operator.is_, entry, self.entry))
        if wanting != self._wanting or not is_same:
            self.entry, self._wanting = entry, wanting
            key = tuple(wanting), tuple(gradient is not None for gradient in entry), self._find_replaced()
            self._key = self._key if key == self._key else key
        return self._key

    def _find_replaced(self) -> tuple[int, ...]:
        """Let go of the user's gradients that were replaced, refuse those that others hold; count the replaced."""
        self.refusal = ""
        self._counts = list(map(sys.getrefcount, self.entry))
        for index, parameter in enumerate(self.parameters):
            known, gradient = self._fixed.get(id(parameter)), self.entry[index]
            if known is None or gradient is None or shows_the_same(gradient, known[1]):
                continue
            if id(parameter) in self._users:
                self._users.remove(id(parameter))
                del self._fixed[id(parameter)]
                self._replaced[id(parameter)] += 1
            adopts = id(parameter) not in self._fixed and self._replaced[id(parameter)] < _MOST_BUFFERS
            if not adopts and self._is_held(index):
                self.refusal = _SHARED.format(tuple(parameter.shape))
        return tuple(self._replaced.values())

    def note_made(self, gradients: Iterable[Any]) -> None:
        """Note gradients that graphs make: another graph overwrites them."""
        self._made.update(storage_key(gradient) for gradient in gradients if isinstance(gradient, Tensor))

    def passed(self) -> dict[int, list[int]]:
        """Return the memory of the present gradients: indices by storage key; cuDNN makes several in one buffer."""
        found: dict[int, list[int]] = {}
        for index, gradient in enumerate(map(_grad, self.parameters)):
            if gradient is not None and gradient.layout is torch.strided:
                found.setdefault(storage_key(gradient), []).append(index)
        return found

    def fix(self, used: Iterable[int]) -> set[int]:
        """Make the tensors at fixed addresses for the gradients that graphs read; return the storage keys of all."""
        for index in used:  # a capture would make its own
            self._fixed_of(index)
        return {storage_key(tensor) for _, tensor in self._fixed.values()}

    def _fixed_of(self, index: int, *, makes: bool = True) -> Tensor:
        """Return the tensor at a fixed address for the gradient of one parameter."""
        parameter = self.parameters[index]
        known = self._fixed.get(id(parameter))
        if known is None or _kind(known[1]) != _kind(parameter):  # the parameter was converted or moved
            if not makes:
                cause = f"a parameter of shape {tuple(parameter.shape)} was converted or moved just before"
                raise CaptureError(f"capturing the step failed\n  {cause}.", cause=cause)
            gradient = parameter.grad
            if gradient is not None and known is None and self._is_users(index):
                self._users.add(id(parameter))
                self._fixed[id(parameter)] = parameter, gradient
                return gradient
            self._users.discard(id(parameter))
            with outside_modes():
                made = torch.empty_like(parameter if gradient is None else gradient, requires_grad=False)
            known = self._fixed[id(parameter)] = parameter, made
        return known[1]

    def _is_users(self, index: int) -> bool:
        """True if graphs may add to the gradient that a call found where it lies, since the step left it there."""
        parameter, gradient = self.parameters[index], self.entry[index] if index < len(self.entry) else None
        if gradient is None or gradient is not parameter.grad or gradient.requires_grad:
            return False
        plain = gradient.layout is torch.strided and _kind(gradient) == _kind(parameter)
        return plain and self._replaced[id(parameter)] < _MOST_BUFFERS and self._is_held(index)

    def _is_held(self, index: int) -> bool:
        """True if anything else held the gradient that a call found, or shows its memory, as a buffer of several."""
        gradient: Any = self.entry[index]
        if not has_address(gradient):  # a sparse one
            return False
        key = storage_key(gradient)
        if key in self._made:
            return False
        own = sum(each is not None and has_address(each) and storage_key(each) == key for each in self.entry)
        base = gradient._base
        known = own + 1 + (base is not None)  # with the storage as we read it, and what the views are of
        in_storage = _use_count(gradient.untyped_storage()._cdata) > known
        return in_storage or self._counts[index] > _HELD_ONCE or (base is not None and sys.getrefcount(base) > 2)

    def enter(self, used: Iterable[int]) -> None:
        """Let the gradients that a graph reads lie where it reads them."""
        with outside_modes():
            for index in used:
                parameter, fixed = self.parameters[index], self._fixed_of(index)
                gradient = parameter.grad
                if gradient is not None and not shows_the_same(gradient, fixed):
                    fixed.copy_(gradient)
                    parameter.grad = fixed

    def begin_capture(self, used: Iterable[int]) -> list[Tensor | None]:
        """Put those that the capture reads at their fixed address; return what to put back. Raises CaptureError."""
        before = list(map(_grad, self.parameters))
        for index in used:
            if before[index] is not None:
                self.parameters[index].grad = self._fixed_of(index, makes=False)
        return before

    def end_capture(self, before: Sequence[Tensor | None], used: Iterable[int]) -> list[Any]:
        """Take what a captured step left, where `put` is to put back what was there.

        Returns:
            By parameter: a tensor of the graph, the fixed one, None, or `KEPT`.
        """
        left: list[Any] = []
        own = set(used)
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            kept = gradient is before[index] and gradient is not None and index not in own
            left.append(KEPT if kept else gradient)
        for gradient in left:
            if isinstance(gradient, Tensor) and (gradient.layout is not torch.strided or gradient.requires_grad):
                cause = "a gradient is sparse" if gradient.layout is not torch.strided else "a gradient requires grad"
                raise CaptureError(f"capturing the step failed\n  {cause}, which no graph can hand out.", cause=cause)
        return left

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Set every `.grad`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient


def shows_the_same(gradient: Tensor, other: Tensor) -> bool:
    """True if two gradients are one, or show the same memory in the same way; a sparse one shows none."""
    return gradient is other or (has_address(gradient) and lies_at(gradient) == lies_at(other))


def _references() -> int:
    """Count the references to a gradient that only its parameter and a list hold, which depends on torch."""
    parameter = torch.zeros(1)
    parameter.grad = torch.zeros(1)
    return next(map(sys.getrefcount, [parameter.grad]))


_HELD_ONCE = _references()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape
