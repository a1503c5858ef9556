"""Calls of one module that are refused: what is remembered of them, and when the module is looked at again."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.context import CallContext
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Call, CallLayout, plan_key
from simplegraph.call.inputs import PLAIN_TENSORS, ConstantArg, aliasable, aliases
from simplegraph.call.signature import CallReader
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.plain_state import PlainState

_grad_enabled = torch.is_grad_enabled  # looked up once
# Reasons that depend only on the module's mode and classes and shapes of arguments, before a call's signature is read.
_BY_FORM = frozenset(
    {
        *(Reason.OPAQUE_ARGUMENT, Reason.BATCH_TOO_LARGE, Reason.SIZE_NOT_CAPTURED, Reason.EMPTY_BATCH),
        *(Reason.AMBIGUOUS_BATCH_DIM, Reason.BATCH_MISMATCH, Reason.TRAINING),
    }
)
_MAX_FORMS = 64
_SURE = 16  # refused calls before the first that runs without a look at the module
_MAX_CALLS_UNCHECKED = 31  # the most such calls in a row


@dataclasses.dataclass(eq=False)
class Refusals:
    """Remembers which calls of a module are refused.

    Attributes:
        plain: reads the plain values of calls.
        reader: reads the module's calls; None before the first is read.
        forms: refusals of calls before they are read, by the form of these calls.
        unchecked: the refusal of calls that run eagerly without a look at the module, and their layout if they have
            one; None at most times.
        calls_unchecked: the number of calls that may follow without a look at the module.
    """

    plain: PlainState
    reader: CallReader | None = None
    forms: dict[Hashable, FormRefusal] = dataclasses.field(default_factory=dict)
    unchecked: tuple[Refusal | FormRefusal, CallLayout | None] | None = None
    calls_unchecked: int = 0

    def check(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call, before it is read, if calls of its form are refused. Raises CannotBind."""
        refusal = self._of_form(module, args, kwargs)
        if refusal is not None:
            self.note(refusal)
            raise CannotBind(*refusal.why)

    def _num_observed(self) -> int:
        """Return the number of observed runs: a further one may end a refusal."""
        return 0 if self.reader is None else self.reader.num_observed

    def _of_form(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FormRefusal | None:
        """Find the refusal of calls of this form; None if there is none, or what was refused may have changed."""
        refusal = self.forms.get(_form(module, args, kwargs))
        if refusal is None or refusal.num_observed != self._num_observed():
            return None
        return refusal if not refusal.wanting or _first_wants_grad(module) else None

    def remember(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: CannotBind) -> None:
        """Remember why a call was refused before it was read, if all such calls are."""
        wanting = why.reason is Reason.GRAD and not why.detail and _first_wants_grad(module)
        if why.reason in _BY_FORM or wanting:
            if len(self.forms) >= _MAX_FORMS:
                self.forms.clear()
            refusal = FormRefusal((why.reason, why.detail, why.size), self._num_observed(), wanting)
            self.forms[_form(module, args, kwargs)] = refusal

    def note(self, refusal: Refusal | FormRefusal, layout: CallLayout | None = None) -> None:
        """Note that a call was refused again: after some, the next few such calls run without a look at the module.

        Eager's answer is right whatever changed, and looking at what each run changes takes longer than small runs do.
        What ends the refusal is noticed by the next look. Calls that are refused by their form need none.
        """
        refusal.served += 1
        if refusal.served > _SURE:
            self.unchecked, self.calls_unchecked = (refusal, layout), min(refusal.served - _SURE, _MAX_CALLS_UNCHECKED)

    def refuse_unchecked(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: CallContext | None,
    ) -> CannotBind | None:
        """Return why a call runs eagerly, without a look at the module; None if it has to be looked at."""
        unchecked, self.unchecked = self.unchecked, None
        if unchecked is None:
            return None
        refusal, layout = unchecked
        self.calls_unchecked -= 1
        try:
            if self.plain.filled_by_others():
                return None
            if isinstance(refusal, FormRefusal):  # whatever ends it shows in the form
                if context is None and self._of_form(module, args, kwargs) is refusal:
                    raise CannotBind(*refusal.why)
            elif layout is not None and self.calls_unchecked >= 0:
                leaves: Any = args if layout.positional == len(args) and not kwargs else layout.leaves(args, kwargs)
                size, is_such = layout.batch_size(leaves), module.training is layout.training
                if is_such and layout.plans.get(plan_key(size, context)) is refusal:
                    refusal.bind(leaves)
        except CannotBind as error:
            self.unchecked = unchecked
            return error
        except Exception:  # a call of another kind, such as without a tensor where these have one, is read as all are
            return None
        return None


@dataclasses.dataclass
class FormRefusal:
    """Refuses calls of a form before they are read, until the module's reader learns something new.

    Attributes:
        why: the arguments of `CannotBind`.
        num_observed: the reader's `num_observed` when the call was refused.
        wanting: True if the reason is that the module's first parameter requires gradients.
        served: calls that it refused.
    """

    why: tuple[Any, ...]
    num_observed: int
    wanting: bool
    served: int = 0


class Refusal:
    """Takes the place of a plan, and refuses such calls until the module's reader learns something new.

    Args:
        call: one of these calls; why: why they run eagerly.
        reader: counts the observed runs of the module.

    Attributes:
        served: calls that it refused.
        calls_to_check_first: see `Plan`.
    """

    calls_to_check_first = -1

    def __init__(self, call: Call, why: CannotBind, reader: CallReader) -> None:
        self.served = 0
        self._why = why.reason, why.detail, call.batch
        self._reader, self._num_observed = reader, reader.num_observed
        self._grad, self._parameter = _grad_enabled(), _first_parameter(call.module)
        self._expected = list(zip(call.layout.args, map(_form_of, call.leaves), strict=True))
        self._tensors = aliasable(call.layout.args)
        self._aliases = aliases([call.leaves[at] for at in self._tensors])

    def bind(self, leaves: Sequence[Any]) -> None:
        """Refuse a call with these leaves if it is such a call; see `Plan.bind`. Raises CannotBind."""
        if self._reader.num_observed != self._num_observed or _grad_enabled() is not self._grad:
            return
        if self._grad:  # eager builds an autograd graph if an argument or the first parameter requires grad
            wanting = any(issubclass(type(leaf), Tensor) and leaf.requires_grad for leaf in leaves)
            if wanting or (self._parameter is not None and _wants_grad(*self._parameter)):
                return
        try:
            for leaf, (arg, form) in zip(leaves, self._expected, strict=True):
                if isinstance(arg, ConstantArg):
                    if not arg.holds(leaf):
                        return
                elif _form_of(leaf) != form or (arg.address is not None and leaf.data_ptr() != arg.address):
                    return
            if len(self._tensors) > 1 and aliases([leaves[at] for at in self._tensors]) != self._aliases:
                return
        except RuntimeError:  # tensors inside `vmap` have no address
            return
        raise CannotBind(*self._why)


def _wants_grad(owner: weakref.ref[nn.Module], name: str) -> bool:
    """True if the parameter of this name requires grad, or its module is gone."""
    module = owner()
    if module is None:
        return True
    registry = module._parameters  # of a TorchScript module, no dict
    return name in registry and bool(getattr(registry[name], "requires_grad", False))


def _first_parameter(module: nn.Module) -> tuple[weakref.ref[nn.Module], str] | None:
    """Find the first parameter of a module: a weak reference to the module that holds it, and its name."""
    named = ((child, name, value) for child in module.modules() for name, value in child._parameters.items())
    return next(((weakref.ref(child), name) for child, name, value in named if value is not None), None)


def _first_wants_grad(module: nn.Module) -> bool:
    """True if the first parameter that a module has now requires grad."""
    if isinstance(module, FunctionModule):
        module.refresh()
    first = _first_parameter(module)
    return first is not None and _wants_grad(*first)


def _form(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Return the form of a call: modes, classes of arguments, and dtype, shape, strides and device of tensors."""
    leaves: Sequence[Any] = args
    spec: Hashable = len(args)
    if kwargs or not PLAIN_TENSORS.issuperset(map(type, args)):
        leaves, spec = flatten((args, dict(kwargs)))
    return _grad_enabled(), module.training, spec, tuple(map(_form_of, leaves))


def _form_of(leaf: Any) -> Any:
    """Return the form of a leaf; containers that are leaves are distinguished by identity: anything may be inside."""
    kind = type(leaf)
    if kind in PLAIN_TENSORS:
        sized = leaf.layout is torch.strided and not leaf.is_nested
        return (kind, leaf.dtype, leaf.shape, leaf.stride(), leaf.device) if sized else (leaf.layout, leaf.is_nested)
    return (kind, id(leaf)) if issubclass(kind, (tuple, list, dict)) else kind
