"""The known calls of a module: layouts, signatures, Python state that is part of the key, and why some run eagerly."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import InputError
from simplegraph.base.extras import StateKey, state_key_of
from simplegraph.base.modes import autocast_dtype
from simplegraph.base.nested import TreeSpec
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.args import PLAIN_TENSORS, ConstantArg, known_arguments
from simplegraph.call.call import Binding, Call, CallLayout
from simplegraph.call.signature import CallReader
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.torch_state import TorchSettings, function_modes

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
_MAX_LAYOUTS = 16  # per signature: keywords come in any order


class KnownCalls:
    """The layouts and signatures of one module's calls.

    Args:
        config: how arguments are read, and how many signatures there may be.

    Attributes:
        outdated: True if there are as many signatures as may be, and some belong to a state that is over.
        bindings: by the values of their signatures.
        layouts: the ways of passing arguments of all signatures, the latest first.
        state_key: reads the module's Python state that is part of the key; None if there is none.
    """

    def __init__(self, config: CudaGraphConfig) -> None:
        self._config = config
        self.bindings: dict[Hashable, Binding] = {}
        self.layouts: list[CallLayout] = []
        self.outdated = False
        self.state_key = config.state_key
        self._reader: CallReader | None = None
        # By the form of calls that were refused before they were read: why, what was learnt by then, and the parameter
        # that wanted gradients, if that was why.
        self._refused: dict[Hashable, tuple[tuple[Any, ...], int, tuple[Mapping[str, Any], str] | None]] = {}

    def reader(self, module: Any) -> CallReader:
        """Return what names the leaves of the module's calls."""
        if self._reader is None:
            self._reader = CallReader(module.forward, self._config, known_arguments(module))
        return self._reader

    def read(
        self,
        module: Any,
        leaves: list[Any],
        names: Sequence[str],
        spec: TreeSpec,
        device: torch.device,
        gradients: Hashable = None,
    ) -> tuple[int, CallLayout]:
        """Find the batch size and the layout of a call on a device; a new layout is kept once it is in `use`.

        `gradients` tells apart what wants gradients, where graphs make them.

        Raises:
            CannotBind: a graph cannot serve the call.
            InputError: an argument, or what `state_key` returned, cannot be a key.
        """
        autocast, settings, modes = autocast_dtype(device.type), TorchSettings(), function_modes()
        context = autocast, self._state_of(module), settings, modes, gradients
        size, args, signature = self.reader(module).read(leaves, names, spec, context, device)
        binding = self.bindings.get(signature.values) or Binding(signature)
        layout = binding.layouts.get(spec)
        if layout is None:
            layout = CallLayout(spec, args, device.type, binding, module.training)
        if isinstance(module, FunctionModule):
            module.serve(layout.binding)
            full = self.is_full(layout)
            self.outdated = full and any(module.is_over(each.signature.context) for each in self.bindings.values())
        return size, layout

    def is_full(self, layout: CallLayout) -> bool:
        """True if the layout would be of one signature too many."""
        return layout.binding not in self.bindings.values() and len(self.bindings) >= self._config.max_signatures

    def use(self, layout: CallLayout) -> None:
        """Keep a layout, and note that it is the latest."""
        known = layout.binding.layouts
        self.bindings[layout.binding.signature.values] = layout.binding
        known.pop(layout.spec, None)  # the latest comes last
        known[layout.spec] = layout
        while len(known) > _MAX_LAYOUTS:
            del known[next(iter(known))]  # its plan is made again when such a call comes
        self.put_first(layout)

    def put_first(self, layout: CallLayout) -> None:
        """Note that a layout is the latest; in a new list, since other threads may walk the one before."""
        kept = (each for each in self.layouts if each.binding.layouts.get(each.spec) is each)
        self.layouts = [layout, *(each for each in kept if each is not layout)]

    def _state_of(self, module: Any) -> Hashable:
        """Read the Python state that is part of the key: as declared, or else as extras know it, and a function's."""
        key = known = self._config.state_key or state_key_of(module)
        if isinstance(module, FunctionModule):
            module.resolve()
            key = _reached_state if known is None else lambda called: (_reached_state(called), known(called))
        self.state_key = key
        state = None if key is None else key(module)
        try:
            hash(state)
        except TypeError:
            raise InputError(
                f"state_key returned {state!r}, which cannot be hashed, so states could not be told apart. "
                "Return numbers, strings, or tuples of them."
            ) from None
        return state

    def check_form(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call of a form that is known to be refused, unread. Raises CannotBind."""
        if not self._refused or (known := self._refused.get(_form(args, kwargs))) is None:
            return
        why, lessons, wanting = known
        if lessons == self.reader(module).lessons and (wanting is None or _wants_grad(*wanting)):
            raise CannotBind(*why)

    def refuse_form(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: CannotBind) -> None:
        """Remember why a call was refused unread, if such calls always are."""
        wanting = _first_parameter(module) if why.reason is Reason.GRAD and not why.detail else None
        if why.reason in _BY_FORM or (wanting is not None and _wants_grad(*wanting)):
            if len(self._refused) >= _MOST_FORMS:
                self._refused.clear()
            known = (why.reason, why.detail, why.size), self.reader(module).lessons, wanting
            self._refused[_form(args, kwargs)] = known

    def drop_plans(self) -> None:
        """Forget how calls are replayed and which sizes are warm; what calls look like is kept."""
        for layout in self.layouts:
            layout.plans.clear()
        for binding in self.bindings.values():
            binding.warm.clear()
            binding.ran.clear()
            binding.numbers.clear()  # what went stale may have held some
            binding.counted.clear()  # it may be another object by now, or other code

    def clear(self) -> None:
        """Forget all layouts and signatures."""
        self.drop_plans()
        for binding in self.bindings.values():
            binding.layouts.clear()  # they refer to it: static inputs would wait for a garbage collection
        self.bindings.clear()
        self.layouts = []


# No method of the module itself: what refers to the module and is referred to by it is freed by the collector, late.
_reached_state: StateKey = operator.methodcaller("state")


class Refusal:
    """Stands where the plan of such calls would, and refuses them, for as long as nothing more is learnt.

    Args:
        call: one of these calls; why: why they run eagerly.
        reader: counts what is learnt of the module.
    """

    def __init__(self, call: Call, why: CannotBind, reader: CallReader) -> None:
        self._why = why.reason, why.detail, call.batch
        self._reader, self._lessons = reader, reader.lessons
        self._read_with_grad = _grad_enabled()
        self._parameter = _first_parameter(call.module) if self._read_with_grad else None
        self._expected = list(zip(call.layout.args, map(_form_of, call.leaves), strict=True))

    def bind(self, leaves: Sequence[Any]) -> None:
        """Refuse a call with these leaves if it is such a call; see `Plan.bind`. Raises CannotBind."""
        if self._reader.lessons != self._lessons or (_grad_enabled() and not self._wants_no_grad(leaves)):
            return
        for leaf, (arg, form) in zip(leaves, self._expected, strict=True):
            if isinstance(arg, ConstantArg):
                if not arg.holds(leaf):
                    return
            elif _form_of(leaf) != form or arg.address not in (None, leaf.data_ptr()):
                return
        raise CannotBind(*self._why)

    def _wants_no_grad(self, leaves: Sequence[Any]) -> bool:
        """True if eager builds no autograd graph, as far as arguments and the first parameter tell."""
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return False
        return self._read_with_grad and (self._parameter is None or not _wants_grad(*self._parameter))


def _wants_grad(held: Mapping[str, Any], name: str) -> bool:
    """True if what a module holds by this name requires grad."""
    return bool(getattr(held.get(name), "requires_grad", False))


def _first_parameter(module: nn.Module) -> tuple[Mapping[str, Any], str] | None:
    """Find the first parameter of a module: the dict that holds it, and its name."""
    registries = ((child._parameters, name) for child in module.modules() for name in child._parameters)
    return next(((held, name) for held, name in registries if held[name] is not None), None)


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Describe a call by the grad mode, and by classes of arguments; tensors by dtype, shape, strides and device."""
    return _grad_enabled(), tuple(map(_form_of, (*args, *kwargs.values()))), tuple(kwargs)


def _form_of(leaf: Any) -> Any:
    """Describe an argument; containers are told apart by what they are, since anything may be inside."""
    if leaf.__class__ in PLAIN_TENSORS:
        sized = leaf.layout is torch.strided and not leaf.is_nested
        return (leaf.dtype, leaf.shape, leaf.stride(), leaf.get_device()) if sized else (leaf.layout, leaf.is_nested)
    return (leaf.__class__, id(leaf)) if isinstance(leaf, (tuple, list, dict)) else leaf.__class__
