"""Notices changes to arguments beside written values: a replay does not run the Python that makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.modes import outside_modes
from simplegraph.base.nested import containers, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import has_address, lies_at
from simplegraph.call.args import PLAIN_TENSORS
from simplegraph.call.call import Call, invoke, is_copied
from simplegraph.call.signature import CallReader


def invoke_watched(
    call: Call, reader: CallReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int = 0
) -> Any:
    """Run the call's module on these arguments, and note if it does to them what no replay can, or writes to them.

    Args:
        call: what is called.
        reader: names its arguments.
        args: these.
        kwargs: these.
        limit: bytes of arguments that may be copied, to find what kernels write that torch does not dispatch.
    """
    arguments = _Arguments(args, kwargs, reader)
    copies = arguments.copied(call, limit)
    result = invoke(call.module, args, kwargs)
    with outside_modes():
        for name, view, nbytes, copy in copies:
            if view.untyped_storage().nbytes() != nbytes or not torch.equal(_bits(view), copy):
                call.binding.written.add(name)
            call.binding.compared.add(name)
    call.binding.unsupported = arguments.effect(result) or call.binding.unsupported
    return result


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor's elements as bytes; they are copied where they do not lie in a row."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # One element lies in a row whatever its stride is, but torch views only a stride of 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Arguments:
    """The arguments of one run of a forward, as they were before it.

    Args:
        args, kwargs: what the forward is called with.
        reader: names the leaves.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reader: CallReader) -> None:
        self._value = args, dict(kwargs)
        self._names = reader.names
        self._leaves, self._spec = flatten(self._value)
        self._containers = containers(self._value)
        self._looks = [_look(leaf) for leaf in self._leaves]

    def copied(self, call: Call, limit: int) -> list[tuple[str, Tensor, int, Tensor]]:
        """Copy what tensors hold, small ones first: a name, the tensor, its memory's size and a copy each."""
        left = {arg.name for arg in call.layout.args if is_copied(arg)} - call.binding.written
        leaves = zip(self._names(self._spec), self._leaves, strict=True) if limit else ()
        copies = []
        with outside_modes():  # who observes the run does not see this
            tensors = [(name, leaf.detach()) for name, leaf in leaves if name in left and type(leaf) in PLAIN_TENSORS]
            for name, view in sorted(tensors, key=lambda entry: entry[1].nbytes):
                limit -= view.nbytes
                if limit < 0:
                    break
                copies.append((name, view, view.untyped_storage().nbytes(), _bits(view).clone()))
        return copies

    def effect(self, result: Any) -> CannotBind | None:
        """Say what the forward did that a replay cannot; `result` is what it returned."""
        leaves, spec = flatten(self._value)
        if spec != self._spec:
            before = self._names(self._spec)
            return _changed(sorted(set(before) ^ set(self._names(spec))) or before)
        pairs = enumerate(zip(self._leaves, leaves, self._looks, strict=True))
        changed = [at for at, (then, now, look) in pairs if then is not now or _look(now) != look]
        held = containers(self._value)
        if not changed and any(then is not now for then, now in zip(self._containers, held, strict=True)):
            changed = list(range(len(leaves)))
        if changed:
            names = self._names(spec)
            return _changed([names[at] for at in changed])
        own = {id(container) for container in self._containers}
        found = next((container for container in containers(result) if id(container) in own), None)
        if found is not None:
            kind = type(found).__name__
            return CannotBind(Reason.UNSUPPORTED_OUTPUT, f"a {kind} that the forward was passed; return a new one")
        return None


def _changed(names: Sequence[str]) -> CannotBind:
    return CannotBind(Reason.CHANGED_ARGUMENTS, ", ".join(names[:5]))


def _look(leaf: Any) -> Any:
    """Describe everything about a tensor that Python can change, but for its values."""
    if not isinstance(leaf, Tensor) or not has_address(leaf):
        return None
    return lies_at(leaf), leaf.requires_grad, {key: id(value) for key, value in vars(leaf).items()}
