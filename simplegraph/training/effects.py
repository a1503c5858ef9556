"""What a training step does beside returning a result, gradients above all; its module, and its replays."""

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
from simplegraph.base.nested import ATOMS, TreeSpec, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Call
from simplegraph.call.plan import Copies, Plan
from simplegraph.device.select import graph_device
from simplegraph.guard.functions import CodePlace, FunctionModule, Reach
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

_STEP_HOOKS = _optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks


class StepState(NamedTuple):
    """The Python state in a step's key.

    Attributes:
        values: plain values that it and its optimizers read; objects: what else optimizers hold.
        gradients: which there are; hooks: likewise.
    """

    values: Hashable
    objects: Hashable
    gradients: Hashable
    hooks: Hashable


class StepEffects:
    """The effects of a training step beside its result.

    Args:
        optimizers: those that it calls.
        scaler: the gradient scaler that it calls, if any.

    Attributes:
        gradients: of all parameters that it may reach.
        used: the indices of those that the calls served now read at their begin.
        left: what a captured run left of them.
        found: parameters that got gradients and that nothing else led to.
        held: the states, groups and functions of the optimizers, by name.
        proven: a graph was proven since the last replay.
        refused_hooks: hooks that no capture can stand for, by their kind; else empty.
    """

    def __init__(self, optimizers: StepOptimizers, scaler: Any, modules: Sequence[nn.Module]) -> None:
        self.optimizers, self.scaler, self.modules = optimizers, scaler, modules
        self.gradients = Gradients()
        self.left: list[Any] | None = None
        self.found: list[Tensor] = []
        self.held: dict[str, Any] = {}
        self.used: set[int] = set()
        self.proven = False
        self.refused_hooks = ""
        self._passed: dict[int, list[int]] = {}
        self._trained = False
        self._met: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._used: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._serving: Callable[[], Any] = bool  # weakly, for it owns static inputs

    def hooks(self) -> list[Any]:
        """List the hooks of parameters and optimizers: a capture runs them, and a replay does not."""
        parameters = {id(each): each for each in (*self.optimizers.parameters, *self.gradients.parameters)}.values()
        on_gradients = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in parameters]
        on_steps = [(each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks) for each in self.optimizers.all]
        on_nodes = [held for each in parameters if each.requires_grad and each.is_leaf for held in _node_hooks(each)]
        self._hooks = [held for pair in (*on_steps, *on_gradients) for held in pair if held is not None]
        of_several = any(_is_of_several(hook) for held in self._hooks for hook in held.values())
        self.refused_hooks = "hooks on AccumulateGrad nodes" if any(on_nodes) else ""
        if of_several:
            self.refused_hooks = "hooks on several gradients (register_multi_grad_hook)"
        self._hooks += on_nodes
        self._hook_ids = tuple(number for held in self._hooks for number in held)
        self._known_hooks = RemovableHandle.next_id, list(map(len, self._hooks))
        return [] if self.refused_hooks else [hook for held in self._hooks for hook in held.values()]

    def hook_ids(self) -> Hashable:
        """Return the numbers of the hooks; they are looked for if one was added to anything, or removed."""
        if self._known_hooks != (RemovableHandle.next_id, list(map(len, self._hooks))):
            self.hooks()
        return self._hook_ids

    def serve(self, binding: Any) -> None:
        """Note which calls are served next."""
        self._serving, self.used = weakref.ref(binding), self._used.setdefault(binding, set())

    def note_read(self, observers: Iterable[MemoryObserver]) -> set[int]:
        """Note which gradients an eager run read of those that it found; return the keys of their memory."""
        for observer in observers:
            if not observer.captures:
                read = (indices for key, indices in self._passed.items() if key in observer.external)
                self.used.update(itertools.chain.from_iterable(read))
        return self._passed.keys() - self.gradients.fix(self.used)

    def note_leaves(self, result: Any, *, captured: bool) -> None:
        """Note parameters that got gradients though neither the code nor the optimizers tell of them."""
        known = set(map(id, self.gradients.parameters))
        outputs = (leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
        leaves = [leaf for leaf in leaves_reached(outputs) if id(leaf) not in known]
        # A tensor that the step itself made a leaf is gone with the run.
        unknown = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or self._met.get(id(leaf)) is leaf]
        self._met = weakref.WeakValueDictionary({id(leaf): leaf for leaf in leaves})
        if unknown and captured:
            cause = f"a parameter of shape {tuple(unknown[0].shape)} got a gradient, but nothing led to it"
            raise CaptureError(f"capturing the step failed\n  {cause}.\n  Name its module in modules=.", cause=cause)
        self.found += unknown

    def check_trained(self, result: Any) -> None:
        """Refuse a step that leaves its backward to the caller, who gets no graph of autograd for it."""
        gradients = (parameter.grad for parameter in self.gradients.parameters)
        self._trained = self._trained or self.optimizers.stepped or any(each is not None for each in gradients)
        if not self._trained and any(map(_wants_grad, flatten(result)[0])):
            raise InputError(
                "the training step returned a loss that requires grad, but called neither backward nor the optimizer. "
                "Call loss.backward() and optimizer.step() inside of the step; what it returns is detached."
            )

    @contextlib.contextmanager
    def around_eager(self, *, observed: bool) -> Iterator[None]:
        """Surround a run that computes; `observed` if `note_read` will tell what it read."""
        self._passed = self.gradients.passed() if observed else {}
        serving = self._serving() if observed else None
        replicas = replicas_refused(serving) if serving else contextlib.nullcontext()
        # What is learnt from is computed as a replay computes it, what only runs as the user wrote it.
        rates = self.optimizers.mirrored() if observed else contextlib.nullcontext()
        with rates, self.optimizers.watched(), replicas:
            yield

    @contextlib.contextmanager
    def around_capture(self) -> Iterator[None]:
        """Surround a captured run: nothing that it changes in Python stays."""
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
                self.left = self.gradients.end_capture(before, used)
            finally:
                self.gradients.put(before)


