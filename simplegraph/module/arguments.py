"""Notices changes to arguments beside written values: a replay does not run the Python that makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from simplegraph.module.call import Call, invoke
from simplegraph.module.signature import CallReader
from simplegraph.module.snapshot import has_address, place
from simplegraph.nested import containers, flatten
from simplegraph.reasons import CannotBind, Reason


def invoke_watched(call: Call, reader: CallReader, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the call's module on these arguments, and note if it does to them what no replay can."""
    arguments = _Arguments(args, kwargs, reader)
    result = invoke(call.module, args, kwargs)
    call.binding.unsupported = arguments.effect(result) or call.binding.unsupported
    return result


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

    def effect(self, result: Any) -> CannotBind | None:
        """Say what the forward did that a replay cannot; `result` is what it returned."""
        leaves, spec = flatten(self._value)
        before, after = self._names(self._spec), self._names(spec)
        if spec != self._spec:
            changed = sorted(set(before) ^ set(after)) or before
        else:
            pairs = zip(before, self._leaves, leaves, self._looks, strict=True)
            changed = [name for name, then, now, look in pairs if then is not now or _look(now) != look]
        held = containers(self._value)
        if not changed and any(then is not now for then, now in zip(self._containers, held, strict=True)):
            changed = before
        if changed:
            return CannotBind(Reason.CHANGED_ARGUMENTS, ", ".join(changed[:5]))
        own = {id(container) for container in self._containers}
        found = next((container for container in containers(result) if id(container) in own), None)
        if found is not None:
            kind = type(found).__name__
            return CannotBind(Reason.UNSUPPORTED_OUTPUT, f"a {kind} that the forward was passed; return a new one")
        return None


def _look(leaf: Any) -> Any:
    """Describe everything about a tensor that Python can change, but for its values."""
    if not isinstance(leaf, Tensor) or not has_address(leaf):
        return None
    return place(leaf), leaf.requires_grad, {key: id(value) for key, value in vars(leaf).items()}
