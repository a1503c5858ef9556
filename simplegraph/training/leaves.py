"""The tensors below a module that gradients flow to, and what stands in for them in a capture."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.inputs import PLAIN_TENSORS
from simplegraph.device.protocol import GraphDevice
from simplegraph.guard.survey import Survey
from simplegraph.guard.torch_state import GLOBAL_BACKWARD_HOOKS, GLOBAL_BACKWARD_PRE_HOOKS
from simplegraph.training.notes import noted_calls

requires_grad = operator.attrgetter("requires_grad")
_REPLICA = (
    "DistributedDataParallel reduces gradients between ranks by hooks that no replay runs; "
    "wrap the module in it: DistributedDataParallel(wrap(module, training=True))"
)


class Leaves:
    """Lists the tensors that a module holds and that may want gradients, each once.

    Attributes:
        tensors: these; names: their names, dotted from the module.
    """

    def __init__(self, module: nn.Module) -> None:
        survey = Survey(module)
        self._places = list(_places(survey))
        self._recurrent = [module for module in survey.modules.values() if isinstance(module, nn.RNNBase)]
        held = {id(tensor): (name, tensor) for name, _, _, tensor in reversed(self._places)}
        self.names = [name for name, _ in held.values()]
        self.tensors = [tensor for _, tensor in held.values()]

    @property
    def wanting_names(self) -> tuple[str, ...]:
        """Name those that want gradients now."""
        return tuple(name for name, tensor in zip(self.names, self.tensors, strict=True) if tensor.requires_grad)

    def wanting(self) -> list[Tensor]:
        """List those that want gradients now."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def name_of(self, tensor: Tensor) -> str:
        """Name one of them."""
        return next((name for name, each in zip(self.names, self.tensors, strict=True) if each is tensor), "a tensor")

    @contextlib.contextmanager
    def replaced(self, stand_ins: StandIns) -> Iterator[None]:
        """Let the module hold the stand-ins in here, wherever it holds what they stand for."""
        places: list[tuple[Any, Any, Any, Any]] = [
            (holder, key, held, stand_ins.of(held)) for _, holder, key, held in self._places
        ]
        places += [entry for module in self._recurrent for entry in _flat_lists(module, stand_ins)]
        swapped = [entry for entry in places if entry[3] is not None and entry[0][entry[1]] is entry[2]]
        try:
            for holder, key, _, other in swapped:
                _set(holder, key, other)
            yield
        finally:
            for holder, key, held, other in swapped:
                if holder[key] is other:
                    _set(holder, key, held)


class StandIns:
    """Leaves of an autograd graph of their own, in the memory of others.

    A capture's backward must not run the hooks of the user's leaves, nor meet the nodes that add to their gradients:
    those may belong to another stream.

    Args:
        tensors: leaves that want gradients.

    Raises:
        CannotBind: one cannot be stood in for.
    """

    def __init__(self, leaves: Leaves, tensors: Iterable[Tensor]) -> None:
        self._others: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}
        for tensor in tensors:
            if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
                kind = type(tensor).__name__ if type(tensor) not in PLAIN_TENSORS else str(tensor.layout)
                raise CannotBind(Reason.UNTRAINABLE, f"{leaves.name_of(tensor)} is a {kind}")
            if not tensor.is_leaf:
                continue  # if the forward reads it, its history shows
            other = tensor.detach()
            other = nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other.requires_grad_()
            vars(other).update(vars(tensor))
            self._others[id(tensor)], self._originals[id(other)] = other, tensor

    @property
    def originals(self) -> list[Tensor]:
        """List what they stand for."""
        return list(self._originals.values())

    @property
    def tensors(self) -> list[Tensor]:
        """List them, in the order of `originals`."""
        return list(self._others.values())

    def of(self, tensor: Any) -> Tensor | None:
        """Return what stands for a tensor; None if nothing does."""
        return self._others.get(id(tensor))

    def original(self, tensor: Any) -> Tensor | None:
        """Return what a stand-in stands for; None for any other tensor."""
        return self._originals.get(id(tensor))

    def moved(self) -> Tensor | None:
        """Find one that the forward gave other memory."""
        pairs = zip(self.originals, self.tensors, strict=True)
        return next((tensor for tensor, other in pairs if tensor.data_ptr() != other.data_ptr()), None)


def _places(survey: Survey) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield (name, holder, key, tensor) of every place that holds a tensor which may want gradients."""
    for name, module in survey.modules.items():
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None and _may_want(tensor):
                    yield f"{name}.{key}".lstrip("."), holder, key, tensor
    for each in survey.tensors.values():
        if each.links and _may_want(each.tensor):
            holder, key, _ = each.links[-1]
            yield each.name, holder, key, each.tensor


def _flat_lists(module: nn.RNNBase, stand_ins: StandIns) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield (holder, key, value, value with stand-ins) of the lists in which torch keeps recurrent weights for cuDNN.

    A forward that finds other weights than these would copy all of them to a new buffer.
    """
    own = vars(module)
    held = own.get("_flat_weights")
    if held is not None and "_flat_weight_refs" in own:
        others = [weight if stand_ins.of(weight) is None else stand_ins.of(weight) for weight in held]
        yield own, "_flat_weights", held, others
        refs = [None if weight is None else weakref.ref(weight) for weight in others]
        yield own, "_flat_weight_refs", own["_flat_weight_refs"], refs


def _may_want(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _set(holder: Any, key: Any, value: Tensor) -> None:
    """Set an item by the container's own method, whatever a class of the user's makes of it."""
    if isinstance(holder, dict):
        dict.__setitem__(holder, key, value)
    elif isinstance(holder, list):
        list.__setitem__(holder, key, value)  # a tuple keeps what it has, and the autograd graph shows it


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


# Private to torch; where it is absent, such calls are replayed, and keep their memory.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


def hooks_around() -> bool:
    """True if torch runs Python in all backwards now."""
    return bool(GLOBAL_BACKWARD_HOOKS or GLOBAL_BACKWARD_PRE_HOOKS) or saved_tensors_hooks(False) is not None


def refuse_hooks(module: nn.Module) -> None:
    """Refuse a module whose backward runs Python that a replay would not. Raises CannotBind."""
    if saved_tensors_hooks(False) is not None:
        raise CannotBind(Reason.HOOKS, "saved-tensor hooks around the call, as of activation checkpoints")
    if GLOBAL_BACKWARD_HOOKS or GLOBAL_BACKWARD_PRE_HOOKS:
        raise CannotBind(Reason.HOOKS, "backward hooks on all modules")
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise CannotBind(Reason.HOOKS, f"full backward hooks on {name or 'the module'}")


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
                binding.unsupported = CannotBind(Reason.UNTRAINABLE, _REPLICA)


class HookWatch(torch.overrides.TorchFunctionMode):
    """Notices hooks that a forward registers on its own tensors: a replay would not call them.

    Attributes:
        found: the method that it called; None if none.
    """

    _METHODS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
    found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.__name__ in self._METHODS:
            self.found = f"Tensor.{func.__name__}"
        return func(*args, **(kwargs or {}))


def set_up_backwards(device: GraphDevice) -> None:
    """Let cuBLAS have its workspaces for the thread that will run the backward on the capture stream."""
    with device.on_capture_stream(), torch.enable_grad():
        scratch = torch.zeros(1, device=device.torch_device, requires_grad=True)
        result = scratch.clone()
        result.register_hook(lambda _: device.keep_workspaces())  # type: ignore[no-untyped-call]  # in that thread
        torch.autograd.grad(result, scratch)