def _node_hooks(parameter: Tensor) -> list[Any]:
    """List the dicts of hooks on the node that adds to a parameter's gradient; they live as long as somebody holds it.

    Only the garbage collector sees them.
    """
    with torch.inference_mode(False), torch.enable_grad():  # others look, too, such as who puts a process to sleep
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    own = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    found = (held for held in gc.get_referents(node) if isinstance(held, dict) and held)
    return [held for held in found if not any(held is each for each in own)]


def _is_of_several(hook: Any) -> bool:
    """True for what torch calls in place of the user's hook of several tensors: it counts them in Python."""
    return isinstance(hook, types.FunctionType) and hook.__globals__ is vars(torch.autograd.graph)


class StepModule(FunctionModule):
    """A module whose forward is a training step.

    Args:
        function: the step.
        optimizers, scaler: what it calls.
        modules: what it trains, beside what it reaches by its code.
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
        self._optimizer_reach = Reach()

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = next((parameter.device for parameter in self.step.gradients.parameters), torch.device("cpu"))
        graphs = graph_device(device) if device.type in ("cpu", "cuda") else None
        # Inside of somebody else's capture the caller's grad mode is on; ours switches it off around the function.
        captures = graphs is not None and not torch.is_grad_enabled() and graphs.is_capturing()
        observed = CALLS.context is not None and CALLS.context.bypass is Reason.NESTED  # by who learns of the step
        with contextlib.ExitStack() as stack:
            if captures:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(self.step.around_capture())
            else:
                stack.enter_context(self.step.around_eager(observed=observed))
            stack.enter_context(autocast_cache(enabled=True))  # casts from outside are of weights before the step
            result = self.function(*args, **kwargs)
            if observed:
                self.step.note_leaves(result, captured=captures)
            if observed and graphs is not None and not captures:
                set_up_backwards(graphs)
        leaves, spec = flatten(result)  # autograd's graph has no memory left
        if not captures:
            self.step.check_trained(result)
            self.step.optimizers.note_returned(leaves)
        return spec.unflatten([leaf.detach() if _wants_grad(leaf) else leaf for leaf in leaves])

    def _find_places(self) -> list[CodePlace]:
        step = self.step
        modules = {f"modules.{index}": module for index, module in enumerate(step.modules)}
        places = self._reach.find([self.function, *step.hooks()])
        step.optimizers.note_code(self._reach.codes, [place.value for place in places])
        states = step.optimizers.look(step.scaler)
        places += self._optimizer_reach.find(users_functions(states))
        held = (place for place in states if type(place.holder) not in (Entries, Lengths))
        restore(step.held, {place.name: place.value for place in held if not issubclass(type(place.value), ATOMS)})
        return [*places, *(CodePlace(name, modules, name, modules[name]) for name in modules), *states]

    def _may_hold(self, place: CodePlace) -> bool:
        return place.name not in self.step.held and super()._may_hold(place)

    def resolve(self) -> None:
        super().resolve()
        step, values = self.step, [place.value for place in self.values.places]
        found = (each for each in values if issubclass(type(each), torch.amp.GradScaler))
        if step.scaler is None and (scaler := next(found, None)) is not None:
            step.scaler = scaler
            super().resolve()
        step.optimizers.check(values, step.scaler)
        own = [*step.optimizers.parameters, *self.parameters(), *step.found]
        step.gradients.use(parameter for parameter in own if isinstance(parameter, Tensor))
        step.hooks()

    def held(self) -> list[dict[str, Any]]:
        return [*super().held(), self.step.held]

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
        return StepState(super().state(), step.optimizers.objects, gradients, hooks)

    def serve(self, binding: Any) -> None:
        self.step.serve(binding)

    def note_read(self, observers: Iterable[MemoryObserver]) -> set[int]:
        return self.step.note_read(observers)

    def is_over(self, context: Any) -> bool:
        """True if it, or its optimizers, read other values by now, such as the next epoch's weight decay."""
        return isinstance(context[1], StepState) and context[1][:2] != (self.values.key, self.step.optimizers.objects)

    def with_effects(self, whole: Any) -> Any:
        left, self.step.left = self.step.left, None
        return whole if left is None else WithGradients(whole, tuple(left))


