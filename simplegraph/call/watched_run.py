"""Run a call's module, and note or refuse the changes that the run makes to its arguments and to gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.modes import outside_modes
from simplegraph.base.nested import containers, flatten, library_remedy
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import gradient_of, has_address, lies_at
from simplegraph.call.call import Call, is_copied
from simplegraph.call.entries import as_dicts, states_of, written_mappings
from simplegraph.call.inputs import PLAIN_TENSORS
from simplegraph.call.signature import CallReader


def invoke_watched(
    call: Call,
    reader: CallReader,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    limit: int = 0,
    *,
    recorded: bool = False,
) -> Any:
    """Run a call's module; note the arguments that it writes, and refuse changes that a replay would not make.

    Calls that set `.grad` of the module's tensors are refused, too.

    Args:
        call: the call.
        reader: names its arguments.
        args: positional arguments.
        kwargs: keyword arguments.
        limit: the most bytes of arguments to copy, to find writes by kernels that torch does not dispatch.
        recorded: True if the run is a recording, whose gradients are undefined afterwards.
    """
    arguments = _Arguments(args, kwargs, reader)
    copies = arguments.copied(call, limit)
    with _gradients_kept(call, put_back=recorded):
        result = call.run(args, kwargs)
    with outside_modes():
        for name, view, nbytes, copy in copies:
            if view.untyped_storage().nbytes() != nbytes or not torch.equal(_bits(view), copy):
                call.binding.written.add(name)
            call.binding.compared.add(name)
    if (effect := arguments.effect(result)) is not None:
        call.binding.refuse(effect)
    return result


@contextlib.contextmanager
def _gradients_kept(call: Call, *, put_back: bool) -> Iterator[None]:
    """Refuse graphs of calls that set gradients, except training steps; `put_back` restores the gradients."""
    is_looked_at = not call.computes_gradients and call.plain.names(_SETTING_GRADIENTS)
    held = call.survey.tensors.values() if is_looked_at else ()
    before = [(entry, gradient_of(entry.tensor)) for entry in held]
    try:
        yield
    finally:
        changed = [(entry, gradient) for entry, gradient in before if gradient_of(entry.tensor) is not gradient]
        for entry, gradient in changed if put_back else ():
            entry.tensor.grad = gradient
    if changed:
        call.binding.refuse(
            CannotBind(Reason.PYTHON_STATE, f"the gradient of {changed[0][0].name}; {_GRADIENT_REMEDY}")
        )


_SETTING_GRADIENTS = ("grad", "zero_grad", "backward")
_GRADIENT_REMEDY = (
    "write to it in place, set it outside of the call, return what torch.autograd.grad(loss, inputs) gives in place of "
    "calling backward(), or let simplegraph.train_step have the whole step"
)


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes, copied if they are not contiguous."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous with any stride, but torch views only a stride of 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Arguments:
    """The arguments of one run of a forward, saved before the run.

    Args:
        args, kwargs: the arguments of the forward.
        reader: names the leaves.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reader: CallReader) -> None:
        self._mappings = written_mappings(args, kwargs)  # their entries are outputs
        self._states = states_of(self._mappings) if self._mappings else []
        self._value = args, dict(kwargs)
        if self._mappings:
            self._value = tuple(map(as_dicts, args)), {name: as_dicts(value) for name, value in kwargs.items()}
        self._names = reader.names
        self._leaves, self._spec = flatten(self._value)
        self._containers = containers(self._value)
        self._looks = [_look(leaf) for leaf in self._leaves]

    def copied(self, call: Call, limit: int) -> list[tuple[str, Tensor, int, Tensor]]:
        """Copy the values of tensors, small tensors first; return (name, tensor, bytes of its storage, copy)."""
        names = {arg.name for arg in call.layout.args if is_copied(arg)} - call.binding.written
        leaves = zip(self._names(self._spec), self._leaves, strict=True) if limit else ()
        copies = []
        with outside_modes():  # hidden from observers of the run
            tensors = [(name, leaf.detach()) for name, leaf in leaves if name in names and type(leaf) in PLAIN_TENSORS]
            for name, view in sorted(tensors, key=lambda entry: entry[1].nbytes):
                limit -= view.nbytes
                if limit < 0:
                    break
                copies.append((name, view, view.untyped_storage().nbytes(), _bits(view).clone()))
        return copies

    def effect(self, result: Any) -> CannotBind | None:
        """Return the refusal for a change of the arguments that a replay cannot make; None if there is none.

        `result` is the result of the forward.
        """
        (leaves, spec), names = flatten(self._value), self._names(self._spec)
        if spec != self._spec:
            changed = sorted(set(names) ^ set(self._names(spec))) or names
        else:
            compared = zip(names, self._leaves, leaves, self._looks, strict=True)
            changed = [name for name, before, now, look in compared if before is not now or _look(now) != look]
            compared_containers = zip(self._containers, containers(self._value), strict=True)
            if not changed and any(before is not now for before, now in compared_containers):
                changed = names
            if not changed and self._mappings and self._states != states_of(self._mappings):
                changed = [f"what a {type(self._mappings[0]).__name__} is beside its items, such as its batch size"]
        if changed:
            return CannotBind(Reason.CHANGED_ARGUMENTS, self._remedy() or ", ".join(changed[:5]))
        passed = {id(container) for container in (*self._containers, *self._mappings)}
        returned = next((container for container in containers(result) if id(container) in passed), None)
        if returned is not None:
            kind = type(returned).__name__
            return CannotBind(Reason.UNSUPPORTED_OUTPUT, f"a {kind} that the forward was passed; return a new one")
        return None

    def _remedy(self) -> str:
        """Advise what to pass instead of a library's mapping that no graph can write; empty if there is none."""
        kinds = {type(container): library_remedy(type(container)) for container in self._containers}
        return next((remedy.format("an argument", kind.__name__) for kind, remedy in kinds.items() if remedy), "")


def _look(leaf: Any) -> Any:
    """Describe all properties of a tensor that Python code can change, except its values."""
    if not issubclass(type(leaf), Tensor) or not has_address(leaf):
        return None
    return lies_at(leaf), leaf.requires_grad, {key: id(value) for key, value in vars(leaf).items()}
