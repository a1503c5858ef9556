"""The recorder of a piecewise capture: ends a segment at each break and begins the next."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.break_operators import name_of, recording_breaks
from simplegraph.base.errors import BreakError
from simplegraph.base.modes import Modes
from simplegraph.base.nested import LEAF, TreeSpec, flatten, opened_once
from simplegraph.base.tensors import wait_collectives
from simplegraph.device.generators import default_generator
from simplegraph.device.protocol import GraphDevice, GraphPool, Segment
from simplegraph.program.breaks.step import Break, BreakCall, BreakTrace, Cell, Place, rebuilt_call


@dataclasses.dataclass(eq=False)
class SegmentRecorder:
    """Records a forward's segments and, where a trace of it is given, its breaks.

    Attributes:
        device, pool: where.
        generators: random generators, beside the default one, that the forward draws from.
        trace: what a warmup saw of the breaks; None makes breaks part of a single segment.
        continues: the pool's last Program is always replayed before this one.
        all_generators: every generator that the forward may draw from.
    """

    device: GraphDevice
    pool: GraphPool
    generators: Sequence[torch.Generator]
    trace: BreakTrace | None
    continues: bool = False

    def __post_init__(self) -> None:
        self.operators: frozenset[Any] = frozenset() if self.trace is None else self.trace.operators
        self._cells: dict[int, Cell] = {}  # by the id of what they hold now
        self._steps: list[Segment | Break] = []
        self._breaks = 0
        self._stream = 0
        self._ambient = Modes.now(self.device.torch_device.type)
        self._error: Exception | None = None
        self.all_generators = (default_generator(self.device.torch_device), *self.generators)

    def begin(self) -> None:
        """Begin the first segment."""
        self._stream = self.device.current_stream()
        self.device.begin(self.pool, self.generators, continues=self.continues)

    def finish(self) -> tuple[Segment | Break, ...]:
        """End the last segment, and return the steps of the forward."""
        if self._error is not None:
            raise self._error
        self._end_segment()
        return tuple(self._steps)

    def drop(self) -> None:
        """Drop the segments recorded so far."""
        for step in self._steps:
            if not isinstance(step, Break):
                step.reset()
        self._steps.clear()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, note the break, begin the next segment, and return stand-ins for the result."""
        try:
            return self._call(name_of(function), function, args, kwargs)
        except Exception as error:
            self._error = error  # even if the forward swallows it, and goes on without the break
            raise

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._known(function, name)
        if self.device.current_stream() != self._stream:
            raise BreakError(
                f"eager break {name} is called on another stream than the forward's; join that stream and leave its "
                "`with torch.cuda.stream(...)` block first."
            )
        args, kwargs = wait_collectives((args, kwargs))
        self._end_segment()
        leaves, spec = flatten((args, kwargs))
        made_here = known.made_here if len(known.made_here) == len(leaves) else (True,) * len(leaves)
        with recording_breaks(None):
            held = [self._hold(leaf, made) for leaf, made in zip(leaves, made_here, strict=True)]
        step = self._break(name, function, (args, kwargs), spec, leaves, held)
        self._steps.append(step)
        self.device.begin(self.pool, self.generators, continues=True)
        place = Place(leaves, held, self._keep, self._cells)
        with recording_breaks(None):
            entered = [result.enter(place) for result in known.results]
        step.spec, step.accepts = known.spec, [accept for _, accept in entered]
        return known.spec.unflatten([value for value, _ in entered])

    def _known(self, function: Callable[..., Any], name: str) -> BreakCall:
        """Look up what the warmup saw of this call."""
        index, self._breaks = self._breaks, self._breaks + 1
        calls = self.trace.calls if self.trace is not None else []
        if index >= len(calls) or calls[index].function != function:
            seen = name_of(calls[index].function) if index < len(calls) else "none"
            raise BreakError(
                f"eager break {name} is call {index + 1} of a break in the capture, where the warmup before it had "
                f"{seen}; which breaks run must follow from the batch size alone."
            )
        if calls[index].problem is not None:
            raise BreakError(f"eager break {name} {calls[index].problem}.")
        return calls[index]

    def _end_segment(self) -> None:
        segment = self.device.end()
        if segment is not None:
            self._steps.append(segment)

    def _hold(self, leaf: Any, made_here: bool) -> Any:
        """Return an argument as every replay passes it: graph memory is borrowed, all else is owned."""
        if isinstance(leaf, Tensor):
            return self._keep(leaf) if made_here else leaf
        return self._cells.get(id(leaf), leaf)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Borrow memory of the pool, so that what is captured next may use it; other memory stays owned.

        Memory of the pool was written by an earlier step of this very Program, which writes it again in
        every replay before it is read here.
        """
        if type(tensor) is Tensor and self.device.in_pool(self.pool, tensor):
            # Not inference tensors, whatever mode the forward is in: those refuse writes from other modes.
            with torch.inference_mode(False):
                return self.device.borrow(self.pool, tensor)
        return tensor

    def _break(
        self,
        name: str,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        spec: TreeSpec,
        leaves: Sequence[Any],
        held: Sequence[Any],
    ) -> Break:
        """Make the step that calls the function again, with its arguments or what stands for them."""
        nested, parts = _without_graph_memory(call, spec, held, leaves)
        deep = any(child.type is not None for arguments in nested.children for child in arguments.children)
        changing = deep or any(isinstance(part, Cell) for part in parts)
        rebuilt = functools.partial(rebuilt_call, nested, parts) if changing else None
        args, kwargs = ((), {}) if rebuilt else nested.unflatten(parts)
        device_type = self.device.torch_device.type
        modes = Modes.now(device_type)
        changed = modes.changed_from(self._ambient)
        inside = functools.partial(modes.restored, changed, device_type) if changed else None
        return Break(name, function, args, kwargs, rebuilt, inside)


def _without_graph_memory(
    value: Any, spec: TreeSpec, held: Sequence[Any], leaves: Sequence[Any]
) -> tuple[TreeSpec, Sequence[Any]]:
    """Say how to put a container together again from what replays hold.

    Containers in it without graph memory are leaves: they stay the same objects, so that what is put into them
    later is seen.
    """
    if spec.type is None:
        return LEAF, held
    opened = opened_once(value)
    if opened is None or all(map(operator.is_, held, leaves)):
        return LEAF, [value]
    children: list[TreeSpec] = []
    parts: list[Any] = []
    start = 0
    for item, child in zip(opened[1], spec.children, strict=True):
        end = start + child.num_leaves
        nested, inside = _without_graph_memory(item, child, held[start:end], leaves[start:end])
        children.append(nested)
        parts += inside
        start = end
    return dataclasses.replace(spec, children=tuple(children)), parts
