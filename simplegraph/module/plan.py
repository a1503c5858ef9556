"""The replay path: from a call's arguments to a replayed graph with as little Python as possible."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.batch.descriptor import Dispatch
from simplegraph.graph.program import Program
from simplegraph.manager.manager import CudaGraphManager, around_breaks
from simplegraph.manager.stats import GraphCounters
from simplegraph.module.binding import Binding
from simplegraph.module.inputs import InputSet, Slot, StaticInput, overlap
from simplegraph.module.signature import PLAIN_TENSORS, Arg, TensorArg, is_flat
from simplegraph.module.state import CapturedState
from simplegraph.nested import TreeSpec, flatten

Copies = tuple[list[Tensor], list[Tensor]]
NOTHING: Copies = ([], [])
_copy_all = torch._foreach_copy_


class CallLayout:
    """One way of passing the arguments of a signature (positional, keyword, nested), and its plans.

    Attributes:
        spec: how the leaves of ``(args, kwargs)`` nest.
        args: what each leaf must be.
        autocast: the autocast dtype in force; state: the module's Python state (`state_key`).
        binding: what is known about the signature.
        plans: by batch size, or (batch size, description), how such a call is replayed.
    """

    def __init__(
        self, spec: TreeSpec, args: Sequence[Arg], autocast: torch.dtype | None, state: Hashable, binding: Binding
    ) -> None:
        self.spec = spec
        self.args = list(args)
        self.autocast = autocast
        self.state = state
        self.binding = binding
        self.plans: dict[Any, Plan] = {}
        self._flat = is_flat(spec)
        self._num_args = len(spec.children[0].children)
        self._keywords = spec.children[1].keys
        # The number of arguments if all of them are leaves, passed by position: then they are the leaves.
        self.positional = self._num_args if self._flat and not self._keywords else -1
        batched = [(index, arg) for index, arg in enumerate(args) if isinstance(arg, TensorArg)]
        self.anchor, anchor = next((i, a) for i, a in batched if isinstance(a.batch_dim, int))
        self.anchor_dim = int(anchor.batch_dim)  # type: ignore[arg-type]

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """The call's leaves in the order of `args`, or None if it passes its arguments another way."""
        if not self._flat:
            leaves, spec = flatten((args, kwargs))
            return leaves if spec == self.spec else None
        if len(args) != self._num_args:
            return None
        if kwargs:
            return (*args, *kwargs.values()) if tuple(kwargs) == self._keywords else None
        return args if not self._keywords else None


class Call(NamedTuple):
    """A call of the wrapped module, read."""

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    names: list[str]
    spec: TreeSpec
    batch: int
    layout: CallLayout
    binding: Binding
    dispatch: Dispatch

    @property
    def key(self) -> Hashable:
        return self.binding.signature, self.dispatch.mode, self.dispatch.descriptor

    @property
    def padded(self) -> int:
        return self.dispatch.descriptor.num_tokens

    @property
    def padding(self) -> int:
        return self.padded - self.batch

    @property
    def aliased(self) -> bool:
        """Whether inputs share memory that their static buffers would not share."""
        copied = [isinstance(arg, TensorArg) and arg.batch_dim != "reference" for arg in self.layout.args]
        return overlap(itertools.compress(self.leaves, copied))

    @property
    def tensors(self) -> Iterator[tuple[Tensor, str]]:
        """The tensor leaves and their names."""
        return ((leaf, name) for leaf, name in zip(self.leaves, self.names, strict=True) if isinstance(leaf, Tensor))


