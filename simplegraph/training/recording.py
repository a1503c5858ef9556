"""The captured runs of a forward and its backward, on leaves that stand in for the caller's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from simplegraph.base.context import bypassed
from simplegraph.base.errors import HostError
from simplegraph.base.modes import autocast_cache
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import wait_collectives
from simplegraph.call.call import Call
from simplegraph.call.inputs import PLAIN_TENSORS, InputSet
from simplegraph.guard.python_effects import PythonEffects
from simplegraph.guard.scripted import ScriptedAttributes
from simplegraph.guard.survey import Survey
from simplegraph.manager.table import CaptureJob
from simplegraph.program.snapshot import put
from simplegraph.training.gradients import leaves_reached
from simplegraph.training.notes import BackwardNotes, look_at

_SCRIPTED = (
    "{} is a parameter of a TorchScript module; use the module that it was made from, or let simplegraph.train_step "
    "have the whole step"
)


class Leaves:
    """Lists the tensors of a module that may require gradients, each once.

    Attributes:
        tensors: the tensors; names: their dotted names in the module.
        scripted: ids of tensors that TorchScript modules hold, where no other can take their place.
    """

    def __init__(self, module: nn.Module) -> None:
        survey = Survey(module)
        self._places = list(_places(survey))
        self._recurrent = [module for module in survey.modules.values() if isinstance(module, nn.RNNBase)]
        by_id = {id(tensor): (name, tensor) for name, _, _, tensor in reversed(self._places)}
        self.names = [name for name, _ in by_id.values()]
        self.tensors = [tensor for _, tensor in by_id.values()]
        linked = [located for located in survey.tensors.values() if located.links]
        self.scripted = {id(it.tensor) for it in linked if isinstance(it.links[0][0], ScriptedAttributes)}

    @property
    def wanting_names(self) -> tuple[str, ...]:
        """Name the tensors that require gradients now."""
        return tuple(name for name, tensor in zip(self.names, self.tensors, strict=True) if tensor.requires_grad)

    def wanting(self) -> list[Tensor]:
        """List the tensors that require gradients now."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of one of the tensors."""
        return next((name for name, other in zip(self.names, self.tensors, strict=True) if other is tensor), "a tensor")

    @contextlib.contextmanager
    def replaced(self, others: Mapping[int, Tensor]) -> Iterator[None]:
        """Replace the tensors with these ids by others, wherever the module holds them, in the block."""
        places: list[tuple[Any, Any, Any, Any]] = [
            (holder, key, tensor, others.get(id(tensor))) for _, holder, key, tensor in self._places
        ]
        places += [entry for module in self._recurrent for entry in _flat_lists(module, others)]
        # Tuples cannot be changed; the autograd graph shows a tensor that is used from one.
        places = [entry for entry in places if isinstance(entry[0], (dict, list)) and entry[3] is not None]
        swapped = [entry for entry in places if entry[0][entry[1]] is entry[2]]
        try:
            for holder, key, _, other in swapped:
                put(holder, key, other)
            yield
        finally:
            for holder, key, tensor, other in swapped:
                if holder[key] is other:
                    put(holder, key, tensor)


def _places(survey: Survey) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield (name, holder, key, tensor) of every place that holds a tensor that may require gradients."""
    for name, module in survey.modules.items():
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None and _may_want(tensor):
                    yield f"{name}.{key}".lstrip("."), holder, key, tensor
    for located in survey.tensors.values():
        if located.links and _may_want(located.tensor):
            holder, key, _ = located.links[-1]
            yield located.name, holder, key, located.tensor


def _flat_lists(module: nn.RNNBase, stand_ins: Mapping[int, Tensor]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield (holder, key, value, value with stand-ins) of the lists in which torch keeps recurrent weights for cuDNN.

    A forward whose weights are not in these lists would copy all of them to a new buffer.
    """
    attributes = vars(module)
    weights = attributes.get("_flat_weights")
    if weights is not None and "_flat_weight_refs" in attributes:
        others = [stand_ins.get(id(weight), weight) for weight in weights]
        yield attributes, "_flat_weights", weights, others
        refs = [None if weight is None else weakref.ref(weight) for weight in others]
        yield attributes, "_flat_weight_refs", attributes["_flat_weight_refs"], refs


