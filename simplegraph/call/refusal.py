"""Remembers why calls of one form run eagerly, so that such a call costs a look-up and the module's own forward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import memory_order
from simplegraph.call.args import PLAIN_TENSORS, ConstantArg
from simplegraph.call.call import Call
from simplegraph.call.known import KnownCalls
from simplegraph.call.signature import CallReader

_grad_enabled = torch.is_grad_enabled  # looked up once
# They stay while nothing more is learnt of the module: no reason that is about the memory of one call.
LASTING = frozenset(
    {
        *(Reason.CAPTURE_FAILED, Reason.NOT_CAPTURED_UPFRONT, Reason.UNSUPPORTED_OUTPUT, Reason.CHANGED_ARGUMENTS),
        *(Reason.OUTPUT_SHAPE_UNKNOWN, Reason.BATCH_DIM_UNCONFIRMED, Reason.PADDING_SHOWS, Reason.SIZE_NOT_CAPTURED),
        Reason.PYTHON_STATE,
    }
)
# The classes and shapes of arguments alone decide these, before a call is read as one of a signature.
_BY_FORM = frozenset(
    {
        *(Reason.OPAQUE_ARGUMENT, Reason.BATCH_TOO_LARGE, Reason.SIZE_NOT_CAPTURED, Reason.EMPTY_BATCH),
        *(Reason.AMBIGUOUS_BATCH_DIM, Reason.BATCH_MISMATCH),
    }
)
_MOST_FORMS = 64


class Refusal:
    """Holds the reason for which no graph serves calls like one, for as long as nothing more is learnt.

    Args:
        call: one of these calls; why: why they run eagerly.
        reader: counts what is learnt of the module.

    Attributes:
        why: reason, detail and size.
    """

    def __init__(self, call: Call, why: CannotBind, reader: CallReader) -> None:
        self.why = why.reason, why.detail, call.batch
        self._reader, self._lessons = reader, reader.lessons
        self._read_with_grad = _grad_enabled()
        self._parameter = _first_parameter(call.module) if self._read_with_grad else None
        pairs = zip(call.leaves, call.layout.args, strict=True)
        self._expected: list[tuple[Any, Any, Any]] = [
            (arg, None, None) if isinstance(arg, ConstantArg) else (arg, _form_of(leaf), leaf.stride())
            for leaf, arg in pairs
        ]

    def holds(self, leaves: Sequence[Any]) -> bool:
        """True if a call with these leaves is such a call."""
        if self._reader.lessons != self._lessons or (_grad_enabled() and not self._wants_no_grad(leaves)):
            return False
        for leaf, (arg, form, stride) in zip(leaves, self._expected, strict=True):
            if form is None:
                if not arg.holds(leaf):
                    return False
            elif (
                _form_of(leaf) != form
                or arg.address not in (None, leaf.data_ptr())
                or (leaf.stride() != stride and memory_order(leaf) != arg.order)
            ):
                return False
        return True

    def _wants_no_grad(self, leaves: Sequence[Any]) -> bool:
        """True if eager builds no autograd graph, as far as arguments and the first parameter tell."""
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return False
        return self._read_with_grad and (self._parameter is None or not wants_grad(*self._parameter))


class RefusedForms:
    """Remembers why calls of a form were refused before they were read, by classes and shapes of their arguments."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Any, ...], CallReader, int]] = {}
        self._wanting: tuple[Mapping[str, Any], str] | None = None

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call of a known form. Raises CannotBind."""
        if _grad_enabled():
            if self._wanting is not None and wants_grad(*self._wanting):
                raise CannotBind(Reason.GRAD, "")
        elif self._known and (known := self._known.get(_form(args, kwargs))) is not None:
            why, reader, lessons = known
            if reader.lessons == lessons:
                raise CannotBind(*why)

    def learn(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: CannotBind, known: KnownCalls
    ) -> None:
        """Remember why a call was refused, if such calls always are."""
        if why.reason is Reason.GRAD and not why.detail:
            first = _first_parameter(module)
            self._wanting = first if first is not None and wants_grad(*first) else None
        elif why.reason in _BY_FORM and not _grad_enabled():
            if len(self._known) >= _MOST_FORMS:
                self._known.clear()
            reader = known.reader(module)
            self._known[_form(args, kwargs)] = (why.reason, why.detail, why.size), reader, reader.lessons


def wants_grad(held: Mapping[str, Any], name: str) -> bool:
    """True if what a module holds by this name requires grad."""
    return bool(getattr(held.get(name), "requires_grad", False))


def _first_parameter(module: nn.Module) -> tuple[Mapping[str, Any], str] | None:
    """Find the first parameter of a module: the dict that holds it, and its name."""
    registries = ((child._parameters, name) for child in module.modules() for name in child._parameters)
    return next(((held, name) for held, name in registries if held[name] is not None), None)


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Describe arguments by their classes, and tensors among them by dtype, shape and device."""
    return tuple(map(_form_of, (*args, *kwargs.values()))), tuple(kwargs)


def _form_of(leaf: Any) -> Any:
    """Describe an argument; containers are told apart by what they are, since anything may be inside."""
    if leaf.__class__ in PLAIN_TENSORS:
        sized = leaf.layout is torch.strided and not leaf.is_nested
        return (leaf.dtype, leaf.shape, leaf.get_device()) if sized else (leaf.layout, leaf.is_nested)
    return (leaf.__class__, id(leaf)) if isinstance(leaf, (tuple, list, dict)) else leaf.__class__
