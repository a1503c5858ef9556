"""The layouts of one module's calls, and the table of all of them."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphConfig, CudaGraphMode
from simplegraph.base.errors import InputError
from simplegraph.base.extras import StateKey
from simplegraph.base.modes import autocast_dtype
from simplegraph.base.nested import TreeSpec
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Binding, CallLayout
from simplegraph.call.remembered_refusals import Refusals
from simplegraph.call.signature import CallReader, argument_rules
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.plain_state import PlainState
from simplegraph.guard.torch_state import TorchSettings, function_modes

_MAX_LAYOUTS = 16  # per signature, since keywords can be passed in any order


class CallTable:
    """The layouts and signatures of one module's calls.

    Args:
        config: how arguments are read, and how many signatures there may be.

    Attributes:
        bindings: bindings by the values of their signatures.
        layouts: the layouts of all signatures, the latest first.
        state_key: reads the module's Python state that is part of the key; None if there is none.
        plain: reads the plain values that are part of the key.
        refusals: remembers which calls are refused.
    """

    def __init__(self, config: CudaGraphConfig) -> None:
        self._config = config
        self.bindings: dict[Hashable, Binding] = {}
        self.layouts: list[CallLayout] = []
        self.state_key = config.state_key
        self.plain = PlainState(breaks=CudaGraphMode.FULL.name in config.mode.value, proves=config.verify > 0)
        self.refusals = Refusals(self.plain)
        self._reader: CallReader | None = None

    def reader(self, module: Any) -> CallReader:
        """Return the reader of the module's calls, which names their leaves."""
        forward = module.function if isinstance(module, FunctionModule) else module.forward
        if self._reader is None:
            self._reader = CallReader(forward, self._config, argument_rules(module))
            self.refusals.reader = self._reader
        self._reader.use(forward, hooked=bool(module._forward_pre_hooks or module._forward_hooks))
        return self._reader

    def batch_size(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Return the batch size of a call that is passed like the latest one that was read; else None."""
        for layout in self.layouts[:1]:
            leaves = layout.leaves(args, kwargs) if layout.anchor >= 0 else None
            leaf: Any = None if leaves is None else leaves[layout.anchor]
            if issubclass(type(leaf), Tensor) and not leaf.is_nested and leaf.dim() > layout.anchor_dim:
                return int(leaf.shape[layout.anchor_dim])
        return None

    def read(
        self,
        module: Any,
        leaves: list[Any],
        names: Sequence[str],
        spec: TreeSpec,
        device: torch.device,
        gradients: Hashable = None,
        *,
        adds_sizes: bool = False,
    ) -> tuple[int, CallLayout]:
        """Return the batch size and the layout of a call on a device; `use` keeps a new layout.

        `gradients` describes the tensors that require gradients, if graphs make them. With `adds_sizes` a call whose
        batch dimensions are ambiguous is read without any, for a graph of exactly its shapes.

        Raises:
            CannotBind: a graph cannot serve the call.
            InputError: an argument, or what `state_key` returned, cannot be a key.
        """
        autocast, settings, modes = autocast_dtype(device.type), TorchSettings(device.type), function_modes()
        # The Python state that is part of the key: as declared, and a function's.
        key = state_key = self._config.state_key
        if isinstance(module, FunctionModule):
            module.resolve()
            key = _reached_state if state_key is None else lambda called: (_reached_state(called), state_key(called))
        self.state_key = key
        state = None if key is None else key(module)
        try:
            hash(state)
        except TypeError:
            raise InputError(
                f"state_key returned {state!r}, which cannot be hashed, so states could not be told apart. "
                "Return numbers, strings, or tuples of them."
            ) from None
        context = autocast, state, settings, modes, gradients, self.plain.read_values(module)
        reader = self.reader(module)
        try:
            size, args, signature = reader.read(leaves, names, spec, context, device)
        except CannotBind as error:
            if error.reason is not Reason.AMBIGUOUS_BATCH_DIM or not adds_sizes:
                raise
            size, args, signature = reader.read(leaves, names, spec, context, device, exact=True)
        binding = self.bindings.get(signature.values) or Binding(signature)
        layout = binding.layouts.get(spec)
        if layout is None:
            layout = CallLayout(spec, args, device.type, binding, module.training)
        if isinstance(module, FunctionModule):
            module.serve(layout.binding)
        return size, layout

    def is_outdated(self, module: Any) -> bool:
        """True if some signatures belong to Python state that has changed since."""
        contexts = (binding.signature.context for binding in self.bindings.values())
        return isinstance(module, FunctionModule) and any(map(module.is_over, contexts))

    def use(self, layout: CallLayout) -> None:
        """Keep a layout, and note that it is the latest."""
        layouts = layout.binding.layouts
        self.bindings[layout.binding.signature.values] = layout.binding
        layouts.pop(layout.spec, None)  # the latest comes last
        layouts[layout.spec] = layout
        layout.binding.plans[layout.spec] = layout.plans
        while len(layouts) > _MAX_LAYOUTS:
            spec = next(iter(layouts))
            del layouts[spec], layout.binding.plans[spec]  # its plan is made again at the next such call
        self.put_first(layout)

    def put_first(self, layout: CallLayout) -> None:
        """Note that a layout is the latest; in a new list, since other threads may iterate over the old one."""
        layouts = (other for other in self.layouts if other.binding.layouts.get(other.spec) is other)
        self.layouts = [layout, *(other for other in layouts if other is not layout)]

    def drop_plans(self) -> None:
        """Forget plans and which sizes are warm; layouts and signatures are kept."""
        self.refusals.unchecked = None
        self.plain.forget()
        for binding in self.bindings.values():
            binding.note_moved()
            binding.numbers.clear()  # the stale state may have held some of them
            binding.repeated_changes.clear()  # the state may be in other objects by now, or changed by other code

    def clear(self) -> None:
        """Forget all layouts and signatures, and how CPU tensors are used."""
        self.drop_plans()
        if self._reader is not None:
            self._reader.hosts.clear()
        for binding in self.bindings.values():
            binding.forget()
        self.bindings.clear()
        self.layouts = []


# Not a bound method of the module: only the garbage collector would free that cycle, late.
_reached_state: StateKey = operator.methodcaller("state")