def _may_want(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class StandIns:
    """Leaves of a separate autograd graph, in the memory of a call's arguments and of its module's tensors.

    A capture's backward must not run the hooks of the user's leaves, nor reach the nodes that add to their gradients:
    those may belong to another stream.

    Args:
        call: the call.
        passed: the forward's inputs in place of the call's leaves.
        module_leaves: tensors of the module.

    Attributes:
        wanting: the indices of the arguments that require gradients; passed: all arguments, with stand-ins.
        originals: the module's leaves that require gradients; tensors: their stand-ins, in the same order.

    Raises:
        CannotBind: a tensor of the module cannot have a stand-in.
    """

    def __init__(self, call: Call, passed: Sequence[Any], module_leaves: Leaves) -> None:
        wants = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in call.leaves]
        first = {id(leaf): at for at, leaf in reversed([*enumerate(call.leaves)])}  # one tensor has one gradient
        self.wanting = sorted(at for at in first.values() if wants[at])
        stand_ins = {id(call.leaves[at]): _stand_in(passed[at]) for at in self.wanting}
        self.passed = [stand_ins.get(id(original), leaf) for original, leaf in zip(call.leaves, passed, strict=True)]
        self._spec, self._module_leaves = call.spec, module_leaves
        wanting = module_leaves.wanting()
        for tensor in wanting:
            if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
                kind = type(tensor).__name__ if type(tensor) not in PLAIN_TENSORS else str(tensor.layout)
                raise CannotBind(Reason.UNTRAINABLE, f"{module_leaves.name_of(tensor)} is a {kind}")
            if id(tensor) in module_leaves.scripted:
                raise CannotBind(Reason.UNTRAINABLE, _SCRIPTED.format(module_leaves.name_of(tensor)))
        self.originals = [tensor for tensor in wanting if tensor.is_leaf]  # `Tape.take` refuses the use of others
        self.tensors = list(map(_stand_in, self.originals))

    def run(self, invoke: Callable[..., Any]) -> Any:
        """Run the forward by `invoke(args, kwargs)`."""
        args, kwargs = self._spec.unflatten(self.passed)
        others = {id(tensor): other for tensor, other in zip(self.originals, self.tensors, strict=True)}
        with self._module_leaves.replaced(others), bypassed(Reason.NESTED), torch.enable_grad():
            return wait_collectives(invoke(args, kwargs))

    def written(self, values: Sequence[Any]) -> list[Tensor]:
        """List the tensors that the forward returned, except those that it was passed."""
        return written_outputs(values, [*self.passed, *self.tensors])

    @property
    def targets(self) -> list[Tensor]:
        """List the tensors that the backward makes gradients for, in the order of `leaves`."""
        return [*(self.passed[at] for at in self.wanting), *self.tensors]

    @property
    def leaves(self) -> list[int | Tensor]:
        """List the originals of `targets`: arguments, by their index, then tensors of the module."""
        return [*self.wanting, *self.originals]


def _stand_in(tensor: Tensor) -> Tensor:
    other = tensor.detach()
    other = nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other.requires_grad_()
    vars(other).update(vars(tensor))
    return other


