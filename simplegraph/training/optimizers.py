"""Optimizers in a captured step: what is prepared for it, and which of their numbers are read on the device.

A graph freezes Python numbers. The learning rate changes most often, so inside of a step a 0-dim tensor on the device
stands in its place where the optimizer takes one; the user's own number is back in `param_groups` afterwards. All other
values are part of the key: a step with other ones is captured anew.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from simplegraph.errors import ConfigError
from simplegraph.graph.modes import outside_modes
from simplegraph.graph.tensors import is_wrapper
from simplegraph.training.hooks import calls_noted

logger = logging.getLogger("simplegraph")

Group = dict[str, Any]

# Those that read a tensor for a learning rate on the device, fused, or capturable with one kernel for all tensors.
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_CAPTURABLE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD")
_CAPTURABLE_FOREACH = ("RMSprop", "Adadelta")
_NOT_IN_KEY = frozenset({"params", "initial_lr", "param_names"})  # no step reads them
_FIRST_RATE = ("Rprop",)  # reads its learning rate where it makes its state, and never again


class StepOptimizers:
    """The optimizers of a step.

    Args:
        optimizers: them.

    Attributes:
        refusal: why no graph can hold a step with them; empty if one can.

    Raises:
        ConfigError: something is no optimizer, or only wraps one.
    """

    def __init__(self, optimizers: Any) -> None:
        several = isinstance(optimizers, Sequence) and not isinstance(optimizers, str)
        self.all: list[optim.Optimizer] = [*optimizers] if several else [optimizers]
        for each in self.all:
            if not isinstance(each, optim.Optimizer):
                raise ConfigError(f"optimizers has {each!r}; expected a torch.optim.Optimizer, or a list of them.")
            if "_optimizer_step_pre_hooks" not in vars(each):
                raise ConfigError(
                    f"optimizers has a {type(each).__name__}, whose class does not call Optimizer.__init__, as "
                    "wrappers do not. Expected the optimizer that it wraps; call that one in the step."
                )
        self._mirrors: dict[tuple[int, int], Tensor] = {}  # by optimizer and group
        self._rates: list[float] = []
        self._mirrored: list[tuple[Group, Tensor]] = []
        self._values: tuple[list[Group], list[str]] = [], []
        self._last: tuple[list[Any], Hashable] = [], ()
        self._shape: list[Any] = []
        self._versions: list[int] = []
        self._changes = self._since = 0
        self._often = ""
        self.refusal = self.scheduled = ""
        for each in self.all:
            _prepare(each)

    @property
    def groups(self) -> list[Group]:
        """All parameter groups."""
        return [group for each in self.all for group in each.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def links(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the tensors of all optimizers' states by name, each with the links (holder, key, value) to it."""
        for number, each in enumerate(self.all):
            name, attributes, state = f"optimizers.{number}", vars(each), each.state
            first = attributes, "state", state
            for index, parameter in enumerate(self.parameters):
                entry = dict.get(state, parameter)
                for key, value in entry.items() if isinstance(entry, dict) else ():
                    if isinstance(value, Tensor):
                        yield f"{name}.state.{index}.{key}", (first, (state, parameter, entry), (entry, key, value))
            for index, group in enumerate(each.param_groups):
                for key, value in group.items():
                    if isinstance(value, Tensor) and not value.is_cpu:
                        yield f"{name}.param_groups.{index}.{key}", ((group, key, value),)

    def hooks(self) -> list[dict[int, Any]]:
        """List the dicts of the optimizers' hooks."""
        return [held for each in self.all for held in (each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks)]

    def steps(self) -> list[Any]:
        """List the functions that the optimizers' steps are, their classes' and those that were set instead."""
        return [code for each in self.all for code in (type(each).step, vars(each).get("step"))]

    def find_schedulers(self, values: Iterable[Any]) -> None:
        """Refuse graphs if one of these is a scheduler: it belongs outside of the step."""
        found = next((value for value in values if isinstance(value, _SCHEDULERS)), None)
        if found is not None:
            self.refusal = self.scheduled = f"{type(found).__name__}: {_SCHEDULED}"

    def check_scaler(self, scaler: Any) -> None:
        """Refuse graphs if a gradient scaler reads on the host whether an optimizer is to skip a step."""
        reading = (each for each in self.all if not getattr(each, "_step_supports_amp_scaling", False))
        found = next(reading, None) if scaler is not None and scaler.is_enabled() else None
        if found is not None:
            self.refusal = self.scheduled = (
                f"GradScaler reads on the host if {type(found).__name__} skips a step; pass fused=True"
            )

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Refuse graphs if an optimizer that is none of these steps in here: its numbers would stay as captured."""

        def note(found: optim.Optimizer) -> None:
            if not any(found is each for each in self.all):
                self.refusal = self.scheduled = (
                    f"the step calls {type(found).__name__}, which optimizers= does not name"
                )

        return calls_noted(register_optimizer_step_pre_hook, note)

    # The learning rates on the device.

    def look(self) -> None:
        """Find the groups again, and which of their values are mirrored on the device or part of the key."""
        groups, names = [], []
        self._mirrored = []
        self.refusal = next(filter(None, (unsuitable(each) for each in self.all)), self.scheduled)
        for number, each in enumerate(self.all):
            for index, group in enumerate(each.param_groups):
                mirror = self._mirror(each, group, (number, index))
                self._mirrored += [] if mirror is None else [(group, mirror)]
                unread = {"lr"} if mirror is not None or _named(each) in _FIRST_RATE else set()
                for name, value in group.items():
                    if name in _NOT_IN_KEY or name in unread or isinstance(value, Tensor):
                        continue
                    groups.append(group)
                    names.append(name)
        self._values = groups, names
        self._rates = [float("nan")] * len(self._mirrored)
        self._shape = self._shape_now()

    def _follow(self) -> None:
        if self._shape != self._shape_now():
            self.look()

    def _shape_now(self) -> list[Any]:
        # By identity: groups that were loaded equal those before, but are others.
        return [(id(group), len(group["params"]), len(group)) for group in self.groups]

    def _mirror(self, owner: optim.Optimizer, group: Group, place: tuple[int, int]) -> Tensor | None:
        """Return the tensor that stands for a group's learning rate; None if the number itself is used.

        It is the same one for a group that is loaded in the place of another: graphs read it.
        """
        rate: Any = group.get("lr")
        on_host = rate.is_cpu and rate.numel() == 1 if isinstance(rate, Tensor) else isinstance(rate, (int, float))
        if self.refusal or not on_host or not takes_tensor(owner, group):
            return None
        device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
        known = self._mirrors.get(place)
        if known is None or known.device != device:
            # Kernels on a GPU read 32 bits; the emulator's read all that a float has.
            kind = torch.float64 if device.type == "cpu" else torch.float32
            with outside_modes():
                known = self._mirrors[place] = torch.full((), float(rate), dtype=kind, device=device)
        return known

    def refresh(self) -> None:
        """Let the mirrors hold the learning rates that the user has set."""
        rates = [float(group["lr"]) for group, _ in self._mirrored]
        if rates == self._rates:
            return
        with outside_modes():
            for (_, mirror), rate, known in zip(self._mirrored, rates, self._rates, strict=True):
                if rate != known:
                    mirror.fill_(rate)
        self._rates = rates

    @property
    def outdated(self) -> bool:
        """True if `refresh` has something to do."""
        return [float(group["lr"]) for group, _ in self._mirrored] != self._rates

    @contextlib.contextmanager
    def mirrored(self, *, refresh: bool = True) -> Iterator[None]:
        """Let the mirrors stand in `param_groups` in here."""
        if refresh:
            self._follow()
            self.refresh()
        before = [(group, mirror, group["lr"], mirror._version) for group, mirror in self._mirrored]
        for group, mirror, *_ in before:
            group["lr"] = mirror
        try:
            yield
        finally:
            for group, mirror, rate, version in before:
                written = mirror._version != version
                if written:
                    self.scheduled = _SCHEDULED
                if group["lr"] is not mirror:
                    continue
                group["lr"] = rate
                if written and refresh and isinstance(rate, Tensor):
                    rate.fill_(mirror.item())
                elif written and refresh:
                    group["lr"] = mirror.item()
            if self.scheduled:
                self.look()

    # The key.

    def _note_change(self, found: list[Any]) -> None:
        """Note that a number has changed which graphs fix; refuse steps as long as one does so all the time."""
        known, _ = self._last
        often = self._since <= _OFTEN and len(found) == len(known)
        self._changes = self._changes + 1 if often else 0
        self._since = 0
        if self._changes >= _OFTEN:
            pairs = zip(self._values[1], found, known, strict=True)
            names = sorted({name for name, now, before in pairs if now is not before})
            self._often = f"{', '.join(names)} keeps changing, which the optimizer takes as a Python number"
            if names == ["lr"]:
                self._often += "; fused=True takes it from the device"
            elif {"betas", "momentum"} & set(names):
                self._often += "; if OneCycleLR or CyclicLR does it, pass cycle_momentum=False"

    @property
    def changing(self) -> str:
        """Say which number changes too often to capture a graph for each value; empty if none does."""
        if self._changes >= _OFTEN and self._since > _OFTEN:
            self._changes = 0
        return self._often if self._changes >= _OFTEN else ""

    def state(self) -> Hashable:
        """Return the values that are part of the key: the very same object while none changes."""
        self._follow()
        found = list(map(operator.getitem, *self._values))
        known, key = self._last
        self._since += 1
        if not _same(found, known):
            self._note_change(found)
            if self.refusal:
                self.look()  # which one of these may lift
                found = list(map(operator.getitem, *self._values))
            key = (tuple(map(_value_key, found)), tuple(len(group["params"]) for group in self.groups))
            self._last = found, key
        return key


def unsuitable(owner: optim.Optimizer) -> str:
    """Say why no graph can hold an optimizer's step, and what would; empty if one can, or if that is not known."""
    kind = _named(owner)
    if not kind:
        return ""
    if kind == "LBFGS":
        return "LBFGS decides on the host how often it calls its closure"
    if kind == "SparseAdam":
        return "SparseAdam takes sparse gradients, which no graph hands out; use Adam(fused=True)"
    if any(map(is_wrapper, owner.param_groups[0]["params"])):
        return "parameters are spread over ranks (FSDP2, DTensor), whose steps are not captured"
    for group in owner.param_groups:
        if group.get("fused") or group.get("capturable"):
            continue
        on_cpu = all(parameter.device.type == "cpu" for parameter in group["params"])
        if kind == "Adafactor" or (kind == "Adagrad" and not on_cpu):
            return f"{kind} reads its step count on the host; use AdamW(fused=True)"
        if kind in _FUSED and kind != "SGD":
            return f"{kind} reads its step count on the host; pass fused=True"
        if "capturable" in group and on_cpu:
            return f"{kind} reads its step count on the host on a CPU; a GPU has capturable=True for it"
    return ""