def optimizers_of(module: nn.Module) -> list[torch.optim.Optimizer]:
    """List the optimizers that a training step's module calls; none for another module."""
    return module.step.optimizers.all if isinstance(module, StepModule) else []


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class WithGradients(NamedTuple):
    """Holds what a captured step returns, and the gradients that it leaves, in the order of its parameters."""

    result: Any
    gradients: tuple[Any, ...]


class StepPlan(Plan):
    """Serves training steps; see `Plan`."""

    @staticmethod
    def returned(program: Program) -> tuple[Sequence[Any], TreeSpec]:
        """Return the leaves that the step itself returned, and how they nest."""
        spec = program.spec.children[0]
        return program.outputs[: spec.num_leaves], spec

    def _prepare_outputs(self, call: Call, whole: Sequence[Any], spec: TreeSpec) -> None:
        self.step: StepEffects = call.module.step
        self._used = sorted(self.step.used)
        count = spec.children[0].num_leaves
        self._left = whole[count:]
        self.step.gradients.note_made(left for left in self._left if self._is_made(left))
        self._kept = [index for index, gradient in enumerate(self._left) if gradient is KEPT]
        self._known: Sequence[Any] = ()
        super()._prepare_outputs(call, whole[:count], spec.children[0])
        self.compared = [*self.outputs, *self._left]

    def _is_made(self, gradient: Any) -> bool:
        return isinstance(gradient, Tensor) and self.device.in_pool(self.pool, gradient)

    def whole(self, result: Any) -> Any:
        """Return eager's result, and the gradients that it left."""
        found = (parameter.grad for parameter in self.step.gradients.parameters)
        left = zip(found, self._left, strict=True)
        return WithGradients(super().whole(result), tuple(KEPT if then is KEPT else now for now, then in left))

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        """Let an eager run find the gradients where replays do."""
        self._enter()
        yield
        self.step.proven = not self.unproven

    def replay(self, leaves: Sequence[Any], copies: Copies) -> Any:
        step = self.step
        entry = step.gradients.entry
        known = self._known
        same = len(known) == len(entry) and all(map(operator.is_, entry, known))
        if not same:
            self._enter()
        step.optimizers.refresh(self.table.order_streams)
        result = super().replay(leaves, copies)
        if not same:
            self._leave()
        if step.proven:  # give back what the proof took, and eager's last gradients, among which it lies
            step.proven = False
            step.gradients.state()
            self.device.release_cached_memory()
        return result

    def _enter(self) -> None:
        """Bring the gradients that the graph reads, and those that its replay would overwrite, to their places."""
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
        """Let every `.grad` be the graph's."""
        gradients = self.step.gradients
        found = []
        for parameter, left in zip(gradients.parameters, self._left, strict=True):
            gradient = parameter.grad
            if left is KEPT:
                found.append(gradient)
                continue
            if gradient is not left and (gradient is None or left is None or not shows_the_same(gradient, left)):
                parameter.grad = left
            found.append(parameter.grad)
        self._known = found