@dataclasses.dataclass(eq=False)
class Tape:
    """Holds the results of a captured forward for the capture of its backward.

    Attributes:
        spec: the structure of its result.
        leaves: by place in the result, values that are the same at each call; None for places in `written` or `given`.
        written: place -> the number of the graph's output; given: place -> the index of the argument that is returned.
        outputs: the tensors that the graph writes, with their history until the last backward is captured.
        wanting: the numbers of outputs that have a gradient.
        reaches: for each output, the numbers of the leaves in its history.
    """

    spec: TreeSpec | None = None
    leaves: list[Any] = dataclasses.field(default_factory=list)
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    given: dict[int, int] = dataclasses.field(default_factory=dict)
    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    wanting: frozenset[int] = frozenset()
    reaches: list[frozenset[int]] = dataclasses.field(default_factory=list)

    def take(self, result: Any, arguments: StandIns, leaves: Leaves) -> list[Tensor]:
        """Note the result of a forward; return the tensors that its graph writes."""
        values, self.spec = flatten(result)
        places = {id(leaf): at for at, leaf in enumerate(arguments.passed) if isinstance(leaf, Tensor)}
        self.outputs += arguments.written(values)
        numbers = {id(output): number for number, output in enumerate(self.outputs)}
        originals = {id(other): tensor for tensor, other in zip(arguments.originals, arguments.tensors, strict=True)}
        self.leaves = [originals.get(id(value)) for value in values]
        for place, value in enumerate(values):
            if id(value) in numbers:
                self.written[place], self.leaves[place] = numbers[id(value)], None
            elif id(value) in places:
                self.given[place], self.leaves[place] = places[id(value)], None
            elif self.leaves[place] is None:
                self.leaves[place] = value
        self.wanting = frozenset(at for at, output in enumerate(self.outputs) if output.requires_grad)
        numbers_of_targets = {id(target): at for at, target in enumerate(arguments.targets)}
        for output in self.outputs:
            reached = leaves_reached([output])
            strange = [tensor for tensor in reached if id(tensor) not in numbers_of_targets]
            if strange:
                cause = f"gradients flow to {leaves.name_of(strange[0])}, which the forward does not find in its module"
                raise HostError(cause, "Register it as a parameter, and use it from there.")
            self.reaches.append(frozenset(numbers_of_targets[id(tensor)] for tensor in reached))
        for tensor, other in zip(arguments.originals, arguments.tensors, strict=True):
            if tensor.data_ptr() != other.data_ptr():
                cause = f"the forward gives {leaves.name_of(tensor)} other memory"
                raise HostError(cause, "Write to it in place.")
        return list(self.outputs)

    def nest(self, outputs: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
        """Return the result of a replay, in the forward's structure."""
        leaves = list(self.leaves)
        for place, number in self.written.items():
            leaves[place] = outputs[number]
        for place, index in self.given.items():
            leaves[place] = arguments[index]
        return cast(TreeSpec, self.spec).unflatten(leaves)


def written_outputs(values: Sequence[Any], given: Sequence[Any]) -> list[Tensor]:
    """List the tensors that a forward returned, each once, except those that it was given."""
    given_ids = {id(value) for value in given}
    return list(
        {id(value): value for value in values if isinstance(value, Tensor) and id(value) not in given_ids}.values()
    )


class Recording:
    """Runs the forward and the backwards of one call for their captures.

    Args:
        call: the call; invoke: runs its module with other arguments.
        leaves: tensors of the module; inputs: the static inputs of the graphs.
        state_key: the configuration's `state_key`.

    Attributes:
        notes: notes of eager backwards; module_tensors: all tensors of the module that may require gradients.
        backwards: for each backward, the numbers of outputs that it is given gradients of, and of leaves that get some.
        gradients: buffers for the gradients of outputs.
        last: the key of the backward that is captured last.
        retains: True if the first backward keeps saved tensors.
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
        self._host_arguments = (
            inputs.host_arguments(call.layout.args, shows_python=call.shows_python) if call.layout.hosted else None
        )
        self.arguments = StandIns(call, inputs.leaves(call.layout.args, call.padded), leaves)
        self.tape, self.module_tensors = Tape(), leaves.tensors
        self.retains = notes.needs.retained
        # Outside of the pool, since they are filled between the two graphs.
        self.gradients = [look.buffer() if look.wanting else None for look in notes.outputs]
        self.backwards: list[tuple[frozenset[int], list[int]]] = []
        self.last: Hashable = None
        # With a cache, as in eager, gradients of a weight's casts are added in the lower precision.
        self._caches = torch.is_autocast_cache_enabled()

    def jobs(self, key: tuple[Hashable, ...], generators: tuple[torch.Generator, ...]) -> list[CaptureJob]:
        """Make the jobs: the forward, the backward of outputs that usually get gradients, and one of all outputs."""
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
        self.last = (*key, list(runs)[-1])
        return [
            CaptureJob(
                (*key, part),
                *kind,
                run,
                generators,
                inputs,
                self._leaves.name_of,
                part=part,
                follows=None if part == "forward" else (*key, "forward"),
                host_error=call.binding.host_error,
                arguments=self._host_arguments,
                record=call.binding.size((*key, part)),
                trains=True,
                values=call.layout.values,
            )
            for part, run in runs.items()
        ]

    def forward(self) -> list[Tensor]:
        """Run the forward on static inputs, with stand-ins for its leaves."""
        call = self._call
        captured_run = call.binding.repeated_changes[call.padded].captured_run(call.module, self._state_key)
        with captured_run, autocast_cache(enabled=self._caches):
            result = self.arguments.run(self._invoke)
        refusal = call.binding.refusal
        if refusal is not None:
            raise HostError(f"{refusal.reason.text} ({refusal.detail})", "Return results instead.")
        outputs = self.tape.take(result, self.arguments, self._leaves)
        # Strides may follow those of inputs, and the buffer of an output's gradient serves any strides.
        looks, expected = (
            [look._replace(stride=()) for look in group] for group in (look_at(outputs), self.notes.outputs)
        )
        if looks != expected:
            raise HostError(
                "the outputs differ from those of the call before in number, shape, dtype, device or requires_grad",
                "Make them depend on the inputs alone.",
            )
        return outputs

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Refuse a backward that changes Python state, such as a counter in a custom function, and restore the state.

        State that only a first backward changes was changed by an eager one before.
        """
        run = PythonEffects(self._call.module)
        yield
        changed = run.put_back()
        if changed:
            cause = f"the backward changes {', '.join(sorted(changed))}, and a replay runs no Python"
            raise HostError(cause, "Change it outside of the backward, or leave training=True away.")

    def _backward(self, pattern: frozenset[int], *, last: bool) -> list[Tensor]:
        """Run the backward for some outputs; `last` if it is captured last."""
        tape, targets = self.tape, self.arguments.targets
        numbers = sorted(pattern)
        dtype = self.notes.needs.autocast
        around = torch.autocast(self.notes.device_type, dtype, enabled=dtype is not None)
        try:
            with self._unchanged(), around, autocast_cache(enabled=self._caches), bypassed(Reason.NESTED):
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
        self.backwards.append((pattern, places))
        return made


def _laid_as(leaf: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in the layout that torch keeps in `.grad`, so that torch does not copy it again.

    Raises:
        HostError: it is sparse.
    """
    if grad.layout is not torch.strided:
        cause = f"the gradient of a leaf of shape {tuple(leaf.shape)} has layout {grad.layout}"
        raise HostError(cause, "Ask the layer for dense gradients (sparse=False).")
    if grad.stride() == torch.empty_like(leaf, device="meta").stride():
        return grad
    return torch.empty_like(leaf, dtype=grad.dtype).copy_(grad)
