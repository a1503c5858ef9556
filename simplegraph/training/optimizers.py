"""Optimizers in a captured step: their preparation, and learning rates that are read on the device.

A graph freezes Python numbers. The learning rate changes most often, so if the optimizer accepts it, a 0-dim tensor on
the device replaces it, the mirror, only while the optimizer computes: all other code finds the user's own number in
`param_groups`. Other values are part of the key, and so is a learning rate that the step's own code may read: if one of
them changes, the step is captured again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from simplegraph.base.errors import ConfigError
from simplegraph.base.failures import OPTIMIZER_OUTSIDE
from simplegraph.base.modes import outside_modes
from simplegraph.base.objects import class_member
from simplegraph.base.tensors import is_wrapper
from simplegraph.guard.code_below import CodeNames
from simplegraph.guard.functions import Attributes, CodePlace
from simplegraph.program.snapshot import ABSENT, is_same, restore
from simplegraph.training.gradients import noted_calls
from simplegraph.training.held_values import MAX_HELD, HeldValues, numbers_of_state

logger = logging.getLogger("simplegraph")

Group = dict[str, Any]

# Optimizers that read a tensor as learning rate on the device: fused, capturable, or capturable with foreach only.
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_CAPTURABLE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD")
_CAPTURABLE_FOREACH = ("RMSprop", "Adadelta")
_UNREAD_COUNT = ("RMSprop", "Adadelta", "Rprop")  # count their steps, and never read the count
_REFUSED = {
    "LBFGS": f"decides on the host how often it calls its closure; {OPTIMIZER_OUTSIDE}",
    "SparseAdam": "takes sparse gradients, which no graph hands out; make its layers with sparse=False, and use "
    "Adam(fused=True)",
}
_UNREAD = frozenset({"initial_lr", "param_names"})  # by any step
_FIRST_RATE = ("Rprop",)  # reads its learning rate where it makes its state, and never again
_READ = frozenset({"param_groups", "grad_scale", "found_inf"})  # by optimizers of torch's own
_WHOLE_GROUP = frozenset({"items", "values", "copy", "deepcopy", "dict"})  # code that names these reads all of a group


class StepOptimizers:
    """The optimizers of a step.

    Args:
        optimizers: one optimizer, or a list of them.

    Attributes:
        refusal: why no graph can contain a step with them; empty if one can.
        stepped: True once an optimizer stepped in a step.
        rates_read: True if the step's own code may read learning rates, which are then part of the key.
        objects: the names of tensors that optimizers and scaler hold, and objects without plain values; a part of the
            key.

    Raises:
        ConfigError: something is not an optimizer, or only wraps one.
    """

    def __init__(self, optimizers: Any) -> None:
        several = isinstance(optimizers, Sequence) and not isinstance(optimizers, str)
        self.all: list[optim.Optimizer] = [*optimizers] if several else [optimizers]
        for optimizer in self.all:
            if not isinstance(optimizer, optim.Optimizer):
                raise ConfigError(f"optimizers has {optimizer!r}; expected a torch.optim.Optimizer, or a list of them.")
            if "_optimizer_step_pre_hooks" not in vars(optimizer):
                raise ConfigError(
                    f"optimizers has a {type(optimizer).__name__}, whose class does not call Optimizer.__init__, as "
                    "wrappers do not. Expected the optimizer that it wraps; call that one in the step."
                )
        self._mirrors: dict[tuple[int, int], Tensor] = {}  # by optimizer and group
        self._rates: list[float] = []
        self._mirrored: list[tuple[Group, Tensor]] = []
        self.refusal = self.scheduled = ""
        self.objects: tuple[Hashable, ...] = ()
        self._step_names = frozenset[str]()  # by the step's own code
        self.stepped = self.rates_read = self._rate_returned = False
        for optimizer in self.all:
            _prepare(optimizer)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [
            parameter for optimizer in self.all for group in optimizer.param_groups for parameter in group["params"]
        ]

    def check(self, values: Iterable[Any], scaler: Any) -> None:
        """Refuse graphs of steps that reach a scheduler, or whose scaler decides on the host to skip a step.

        Args:
            values: the objects that the step reaches; a scheduler belongs outside of it.
            scaler: the gradient scaler that it calls, if any.
        """
        scheduler = next((value for value in values if issubclass(type(value), _SCHEDULERS)), None)
        if scheduler is not None:
            self.refusal = self.scheduled = f"{type(scheduler).__name__}: {_SCHEDULED}"
        for optimizer in self.all if scaler is not None and scaler.is_enabled() else ():
            if not getattr(optimizer, "_step_supports_amp_scaling", False):
                remedy = "pass fused=True" if _has_fused(optimizer) else OPTIMIZER_OUTSIDE
                cause = f"GradScaler reads on the host if {type(optimizer).__name__} skips a step; {remedy}"
                self.refusal = self.scheduled = cause

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Refuse graphs if an optimizer that `optimizers=` does not name steps in the block: its numbers freeze."""
        with noted_calls(register_optimizer_step_pre_hook) as called:
            try:
                yield
            finally:
                self.stepped = self.stepped or bool(called)
                for other in (one for one in called if not any(one is optimizer for optimizer in self.all)):
                    self.refusal = self.scheduled = (
                        f"the step calls {type(other).__name__}, which optimizers= does not name"
                    )

    # The learning rates that Python reads.

    def note_code(self, codes: Iterable[CodeNames], values: Iterable[Any]) -> None:
        """Determine if code that a step runs may read a learning rate.

        Args:
            codes: the names in the code of each function.
            values: other objects that the step reaches, such as a group.
        """
        groups = [group for optimizer in self.all for group in optimizer.param_groups]
        group_ids = {*map(id, groups), *(id(optimizer.param_groups) for optimizer in self.all)}
        self._step_names = frozenset[str]().union(*(names.all for names in codes))
        parts = (part for value in values for part in (value, *(value if type(value) in (list, tuple) else ())))
        leading = [names.all for names in codes if "param_groups" in names.all]
        leading += [self._step_names] if any(id(part) in group_ids for part in parts) else []
        others = frozenset(key for group in groups for key in group if key != "lr")
        # Code that names only other keys, such as "params" to clip gradients, reads no rate.
        named = bool(leading) and "lr" in self._step_names
        self.rates_read = named or any(not names & others or names & _WHOLE_GROUP for names in leading)
        self.rates_read = self.rates_read or self._rate_returned

    def note_returned(self, leaves: Iterable[Any]) -> None:
        """Note if an eager step returned a learning rate, which a library's code may have read."""
        rates = [group["lr"] for group, _ in self._mirrored]
        self._rate_returned = self._rate_returned or any(type(leaf) is float and leaf in rates for leaf in leaves)

    # The learning rates on the device.

    def look(self, scaler: Any = None) -> list[CodePlace]:
        """List groups and mirrored learning rates again; return the places of all other values that steps read.

        Args:
            scaler: the gradient scaler that the step calls, if any.
        """
        self._mirrored = []
        self.refusal = next(filter(None, (unsuitable(optimizer) for optimizer in self.all)), self.scheduled)
        held_values = [] if scaler is None else [HeldValues("scaler", scaler, lambda key: key not in _OWN)]
        places, unread = [], dict[int, set[str]]()
        for number, optimizer in enumerate(self.all):
            name = f"optimizers.{number}"
            for index, group in enumerate(optimizer.param_groups):
                mirror = self._mirror(optimizer, group, (number, index))
                self._mirrored += [] if mirror is None else [(group, mirror)]
                followed = mirror is not None or _named(optimizer) in _FIRST_RATE
                unread[id(group)] = {*_UNREAD, *(("lr",) if followed and not self.rates_read else ())}
            apart = {id(group["params"]) for group in optimizer.param_groups}
            held_values.append(HeldValues(name, optimizer, functools.partial(self._counts, optimizer), apart))
            attributes: dict[str, Any] = {"state": vars(optimizer), "step": Attributes(optimizer)}
            places += [CodePlace(f"{name}.{key}", holder, key, holder[key]) for key, holder in attributes.items()]
            places += numbers_of_state(f"{name}.state", optimizer.state)
        for values in held_values:
            if not values.is_complete:
                self.refusal = self.refusal or f"{values.name} leads to more than {MAX_HELD} containers and objects"
            places += [place for place in values.places if place.key not in unread.get(id(place.holder), ())]
        tensors = (place.name for place in places if isinstance(place.value, Tensor))
        self.objects = (*tensors, *(same_object for values in held_values for same_object in values.objects))
        self._rates = [float("nan")] * len(self._mirrored)
        return places

    def _counts(self, owner: optim.Optimizer, key: str) -> bool:
        """True if steps may read an attribute of an optimizer: for torch's own optimizers, if code names it."""
        if key in _OWN or key == "state" or key.endswith("_hooks"):  # guarded separately
            return False
        named = key in _READ or key in self._step_names or class_member(type(owner), key) is not None
        return named or not _named(owner)

    def _mirror(self, owner: optim.Optimizer, group: Group, place: tuple[int, int]) -> Tensor | None:
        """Return the tensor that mirrors a group's learning rate; None if the number itself is used.

        A group that is loaded in the place of another gets the same tensor, since graphs read it.
        """
        rate: Any = group.get("lr")
        on_host = rate.is_cpu and rate.numel() == 1 if isinstance(rate, Tensor) else isinstance(rate, (int, float))
        if self.refusal or not on_host or not takes_tensor(owner, group):
            return None
        device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
        mirror = self._mirrors.get(place)
        if mirror is None or mirror.device != device:
            # Kernels on a GPU read 32 bits; the emulator's read all 64 bits of a float.
            kind = torch.float64 if device.type == "cpu" else torch.float32
            with outside_modes():
                mirror = self._mirrors[place] = torch.full((), float(rate), dtype=kind, device=device)
        return mirror

    def refresh(self, before: Callable[[], object] = bool) -> None:
        """Copy the user's learning rates to the mirrors; call `before` first if one changed."""
        rates = [float(group["lr"]) for group, _ in self._mirrored]
        if rates == self._rates:
            return
        before()
        with outside_modes():
            for (_, mirror), rate, mirrored_rate in zip(self._mirrored, rates, self._rates, strict=True):
                if rate != mirrored_rate:
                    mirror.fill_(rate)
        self._rates = rates

    @contextlib.contextmanager
    def mirrored(self, *, refresh: bool = True) -> Iterator[None]:
        """Put the mirrors into `param_groups` while optimizers compute in the block, and at no other time.

        They are set after the last hook before an optimizer's step, and removed before the first hook after it.
        """
        if refresh:
            self.refresh()
        before = [(group, mirror, group["lr"], _version(group["lr"])) for group, mirror in self._mirrored]
        swapped: list[tuple[Group, Tensor, Any]] = []

        def enter(owner: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for group, mirror, rate, _ in before:
                # A number that the step itself has set has no mirror.
                if group["lr"] is rate and any(group is other for other in owner.param_groups):
                    swapped.append((group, mirror, rate))
                    group["lr"] = mirror
            return _with_closure(args, kwargs, enter, leave)

        def leave(*_: Any) -> None:
            while swapped:
                group, mirror, rate = swapped.pop()
                if group["lr"] is mirror:
                    group["lr"] = rate

        with contextlib.ExitStack() as stack:
            stack.callback(leave)  # a step may raise
            for optimizer in self.all if before else ():
                stack.callback(optimizer.register_step_pre_hook(enter).remove)
                after, hooks = optimizer.register_step_post_hook(leave), cast(Any, optimizer._optimizer_step_post_hooks)
                stack.callback(after.remove)
                hooks.move_to_end(after.id, last=False)
            yield
        if any(_version(rate) != version for _, _, rate, version in before):
            self.scheduled = _SCHEDULED
            self.look()


def _version(rate: Any) -> int:
    """Return the version of a learning rate that is a tensor."""
    return rate._version if isinstance(rate, Tensor) and not rate.is_inference() else 0


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], enter: Callable[..., Any], leave: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return an optimizer's arguments with a closure that runs without the mirrors; None if it is passed none."""
    owner, closure = args[0], args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def outside(*given: Any) -> Any:
        leave()
        result = closure(*given)
        enter(owner, (owner,), {})
        return result

    return ((owner, outside, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": outside})


def unsuitable(owner: optim.Optimizer) -> str:
    """Say why no graph can contain an optimizer's step, with the remedy; empty if one can, or if that is not known."""
    kind = _named(owner)
    if not kind:
        return ""
    if kind in _REFUSED:
        return f"{kind} {_REFUSED[kind]}"
    if any(map(is_wrapper, owner.param_groups[0]["params"])):
        return "parameters are spread over ranks (FSDP2, DTensor), whose steps are not captured"
    for group in owner.param_groups:
        if group.get("fused") or group.get("capturable"):
            continue
        on_cpu = all(parameter.device.type == "cpu" for parameter in group["params"])
        if kind == "Adafactor" or (kind in _FUSED and kind != "SGD"):
            remedy = "pass fused=True" if _has_fused(owner) else OPTIMIZER_OUTSIDE
            return f"{kind} reads its step count on the host; {remedy}"
        if "capturable" in group and on_cpu and kind not in _UNREAD_COUNT:
            there = "reads its step count on the host on a CPU; a GPU has capturable=True for it"
            return f"{kind} {there}, and {OPTIMIZER_OUTSIDE}"
    return ""


_SCHEDULERS = (optim.lr_scheduler.LRScheduler, optim.lr_scheduler.ReduceLROnPlateau)
_SCHEDULED = "the step sets the learning rate; call scheduler.step() outside of it"


def takes_tensor(owner: optim.Optimizer, group: Group) -> bool:
    """True if an optimizer's step reads a tensor for the group's learning rate on the device."""
    kind = _named(owner)
    if group.get("fused") or not group.get("capturable"):
        return bool(group.get("fused")) and kind in _FUSED
    return kind in _CAPTURABLE or (kind in _CAPTURABLE_FOREACH and group.get("foreach") is not False)


def _named(owner: optim.Optimizer) -> str:
    """Return the class name of one of torch's own optimizers; empty for another class."""
    return type(owner).__name__ if type(owner).__module__.startswith("torch.optim") else ""


def _has_fused(owner: optim.Optimizer) -> bool:
    """True if every release of torch has a fused step of an optimizer's class where its parameters are."""
    kind = _named(owner)
    on_cpu = all(parameter.is_cpu for group in owner.param_groups for parameter in group["params"])
    return kind in _FUSED and (kind != "Adagrad" or on_cpu)


def _prepare(owner: optim.Optimizer) -> None:
    """Set `capturable` if it exists and the parameters are on a GPU, and move state that would be read on the host."""
    named = []
    for group in owner.param_groups:
        on_device = [parameter for parameter in group["params"] if parameter.device.type != "cpu"]
        if on_device and group.get("capturable") is False:
            group["capturable"] = True
            named.append(group)
        for parameter in on_device:
            state: Any = dict.get(owner.state, parameter, {})
            if group.get("capturable") or group.get("fused"):
                tensors = [(key, value) for key, value in state.items() if isinstance(value, Tensor)]
                state.update({key: it.to(parameter.device) for key, it in tensors if it.is_cpu and it.dim() == 0})
    if named:
        vars(owner)["_warned_capturable_if_run_uncaptured"] = True  # torch warns of steps outside of captures
        owner.defaults["capturable"] = True
        logger.info("simplegraph: %s gets capturable=True, so that its step can be in a graph.", type(owner).__name__)


# Changes of Python state by a step.

_SCALER_STATES = "_per_optimizer_states"
# Attributes that steps change and nothing depends on.
_OWN = frozenset({_SCALER_STATES, "_opt_called", "_warned_capturable_if_run_uncaptured"})


@contextlib.contextmanager
def kept_python(optimizers: Sequence[optim.Optimizer], scaler: Any) -> Iterator[Callable[[], list[str]]]:
    """Restore the dicts of optimizers and of a gradient scaler after the block.

    Yields:
        A function that names the changed entries, which a replay would not change.
    """
    roots = {f"optimizers.{index}": vars(optimizer) for index, optimizer in enumerate(optimizers)}
    roots |= {} if scaler is None else {"scaler": vars(scaler)}
    entries = [entry for name, root in roots.items() for entry in _dicts_in(name, root)]
    dicts, stages = [(name, container, dict(container)) for name, container in entries], _stages(scaler)

    def changed() -> list[str]:
        names = []
        for name, container, before in dicts:
            keys = [
                key
                for key in {**before, **container}
                if not is_same(before.get(key, ABSENT), container.get(key, ABSENT))
            ]
            counting = [key for key in keys if key not in _OWN and _SCALER_STATES not in name]
            names += [f"{name}.{'a parameter' if isinstance(key, Tensor) else key}" for key in counting]
        if _stages(scaler) != stages:
            names.append("scaler, whose update() is not called in the step,")
        return names

    try:
        yield changed
    finally:
        for _, container, before in dicts:
            restore(container, before)


def _dicts_in(name: str, container: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield a dict, and all dicts in it or in lists of it, with their names."""
    if isinstance(container, dict):
        yield name, container
    if isinstance(container, (dict, list)):
        for at, (key, value) in enumerate(container.items() if isinstance(container, dict) else enumerate(container)):
            yield from _dicts_in(f"{name}.{at if isinstance(key, Tensor) else key}", value)


def _stages(scaler: Any) -> dict[int, Any]:
    """Return the stages of optimizers' steps in a scaler, except those that are ready for a step."""
    stages = {key: state["stage"] for key, state in getattr(scaler, _SCALER_STATES, {}).items()}
    return {key: stage for key, stage in stages.items() if getattr(stage, "name", "") != "READY"}
