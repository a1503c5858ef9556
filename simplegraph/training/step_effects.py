"""The effects of a training step beside its result, mainly gradients; its module, and its replays."""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as _optimizer
from torch.utils.hooks import RemovableHandle

from simplegraph.base.context import CALLS
from simplegraph.base.errors import CaptureError, InputError
from simplegraph.base.extras import harmless_step_hooks
from simplegraph.base.failures import OPTIMIZER_OUTSIDE
from simplegraph.base.modes import autocast_cache
from simplegraph.base.nested import ATOMS, TreeSpec, constant_key, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import wants_grad
from simplegraph.call.call import Call
from simplegraph.call.plan import Copies, Plan
from simplegraph.device.select import graph_device
from simplegraph.guard.functions import CodePlace, FunctionModule, Reach, ReachedPlaces
from simplegraph.guard.torch_state import GLOBAL_BACKWARD_HOOKS, GLOBAL_BACKWARD_PRE_HOOKS
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.program import Program
from simplegraph.program.snapshot import restore
from simplegraph.training.gradients import (
    KEPT,
    Gradients,
    leaves_reached,
    replicas_refused,
    set_up_backwards,
    shows_the_same,
)
from simplegraph.training.held_values import Entries, Lengths, users_functions
from simplegraph.training.optimizers import StepOptimizers, kept_python

_MAX_CHANGES = 3  # new values in a row, each soon after the last, before calls run eagerly
_OFTEN = 8  # calls: a new value within so many after the last counts as soon
_CHANGING = "takes new values all the time, and each needs a graph of its own"
_CHANGE_OUTSIDE = (
    "change it outside the function, pass it as a tensor, or rename it if the code has its name for something else"
)
_LET_OPTIMIZER_READ = (
    "Adam, AdamW and SGD with fused=True take lr from the device, unless the step's own code reads param_groups, which "
    "can be read outside of it; cycle_momentum=False of OneCycleLR and CyclicLR leaves betas and momentum; and "
    "simplegraph.wrap(model, training=True) leaves the optimizer out of graphs"
)
_STEP_HOOKS = _optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks


class StepState(NamedTuple):
    """The Python state in a step's key.

    Attributes:
        values: plain values that its optimizers and hooks read; objects: other objects that optimizers hold.
        gradients: which parameters have and require gradients; hooks: the hooks' numbers.
    """

    values: Hashable
    objects: Hashable
    gradients: Hashable
    hooks: Hashable


