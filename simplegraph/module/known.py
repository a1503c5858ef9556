"""What is known of a module's calls: how they are passed, which signatures there are, which switches are set."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from simplegraph.config import CudaGraphConfig
from simplegraph.errors import InputError
from simplegraph.module.call import Binding, CallLayout
from simplegraph.module.changes import Changes
from simplegraph.module.signature import Arg, CallReader, Signature
from simplegraph.module.switches import known_switches
from simplegraph.nested import TreeSpec

StateKey = Callable[[Any], Hashable]


class CallForm(NamedTuple):
    """Everything about a call that decides its layout, and its batch size."""

    batch: int
    spec: TreeSpec
    args: Sequence[Arg]
    signature: Signature
    autocast: torch.dtype | None
    state: Hashable


class KnownCalls:
    """The layouts and signatures of one module's calls.

    Args:
        config: how arguments are read, and how many signatures there may be.

    Attributes:
        layouts: by form; bindings: by signature; last: the layout of the latest call.
        state_key: reads the module's Python state that is part of the key; None if there is none.
    """

    def __init__(self, config: CudaGraphConfig) -> None:
        self._config = config
        self.layouts: dict[Hashable, CallLayout] = {}
        self.bindings: dict[Hashable, Binding] = {}
        self.last: CallLayout | None = None
        self.state_key = config.state_key
        self._looked_at = -1  # the count of changes at which switches were looked for
        self._reader: CallReader | None = None

    def reader(self, module: Any) -> CallReader:
        """What names the leaves of the module's calls."""
        if self._reader is None:
            self._reader = CallReader(module.forward, self._config)
        return self._reader

    def read(
        self, module: Any, leaves: Sequence[Any], names: Sequence[str], spec: TreeSpec, autocast: torch.dtype | None
    ) -> CallForm:
        """The form of a call.

        Raises:
            CannotBind: a graph cannot serve the call.
            InputError: an argument, or what `state_key` returned, cannot be a key.
        """
        state = self._state_of(module)
        size, args, signature = self.reader(module).read(leaves, names, spec, (autocast, state))
        return CallForm(size, spec, args, signature, autocast, state)

    def is_full(self, form: CallForm) -> bool:
        """True if the call would be one signature too many."""
        return form.signature not in self.bindings and len(self.bindings) >= self._config.max_signatures

    def layout(self, form: CallForm) -> CallLayout:
        """The layout of a call, which is the latest from now on."""
        binding = self.bindings.setdefault(form.signature, Binding(form.signature))
        key = form.spec, form.signature
        known = self.layouts.get(key)
        if known is None:
            known = self.layouts[key] = CallLayout(form.spec, form.args, form.autocast, form.state, binding)
        self.last = known
        return known

    def _state_of(self, module: Any) -> Hashable:
        """The Python state that is part of the key: of known switches, unless `state_key` says which."""
        if self._config.state_key is None and self._looked_at != Changes.count:
            self.state_key, self._looked_at = known_switches(module), Changes.count
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
        for layout in self.layouts.values():
            layout.plans.clear()
        for binding in self.bindings.values():
            binding.warm.clear()

    def clear(self) -> None:
        """Forget all layouts and signatures."""
        self.drop_plans()
        self.bindings.clear()
        self.layouts.clear()
        self.last = None
