"""The known calls of a module: their layouts, their signatures, and the Python state that is part of the key."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import InputError
from simplegraph.base.extras import StateKey, state_key_of
from simplegraph.base.modes import autocast_dtype
from simplegraph.base.nested import TreeSpec
from simplegraph.call.args import TensorArg, known_arguments
from simplegraph.call.call import Binding, CallLayout
from simplegraph.call.signature import CallReader
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.torch_state import TorchSettings, function_modes

_MAX_LAYOUTS = 16  # per signature: keywords come in any order


class KnownCalls:
    """The layouts and signatures of one module's calls.

    Args:
        config: how arguments are read, and how many signatures there may be.

    Attributes:
        outdated: True if there are as many signatures as may be, and some belong to a state that is over.
        bindings: by signature; last: the layout of the latest call.
        state_key: reads the module's Python state that is part of the key; None if there is none.
    """

    def __init__(self, config: CudaGraphConfig) -> None:
        self._config = config
        self.bindings: dict[Hashable, Binding] = {}
        self.last: CallLayout | None = None
        self.outdated = False
        self.state_key = config.state_key
        self._reader: CallReader | None = None

    @property
    def layouts(self) -> list[CallLayout]:
        """The ways of passing arguments of all signatures."""
        return [layout for binding in list(self.bindings.values()) for layout in list(binding.layouts.values())]

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
        state = self._state_of(module)
        context = autocast, state, settings, modes, gradients
        size, args, signature = self.reader(module).read(leaves, names, spec, context, device)
        binding = self.bindings.get(signature) or Binding(signature)
        layout = binding.layouts.get(spec)
        if layout is None:
            around = autocast, state, settings, modes, device.type
            layout = CallLayout(spec, args, *around, binding, module.training)
        if isinstance(module, FunctionModule):
            module.serve(layout.binding)
            full = self.is_full(layout)
            self.outdated = full and any(module.is_over(each.context) for each in self.bindings)  # type: ignore[attr-defined]
        return size, layout

    def is_full(self, layout: CallLayout) -> bool:
        """True if the layout would be of one signature too many."""
        return layout.binding.signature not in self.bindings and len(self.bindings) >= self._config.max_signatures

    def has_larger(self, binding: Binding) -> bool:
        """True if calls with more elements in their arguments are known."""
        own = _elements(binding)
        return any(_elements(other) > own for other in self.bindings.values())

    def use(self, layout: CallLayout) -> None:
        """Keep a layout, and note that it is the latest."""
        known = layout.binding.layouts
        self.bindings[layout.binding.signature] = layout.binding
        known.pop(layout.spec, None)  # the latest comes last
        known[layout.spec] = self.last = layout
        while len(known) > _MAX_LAYOUTS:
            del known[next(iter(known))]  # its plan is made again when such a call comes

    def _state_of(self, module: Any) -> Hashable:
        """Read the Python state that is part of the key: what extras know, unless `state_key` says which."""
        self.state_key = _state_key(module, self._config.state_key)
        state = None if self.state_key is None else self.state_key(module)
        try:
            hash(state)
        except TypeError:
            raise InputError(
                f"state_key returned {state!r}, which cannot be hashed, so states could not be told apart. "
                "Return numbers, strings, or tuples of them."
            ) from None
        return state

    def drop_plans(self) -> None:
        """Forget how calls are replayed and which sizes are warm; what calls look like is kept."""
        for layout in self.layouts:
            layout.plans.clear()
            layout.refusals.clear()
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
        self.last = None


# No method of the module itself: what refers to the module and is referred to by it is freed by the collector, late.
_reached_state: StateKey = operator.methodcaller("state")


def _state_key(module: Any, declared: StateKey | None) -> StateKey | None:
    """Return what reads a module's Python state: as declared or else as extras know it, and what a function reads."""
    key = declared or state_key_of(module)
    if not isinstance(module, FunctionModule):
        return key
    module.resolve()
    return _reached_state if key is None else lambda called: (_reached_state(called), key(called))


def _elements(binding: Binding) -> int:
    """Count the elements of a signature's tensors, those of one row where rows may be any number."""
    return sum(abs(math.prod(arg.shape)) for arg in binding.signature.args if isinstance(arg, TensorArg))