class StepEffects:
    """The effects of a training step beside its result.

    Args:
        optimizers: the optimizers that it calls.
        scaler: the gradient scaler that it calls, if any.

    Attributes:
        gradients: the gradients of all parameters that it may reach.
        used: the indices of gradients that steps of the present signature read at their start.
        left_gradients: the gradients that a captured run left; None outside of a capture.
        discovered_parameters: parameters that got gradients, and that neither the code nor the optimizers lead to.
        optimizer_objects: the states, groups and functions of the optimizers, by name.
        proven: True if a graph was proven since the last replay.
        refused_hooks: the kind of hooks that no capture can repeat; empty if there are none.
    """

    def __init__(self, optimizers: StepOptimizers, scaler: Any, modules: Sequence[nn.Module]) -> None:
        self.optimizers, self.scaler, self.modules = optimizers, scaler, modules
        self.gradients = Gradients()
        self.left_gradients: list[Any] | None = None
        self.discovered_parameters: list[Tensor] = []
        self.optimizer_objects: dict[str, Any] = {}
        self.used: set[int] = set()
        self.proven = False
        self.refused_hooks = ""
        self._passed: dict[int, list[int]] = {}
        self._trained = False
        self._met: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._used: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._serving: Callable[[], Any] = bool  # a weak reference to the binding, which owns static inputs

    def hooks(self) -> list[Any]:
        """List the hooks of parameters and optimizers: a capture runs them, and a replay does not."""
        parameters = {
            id(parameter): parameter for parameter in (*self.optimizers.parameters, *self.gradients.parameters)
        }.values()
        on_gradients = [(parameter._backward_hooks, parameter._post_accumulate_grad_hooks) for parameter in parameters]
        on_steps = [
            (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
            for optimizer in self.optimizers.all
        ]
        on_nodes = [
            hooks
            for parameter in parameters
            if parameter.requires_grad and parameter.is_leaf
            for hooks in _node_hooks(parameter)
        ]
        self._hooks = [hooks for pair in (*on_steps, *on_gradients) for hooks in pair if hooks is not None]
        of_several = any(_is_of_several(hook) for hooks in self._hooks for hook in hooks.values())
        self.refused_hooks = "hooks on AccumulateGrad nodes" if any(on_nodes) else ""
        if of_several:
            self.refused_hooks = "hooks on several gradients (register_multi_grad_hook)"
        self._hooks += on_nodes
        self._hook_ids = tuple(number for hooks in self._hooks for number in hooks)
        self._known_hooks = RemovableHandle.next_id, list(map(len, self._hooks))
        return [] if self.refused_hooks else [hook for hooks in self._hooks for hook in hooks.values()]

    def hook_ids(self) -> Hashable:
        """Return the numbers of the hooks; hooks are listed again if one was added anywhere, or removed."""
        if self._known_hooks != (RemovableHandle.next_id, list(map(len, self._hooks))):
            self.hooks()
        return self._hook_ids

    def serve(self, binding: Any) -> None:
        """Note the binding whose calls are served next."""
        self._serving, self.used = weakref.ref(binding), self._used.setdefault(binding, set())

    def note_read(self, observers: Iterable[MemoryObserver]) -> set[int]:
        """Note which of the gradients from before an eager run read; return the storage keys of the others."""
        for observer in observers:
            if not observer.captures:
                read = (indices for key, indices in self._passed.items() if key in observer.external)
                self.used.update(itertools.chain.from_iterable(read))
        return self._passed.keys() - self.gradients.fix(self.used)

    def note_leaves(self, result: Any, *, captured: bool) -> None:
        """Note parameters that got gradients, though neither the code nor the optimizers lead to them."""
        known_ids = set(map(id, self.gradients.parameters))
        outputs = (leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
        leaves = [leaf for leaf in leaves_reached(outputs) if id(leaf) not in known_ids]
        # A leaf that the step itself made is gone after the run.
        unknown = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or self._met.get(id(leaf)) is leaf]
        self._met = weakref.WeakValueDictionary({id(leaf): leaf for leaf in leaves})
        if unknown and captured:
            cause = f"a parameter of shape {tuple(unknown[0].shape)} got a gradient, but nothing led to it"
            raise CaptureError(f"capturing the step failed\n  {cause}.\n  Name its module in modules=.", cause=cause)
        self.discovered_parameters += unknown

    def check_trained(self, result: Any) -> None:
        """Refuse a step that leaves its backward to the caller: its results have no autograd graph."""
        gradients = (parameter.grad for parameter in self.gradients.parameters)
        self._trained = self._trained or self.optimizers.stepped or any(gradient is not None for gradient in gradients)
        if not self._trained and any(map(wants_grad, flatten(result)[0])):
            raise InputError(
                "the training step returned a loss that requires grad, but called neither backward nor the optimizer. "
                "Call loss.backward() and optimizer.step() inside of the step; what it returns is detached."
            )

    @contextlib.contextmanager
    def around_eager(self, *, observed: bool) -> Iterator[None]:
        """Surround an eager run; `observed` is True if `note_read` will be called for it."""
        self._passed = self.gradients.passed() if observed else {}
        serving = self._serving() if observed else None
        replicas = replicas_refused(serving) if serving else contextlib.nullcontext()
        # An observed run computes as a replay will; other runs compute as the user wrote the step.
        rates = self.optimizers.mirrored() if observed else contextlib.nullcontext()
        with rates, self.optimizers.watched(), replicas:
            yield

    @contextlib.contextmanager
    def around_capture(self) -> Iterator[None]:
        """Surround a captured run, and undo its changes of Python state."""
        self._passed = {}
        used = sorted(self.used)
        with kept_python(self.optimizers.all, self.scaler) as changed:
            before = self.gradients.begin_capture(used)
            try:
                with self.optimizers.mirrored(refresh=False), self.optimizers.watched():
                    yield
                named, cause = changed()[:5], self.optimizers.refusal
                if named and not cause:
                    cause = (
                        f"{', '.join(named)} would change only while the step runs in Python, and a replay runs none"
                    )
                    cause += f"; {OPTIMIZER_OUTSIDE}" * named[0].startswith("optimizers.")
                if cause:
                    raise CaptureError(f"capturing the step failed\n  {cause}.", cause=cause)
                self.left_gradients = self.gradients.end_capture(before, used)
            finally:
                self.gradients.put(before)


def _node_hooks(parameter: Tensor) -> list[Any]:
    """List the dicts of hooks on a parameter's AccumulateGrad node; they live as long as anything holds the node.

    Only the garbage collector can list them.
    """
    with torch.inference_mode(False), torch.enable_grad():  # callers may be in other modes, such as `sleep`
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    registered = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    dicts = (referent for referent in gc.get_referents(node) if isinstance(referent, dict) and referent)
    return [hooks for hooks in dicts if not any(hooks is other for other in registered)]


def _is_of_several(hook: Any) -> bool:
    """True for the function that torch registers for a user's hook on several tensors: it counts them in Python."""
    return isinstance(hook, types.FunctionType) and hook.__globals__ is vars(torch.autograd.graph)


class StepPlaces(ReachedPlaces):
    """Watches the places that a step may read, and makes a key of the plain values that only optimizers and hooks read.

    Attributes:
        keyed: the places whose values are in the key, as (id of the holder, key).
        key: the plain values in them.
    """

    def __init__(self) -> None:
        self.keyed: set[tuple[int, Any]] = set()
        self.key: tuple[Any, ...] = ()
        self._seen: set[Hashable] = set()
        self._since = self._changes = 0
        self._often: list[str] = []  # names of the values that changed last
        super().__init__()

    def moved(self) -> bool:
        self._since += 1
        return super().moved()

    def _take(self, holders: list[Any], keys: list[Any], values: list[Any]) -> None:
        super()._take(holders, keys, values)
        plain = [
            (place.name, (type(value), constant_key(value)))
            for place, value in zip(self.places, values, strict=True)
            if issubclass(type(value), ATOMS) and (id(place.holder), place.key) in self.keyed
        ]
        key = tuple(value for _, value in plain)
        if key == self.key:
            return
        is_often = self._since <= _OFTEN and key not in self._seen and len(key) == len(self.key)
        self._changes = self._changes + 1 if is_often else 0
        if self._changes < _MAX_CHANGES:
            self._seen.add(key)
        self._often = [name for (name, new), old in zip(plain, self.key, strict=False) if new != old]
        self._since, self.key = 0, key

    def state(self) -> Hashable:
        """Return the key, the same object until a value changes. Raises CannotBind."""
        if self._changes >= _MAX_CHANGES and self._since <= _OFTEN:
            of_optimizer = any("param_groups" in name or name.startswith("optimizers.") for name in self._often)
            remedy = _LET_OPTIMIZER_READ if of_optimizer else _CHANGE_OUTSIDE
            raise CannotBind(Reason.PYTHON_STATE, f"{', '.join(self._often)} {_CHANGING}: {remedy}")
        return self.key


class StepModule(FunctionModule):
    """A module whose forward is a training step.

    Args:
        function: the step.
        optimizers, scaler: the optimizers and the gradient scaler that it calls.
        modules: modules that it trains, beside those that its code reaches.
    """

    computes_gradients = True

    def __init__(
        self,
        function: Callable[..., Any],
        optimizers: StepOptimizers,
        scaler: Any,
        modules: Sequence[nn.Module],
    ) -> None:
        super().__init__(function)
        self.step = StepEffects(optimizers, scaler, modules)
        self.watched: StepPlaces = StepPlaces()
        self._optimizer_reach = Reach()

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = next((parameter.device for parameter in self.step.gradients.parameters), torch.device("cpu"))
        graphs = graph_device(device) if device.type in ("cpu", "cuda") else None
        # In a capture by other code the caller's grad mode is on; our capture switches it off around the function.
        captures = graphs is not None and not torch.is_grad_enabled() and graphs.is_capturing()
        observed = CALLS.context is not None and CALLS.context.bypass is Reason.NESTED  # by the builder of its graphs
        with contextlib.ExitStack() as stack:
            if captures:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(self.step.around_capture())
            else:
                stack.enter_context(self.step.around_eager(observed=observed))
            stack.enter_context(autocast_cache(enabled=True))  # casts made outside are of the weights before the step
            result = self.function(*args, **kwargs)
            if observed:
                self.step.note_leaves(result, captured=captures)
            if observed and graphs is not None and not captures:
                set_up_backwards(graphs)
        leaves, spec = flatten(result)  # the backward has released the memory of autograd's graph
        if not captures:
            self.step.check_trained(result)
            self.step.optimizers.note_returned(leaves)
        return spec.unflatten([leaf.detach() if wants_grad(leaf) else leaf for leaf in leaves])

    def _find_places(self) -> list[CodePlace]:
        step = self.step
        modules = {f"modules.{index}": module for index, module in enumerate(step.modules)}
        hooks = step.hooks()
        places = self._reach.find([self.function, *hooks])
        step.optimizers.note_code(self._reach.codes, [place.value for place in places])
        states = step.optimizers.look(step.scaler)
        of_optimizers = self._optimizer_reach.find(users_functions(states))
        # Values that the step itself reads are in the key of every call; values that hooks read are not.
        keyed = *of_optimizers, *states, *(places if hooks else ())
        self.watched.keyed = {(id(place.holder), place.key) for place in keyed}
        objects = (place for place in states if type(place.holder) not in (Entries, Lengths))
        restore(
            step.optimizer_objects,
            {place.name: place.value for place in objects if not issubclass(type(place.value), ATOMS)},
        )
        trained = (CodePlace(name, modules, name, modules[name]) for name in modules)
        return [*places, *of_optimizers, *trained, *states]

    def _may_hold(self, place: CodePlace) -> bool:
        return place.name not in self.step.optimizer_objects and super()._may_hold(place)

    def resolve(self) -> None:
        super().resolve()
        step, values = self.step, [place.value for place in self.watched.places]
        scalers = (value for value in values if issubclass(type(value), torch.amp.GradScaler))
        if step.scaler is None and (scaler := next(scalers, None)) is not None:
            step.scaler = scaler
            super().resolve()
        step.optimizers.check(values, step.scaler)
        tensors = [*step.optimizers.parameters, *self.parameters(), *step.discovered_parameters]
        step.gradients.use(parameter for parameter in tensors if isinstance(parameter, Tensor))
        step.hooks()

    def held(self) -> list[dict[str, Any]]:
        return [*super().held(), self.step.optimizer_objects]

    def state(self) -> Hashable:
        if not torch.is_grad_enabled():
            raise CannotBind(Reason.UNTRAINABLE, "grad mode is off: call the step outside of torch.no_grad()")
        on_steps = (hook for hooks in _STEP_HOOKS for hook in hooks.values())
        if GLOBAL_BACKWARD_HOOKS or GLOBAL_BACKWARD_PRE_HOOKS or not harmless_step_hooks.issuperset(on_steps):
            raise CannotBind(Reason.HOOKS, "backward hooks on all modules, or step hooks on all optimizers")
        step = self.step
        if step.optimizers.refusal:
            raise CannotBind(Reason.UNTRAINABLE, step.optimizers.refusal)
        if len(step.gradients.devices) > 1:
            raise CannotBind(Reason.WRONG_DEVICE, f"parameters are on {', '.join(step.gradients.devices)}")
        gradients = step.gradients.state()
        if step.gradients.refusal:
            raise CannotBind(Reason.UNTRAINABLE, step.gradients.refusal)
        hooks = step.hook_ids()
        if step.refused_hooks:
            raise CannotBind(Reason.HOOKS, step.refused_hooks)
        super().state()
        return StepState(self.watched.state(), step.optimizers.objects, gradients, hooks)

    def serve(self, binding: Any) -> None:
        self.step.serve(binding)

    def note_read(self, observers: Iterable[MemoryObserver]) -> set[int]:
        return self.step.note_read(observers)

    def is_over(self, context: Any) -> bool:
        """True if the step or its optimizers now read other values, such as the next epoch's weight decay."""
        return isinstance(context[1], StepState) and context[1][:2] != (self.watched.key, self.step.optimizers.objects)

    def with_effects(self, whole: Any) -> Any:
        gradients, self.step.left_gradients = self.step.left_gradients, None
        return whole if gradients is None else WithGradients(whole, tuple(gradients))


def optimizers_of(module: nn.Module) -> list[torch.optim.Optimizer]:
    """List the optimizers that a training step's module calls; none for another module."""
    return module.step.optimizers.all if isinstance(module, StepModule) else []


class WithGradients(NamedTuple):
    """Holds the result of a captured step, and the gradients that it leaves, in the order of its parameters."""

    result: Any
    gradients: tuple[Any, ...]


class StepPlan(Plan):
    """Serves training steps; see `Plan`."""

    only_replays = False  # a step also updates numbers of optimizers

    @staticmethod
    def returned(program: Program) -> tuple[Sequence[Any], TreeSpec]:
        """Return the leaves of the step's own result, and their structure."""
        spec = program.spec.children[0]
        return program.outputs[: spec.num_leaves], spec

    def _prepare_outputs(self, call: Call, whole: Sequence[Any], spec: TreeSpec) -> None:
        self.step: StepEffects = call.module.step
        self._used = sorted(self.step.used)
        count = spec.children[0].num_leaves
        self._left_gradients = whole[count:]
        tensors = (gradient for gradient in self._left_gradients if isinstance(gradient, Tensor))
        self.step.gradients.note_made(tensor for tensor in tensors if self.device.in_pool(self.pool, tensor))
        self._kept = [index for index, gradient in enumerate(self._left_gradients) if gradient is KEPT]
        self._entry_after_replay: Sequence[Any] = ()
        super()._prepare_outputs(call, whole[:count], spec.children[0])
        self.compared = [*self.outputs, *self._left_gradients]

    def for_comparison(self, result: Any) -> Any:
        """Return eager's result, and the gradients that it left."""
        gradients = (parameter.grad for parameter in self.step.gradients.parameters)
        pairs = zip(gradients, self._left_gradients, strict=True)
        left_by_eager = tuple(KEPT if left is KEPT else now for now, left in pairs)
        return WithGradients(super().for_comparison(result), left_by_eager)

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        """Put the gradients where replays read them, for an eager run."""
        self._enter()
        yield
        self.step.proven = not self.unproven

    def replay(self, leaves: Sequence[Any], copies: Copies) -> Any:
        step = self.step
        entry = step.gradients.entry
        expected = self._entry_after_replay
        same = len(expected) == len(entry) and all(map(operator.is_, entry, expected))
        if not same:
            self._enter()
        step.optimizers.refresh(self.table.order_streams)
        result = super().replay(leaves, copies)
        if not same:
            self._leave()
        if step.proven:  # release the proof's memory, and eager's last gradients, which lie among it
            step.proven = False
            step.gradients.state()
            self.device.release_cached_memory()
        return result

    def _enter(self) -> None:
        """Move gradients that the graph reads, and those that its replay would overwrite, to their fixed addresses."""
        self.table.order_streams()
        gradients = self.step.gradients
        gradients.enter(self._used)
        lost = []
        for index in self._kept:
            gradient = gradients.parameters[index].grad
            if gradient is not None and self.device.in_pool(self.pool, gradient):
                lost.append(index)
        gradients.enter(lost)

    def _leave(self) -> None:
        """Set every `.grad` to the graph's gradient."""
        gradients = self.step.gradients
        entry = []
        for parameter, left in zip(gradients.parameters, self._left_gradients, strict=True):
            gradient = parameter.grad
            if left is KEPT:
                entry.append(gradient)
                continue
            if gradient is not left and (gradient is None or left is None or not shows_the_same(gradient, left)):
                parameter.grad = left
            entry.append(parameter.grad)
        self._entry_after_replay = entry