_SCHEDULERS = (optim.lr_scheduler.LRScheduler, optim.lr_scheduler.ReduceLROnPlateau)
_SCHEDULED = "the step sets the learning rate; call scheduler.step() outside of it"
_OFTEN = 8  # changes of a number, each within as many calls of the last, after which steps run eagerly


def _same(found: list[Any], known: list[Any]) -> bool:
    return len(found) == len(known) and all(map(operator.is_, found, known))


def _value_key(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(map(_value_key, value))
    return type(value), repr(value) if isinstance(value, (float, str, int, bool, type(None))) else id(value)


def takes_tensor(owner: optim.Optimizer, group: Group) -> bool:
    """True if an optimizer's step reads a tensor for the group's learning rate on the device."""
    kind = _named(owner)
    if group.get("fused"):
        return kind in _FUSED
    if not group.get("capturable"):
        return False
    return kind in _CAPTURABLE or (kind in _CAPTURABLE_FOREACH and group.get("foreach") is not False)


def _named(owner: optim.Optimizer) -> str:
    """Return the name of an optimizer of torch's own; nothing for another's."""
    return type(owner).__name__ if type(owner).__module__.startswith("torch.optim") else ""


def _prepare(owner: optim.Optimizer) -> None:
    """Set `capturable` where it exists and the parameters are on a GPU, and move what would be read on the host."""
    named = []
    for group in owner.param_groups:
        on_device = [parameter for parameter in group["params"] if parameter.device.type != "cpu"]
        if on_device and group.get("capturable") is False:
            group["capturable"] = True
            named.append(group)
        for parameter in on_device:
            state: Any = dict.get(owner.state, parameter, {})
            if group.get("capturable") or group.get("fused"):
                moved = {key: value.to(parameter.device) for key, value in state.items() if _is_number_on_host(value)}
                state.update(moved)
    if named:
        vars(owner)["_warned_capturable_if_run_uncaptured"] = True  # torch warns of steps outside of captures
        owner.defaults["capturable"] = True
        logger.info("simplegraph: %s gets capturable=True, so that its step can be in a graph.", type(owner).__name__)


def _is_number_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cpu and value.dim() == 0