class Plan:
    """How calls of one layout and one batch size are served by one Program.

    Attributes:
        slots: what each leaf must be, and where it goes.
        rows, padded: real rows, and rows of the graph.
        replay: queues the graph.
        outputs: views of the real rows of what a replay writes, and leaves that are no graph memory.
        state: what the graph reads of the module.
        checked: replays take the slow way, with checks: `debug` of addresses, the next `checks` of results.
    """

    def __init__(
        self,
        layout: CallLayout,
        inputs: InputSet,
        program: Program,
        counters: GraphCounters,
        *,
        rows: int,
        padded: int,
        outputs: Sequence[Any],
        clone: frozenset[int],
        written_back: frozenset[str],
        key: Any,
        manager: CudaGraphManager,
        state: CapturedState,
    ) -> None:
        self.key = key
        self.state = state
        self.device = manager.device
        self.pool = manager.pool
        self.hooks = manager.hooks
        self.inputs = inputs
        self.rows = rows
        self.padded = padded
        self.padding = padded - rows
        self.program = program
        self.replay = self._replay_around_breaks if program.breaks else program.replay
        self.counters = counters
        self.checks = manager.config.verify
        self.debug = manager.config.debug
        self.checked = self.debug or self.checks > 0
        statics = [inputs.inputs.get(arg.name) for arg in layout.args]
        self.slots = [Slot(arg, static, padded, rows) for arg, static in zip(layout.args, statics, strict=True)]
        # A slot without a view is a constant's; None would be taken for the value of an argument that is None.
        self._bindings = [
            (
                slot.view if slot.constant is None else slot,
                slot.shape,
                slot.dtype,
                slot.device_index,
                slot.address,
                slot.end,
                slot,
            )
            for slot in self.slots
        ]
        self._prepare_padding([static for static in statics if static is not None and static.batched])
        self.names = [arg.name for arg in layout.args]
        self.written_back = [index for index, name in enumerate(self.names) if name in written_back]
        self._addresses = {
            arg.name: static.view(padded).data_ptr()
            for arg, static in zip(layout.args, statics, strict=True)
            if static is not None
        }
        self.outputs = list(outputs)
        self._clone = sorted(clone)
        self._spec = program.spec
        self._single = len(self.outputs) == 1 and not program.spec.children and program.spec.type is None

    def _replay_around_breaks(self) -> None:
        try:
            with around_breaks(self.program):
                self.program.replay()
        except BaseException:
            self.inputs.dirty = self.inputs.rows  # what wrote to padding rows was not followed by a write-back
            raise

    def _prepare_padding(self, statics: list[StaticInput]) -> None:
        """Views of the padding rows, and what goes into them."""
        rows, padded = self.rows, self.padded
        padded_statics = statics if self.padding else []
        tails = [(s, s.part(padded, rows, padded)) for s in padded_statics if s.pads_with_number]
        self._pad_targets = [tail for _, tail in tails]
        self._pad_sources = [s.pad_value.expand(tail.shape) for s, tail in tails]
        # Views of inputs whose rows are not first overlap between sizes: padding must be set every time.
        overlapping = [(s, tail) for s, tail in tails if not s.rows_first]
        self._overlapping = overlapping and (
            [s.pad_value.expand(tail.shape) for s, tail in overlapping],
            [tail for _, tail in overlapping],
        )
        self._repeated = [
            (tail, s.part(padded, rows - 1, rows).expand_as(tail))
            for s in padded_statics
            if s.pad == "repeat-last"
            for tail in [s.part(padded, rows, padded)]
        ]

    def bind(self, leaves: Sequence[Any]) -> Copies | None:
        """What has to be copied for this call; None if a leaf is not what was captured."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        # Unpacking is cheaper than attributes, and as long as each other they are: the layout saw to it.
        for leaf, (view, shape, dtype, index, start, end, slot) in zip(leaves, self._bindings):  # noqa: B905
            if leaf is view:
                continue  # a tensor of static_inputs(), written in place
            if shape is None:
                if not slot.holds(leaf):
                    return None
                continue
            if (
                leaf.__class__ not in PLAIN_TENSORS
                or leaf.dtype is not dtype
                or leaf.shape != shape
                or leaf.get_device() != index
            ):
                return None
            if start <= leaf.data_ptr() < end:
                if leaf.data_ptr() == start and leaf.stride() == slot.stride and not (leaf.is_conj() or leaf.is_neg()):
                    continue  # the same memory by another name
                leaf = leaf.clone()  # overlaps its own target
            if slot.reference:
                return None
            sources.append(leaf)
            targets.append(view)
        if not sources:
            return NOTHING
        return (self.inputs.detached(sources) if self.inputs.handed_out else sources), targets

    def load(self, copies: Copies) -> None:
        """Copy the inputs that are not in place, and set padding rows that hold something else."""
        sources, targets = copies
        if self.padding:
            if self.inputs.dirty > self.padded and not self.inputs.handed_out:
                self.inputs.clean(self.rows)  # once after a larger batch, rather than these rows at every call
            if self.inputs.handed_out or self.inputs.dirty > self.rows:
                sources, targets = [*sources, *self._pad_sources], [*targets, *self._pad_targets]
                if self.inputs.dirty <= self.padded:
                    self.inputs.dirty = self.rows
            elif self._overlapping:
                sources, targets = [*sources, *self._overlapping[0]], [*targets, *self._overlapping[1]]
        if self.inputs.dirty < self.rows:
            self.inputs.dirty = self.rows
        if len(sources) == 1:
            targets[0].copy_(sources[0])
        elif sources:
            _copy_all(targets, sources)
        for tail, last in self._repeated:
            tail.copy_(last)

    def aliased(self, leaves: Sequence[Any]) -> bool:
        """Whether inputs share memory that their static buffers do not share; matters where inputs are written."""
        return overlap(
            leaf for leaf, slot in zip(leaves, self.slots, strict=True) if slot.view is not None and not slot.reference
        )

    def write_back(self, leaves: Sequence[Any]) -> None:
        """Give the caller's tensors what the forward wrote into its inputs."""
        for index in self.written_back:
            slot = self.slots[index]
            if leaves[index].data_ptr() != slot.address:
                leaves[index].copy_(slot.view)
        self.inputs.dirty = self.inputs.rows  # the forward may have written padding rows too

    def result(self) -> Any:
        """What the caller gets: tensors of its own, or graph memory, nested as the forward returned them."""
        if self._single:
            return self.outputs[0].clone() if self._clone else self.outputs[0]
        leaves = self.outputs
        if self._clone:
            leaves = leaves.copy()
            for index in self._clone:
                leaves[index] = leaves[index].clone()
        return self._spec.unflatten(leaves)

    def moved_inputs(self) -> list[str]:
        """Names of static inputs that are no longer where the graph reads them (debug)."""
        return [
            f"argument {name}"
            for name, address in self._addresses.items()
            if self.inputs.inputs[name].view(self.padded).data_ptr() != address
        ]
