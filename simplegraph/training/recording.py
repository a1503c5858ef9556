"""The runs of a forward and of its backward as they are captured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from simplegraph.base.context import bypassed
from simplegraph.base.errors import HostError
from simplegraph.base.modes import autocast_cache
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import wait_collectives
from simplegraph.call.call import Call
from simplegraph.call.inputs import InputSet
from simplegraph.manager.table import CaptureJob
from simplegraph.training.leaves import Leaves, StandIns, leaves_reached
from simplegraph.training.notes import BackwardNotes, OutputLook


class Arguments:
    """Holds what a forward is passed, whose leaves stand in for the caller's.

    Args:
        call: the call.
        passed: what the forward gets for the call's leaves.
        module_leaves: tensors of the module.
    """

    def __init__(self, call: Call, passed: Sequence[Any], module_leaves: Leaves) -> None:
        self.wanting = [at for at, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.passed = [leaf.detach().requires_grad_() if at in self.wanting else leaf for at, leaf in enumerate(passed)]
        self.held = StandIns(module_leaves, module_leaves.wanting())
        self._spec, self._module_leaves = call.spec, module_leaves

    def run(self, invoke: Callable[..., Any]) -> Any:
        """Run the forward by `invoke(args, kwargs)`."""
        args, kwargs = self._spec.unflatten(self.passed)
        with self._module_leaves.replaced(self.held), bypassed(Reason.NESTED), torch.enable_grad():
            return wait_collectives(invoke(args, kwargs))

    def written(self, values: Sequence[Any]) -> list[Tensor]:
        """List the tensors among what the forward returned, but for those that it was given."""
        return written_outputs(values, [*self.passed, *self.held.tensors])

    @property
    def targets(self) -> list[Tensor]:
        """List what the backward makes gradients of, in the order of `leaves`."""
        return [*(self.passed[at] for at in self.wanting), *self.held.tensors]

    @property
    def leaves(self) -> list[int | Tensor]:
        """List what they stand for: arguments, by their index, and tensors of the module."""
        return [*self.wanting, *self.held.originals]


@dataclasses.dataclass(eq=False)
class Tape:
    """Holds what a captured forward leaves for the capture of its backward.

    Attributes:
        spec: how its outputs nest.
        leaves: values that are the same at each call, None where another place has something.
        written: place -> the number of the graph's output; given: place -> the index of the argument that is returned.
        outputs: what the graph writes, with its history until the last backward is captured.
        wanting: the numbers of those that have a gradient.
        reaches: for each of them, the numbers of the leaves in its history.
    """

    spec: TreeSpec | None = None
    leaves: list[Any] = dataclasses.field(default_factory=list)
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    given: dict[int, int] = dataclasses.field(default_factory=dict)
    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    wanting: frozenset[int] = frozenset()
    reaches: list[frozenset[int]] = dataclasses.field(default_factory=list)

    def take(self, result: Any, arguments: Arguments, leaves: Leaves) -> list[Tensor]:
        """Take what a forward returned; return what its graph writes."""
        values, self.spec = flatten(result)
        places = {id(leaf): at for at, leaf in enumerate(arguments.passed) if isinstance(leaf, Tensor)}
        self.outputs += arguments.written(values)
        numbers = {id(output): number for number, output in enumerate(self.outputs)}
        self.leaves = [arguments.held.original(value) for value in values]
        for place, value in enumerate(values):
            if id(value) in numbers:
                self.written[place], self.leaves[place] = numbers[id(value)], None
            elif id(value) in places:
                self.given[place], self.leaves[place] = places[id(value)], None
            elif self.leaves[place] is None:
                self.leaves[place] = value
        self.wanting = frozenset(at for at, output in enumerate(self.outputs) if output.requires_grad)
        own = {id(target): at for at, target in enumerate(arguments.targets)}
        for output in self.outputs:
            reached = leaves_reached([output])
            strange = [tensor for tensor in reached if id(tensor) not in own]
            if strange:
                cause = f"gradients flow to {leaves.name_of(strange[0])}, which the forward does not find in its module"
                raise HostError(cause, "Register it as a parameter, and use it from there.")
            self.reaches.append(frozenset(own[id(tensor)] for tensor in reached))
        moved = arguments.held.moved()
        if moved is not None:
            cause = f"the forward gives {leaves.name_of(moved)} other memory"
            raise HostError(cause, "Write to it in place.")
        return list(self.outputs)

    def nest(self, outputs: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
        """Return what the caller of a replay gets."""
        leaves = list(self.leaves)
        for place, number in self.written.items():
            leaves[place] = outputs[number]
        for place, index in self.given.items():
            leaves[place] = arguments[index]
        return cast(TreeSpec, self.spec).unflatten(leaves)


def written_outputs(values: Sequence[Any], given: Sequence[Any]) -> list[Tensor]:
    """List the tensors among what a forward returned, each once, but for those that it was given."""
    own = {id(value) for value in given}
    return list({id(value): value for value in values if isinstance(value, Tensor) and id(value) not in own}.values())


class Recording:
    """Runs the forward and the backwards of one call as they are captured.

    Args:
        call: the call; invoke: runs its module with other arguments.
        leaves: tensors of the module; inputs: the static inputs of the graphs.
        state_key: of the configuration.

    Attributes:
        notes: what eager backwards showed; held: all tensors of the module that may want gradients.
        patterns: for each backward, the numbers of the outputs that it takes gradients of.
        places: for each backward, the numbers of the leaves that it makes gradients of.
        gradients: buffers for the gradients of outputs.
        retains: the first backward leaves what it reads.
    """

    def __init__(
        self,
        call: Call,
        invoke: Callable[..., Any],
        leaves: Leaves,
        inputs: InputSet,
        notes: BackwardNotes,
        state_key: Callable[[Any], Hashable] | None,
    ) -> None:
        self._call, self._invoke, self._leaves, self.notes = call, invoke, leaves, notes
        self._state_key = state_key
        self.arguments = Arguments(call, inputs.leaves(call.layout.args, call.padded), leaves)
        self.tape, self.held = Tape(), leaves.tensors
        self.retains = notes.needs.retained
        # Not in the pool: they are filled between the two graphs.
        self.gradients = [look.buffer() if look.wanting else None for look in notes.outputs]
        self.patterns: list[frozenset[int]] = []
        self.places: list[list[int]] = []
        # With a cache, as in eager, gradients of a weight's casts are added in the lower precision.
        self._caches = torch.is_autocast_cache_enabled()

    def jobs(self, key: Hashable, generators: tuple[torch.Generator, ...]) -> list[CaptureJob]:
        """Make the jobs: forward, the backward for what usually gets gradients, and one for all outputs."""
        call = self._call
        kind = call.dispatch[:2]
        inputs = call.layout.described_inputs()
        everything = frozenset(number for number, look in enumerate(self.notes.outputs) if look.wanting)
        usual = everything & frozenset(self.notes.seen or ()) or everything
        alone = usual == everything
        runs: dict[str, Callable[[], Any]] = {
            "forward": self.forward,
            "backward": functools.partial(self._backward, usual, last=alone),
        }
        if not alone:
            runs["backward, of all outputs"] = functools.partial(self._backward, everything, last=True)
        last = list(runs)[-1]
        return [
            CaptureJob(
                (key, part),
                *kind,
                run,
                generators,
                inputs,
                self._leaves.name_of,
                part=part,
                follows=None if part == "forward" else (key, "forward"),
                ended=self.tape.outputs.clear if part == last else bool,
                refused=call.binding.refused,
            )
            for part, run in runs.items()
        ]

    def forward(self) -> list[Tensor]:
        """Run the forward on static inputs, with stand-ins for its leaves."""
        call = self._call
        captured_run = call.binding.counted[call.padded].captured_run(call.module, self._state_key)
        with captured_run, autocast_cache(enabled=self._caches):
            result = self.arguments.run(self._invoke)
        unsupported = call.binding.unsupported
        if unsupported is not None:
            raise HostError(f"{unsupported.reason.text} ({unsupported.detail})", "Return results instead.")
        outputs = self.tape.take(result, self.arguments, self._leaves)
        looks, known = list(map(OutputLook.of, outputs)), self.notes.outputs
        if len(looks) != len(known) or not all(map(OutputLook.like, looks, known)):
            raise HostError("the outputs are others than those of the call before", "Let them follow from the inputs.")
        return outputs

    def _backward(self, pattern: frozenset[int], *, last: bool) -> list[Tensor]:
        """Run the backward for some outputs; `last` if no other is captured after it."""
        tape, targets = self.tape, self.arguments.targets
        numbers = sorted(pattern)
        dtype = self.notes.needs.autocast
        around = torch.autocast(self.notes.device_type, dtype, enabled=dtype is not None)
        try:
            with around, autocast_cache(enabled=self._caches), bypassed(Reason.NESTED):
                grads = torch.autograd.grad(
                    [tape.outputs[number] for number in numbers],
                    targets,
                    [cast(Tensor, self.gradients[number]) for number in numbers],
                    retain_graph=self.retains or not last,
                    allow_unused=True,
                )
        except BaseException:
            tape.outputs.clear()
            raise
        places = [at for at, grad in enumerate(grads) if grad is not None]
        made = [_laid_as(targets[at], grads[at]) for at in places]
        self.patterns.append(pattern)
        self.places.append(places)
        return made


def _laid_as(leaf: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient as torch keeps it in `.grad`, so that it copies it no second time.

    Raises:
        HostError: it is sparse.
    """
    if grad.layout is not torch.strided:
        cause = f"the gradient of a leaf of shape {tuple(leaf.shape)} has layout {grad.layout}"
        raise HostError(cause, "Ask the layer for dense gradients (sparse=False).")
    if grad.stride() == torch.empty_like(leaf, device="meta").stride():
        return grad
    return torch.empty_like(leaf, dtype=grad.dtype).copy_(grad)
