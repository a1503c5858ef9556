"""The tensors and objects of a module that captured graphs read, and the check at each call that none was moved.

A `Reading` makes the check at every call. If it fails, a `Survey` finds the names of the differences.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.constants import WatchedValue, WatchedVersion
from simplegraph.base.errors import ReplayError
from simplegraph.base.tensors import OwnedTensor, gradient_of, has_address, is_wrapper, lies_at, parts, storage_key
from simplegraph.guard.functions import FunctionModule, computes_gradients
from simplegraph.guard.reading import Reading
from simplegraph.guard.survey import HeldTensor, Survey, code_of
from simplegraph.program.snapshot import is_same


@dataclasses.dataclass(eq=False)
class MemoryRead:
    """The memory that observed runs of a module read, beside their inputs.

    Attributes:
        keys: the storage keys of this memory.
        reads_anything: the device type ("cuda") if unobserved work may read any memory there; else empty.
        elsewhere: by key, tensors that the module does not hold: in a closure, a global, a cache. Their owner is not
            known, so they are kept alive here. The module's tensors are not: they may be replaced before a capture.
        values: CPU tensors whose values are constants in graphs, by their place in memory.
        versions: versions of the tensors from which warmups read values for captures.
    """

    keys: set[int] = dataclasses.field(default_factory=set)
    elsewhere: dict[int, OwnedTensor] = dataclasses.field(default_factory=dict)
    values: dict[tuple[Any, ...], Tensor] = dataclasses.field(default_factory=dict)
    versions: list[WatchedVersion] = dataclasses.field(default_factory=list)
    reads_anything: str = ""

    def wants_grad(self, module: nn.Module, leaves: Iterable[Any]) -> bool:
        """True if eager would build an autograd graph for a call with these leaves."""
        if computes_gradients(module):
            return any_requires_grad(leaves)
        if isinstance(module, FunctionModule):
            module.refresh()
        if any_requires_grad(leaves) or any_requires_grad(module.parameters()):
            return True  # the common case: no survey is needed
        tensors = [entry.tensor for entry in Survey(module).tensors.values() if self.includes(entry)]
        return any_requires_grad((*tensors, *(owned.tensor for owned in self.elsewhere.values())))

    def includes(self, entry: HeldTensor) -> bool:
        """True if a graph may read a tensor of the module."""
        is_unobserved = entry.tensor.device.type == self.reads_anything
        return entry.registered or is_unobserved or not self.keys.isdisjoint(entry.memory)


class CapturedState:
    """Guards of the graphs that were captured from a module: the tensors and objects that they read.

    At each call a `Reading` checks all of them together, and a few more. If it fails, a survey finds the names of the
    changes. Only tensors without another known owner are kept alive here.

    Args:
        module: the module that is captured.

    Attributes:
        module: a weak reference to the module.
        reading: the reading that checks the state; None if the module has to be surveyed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._own_gradients = computes_gradients(module)
        self._read = MemoryRead()
        self.reading: Reading | None = None
        self._places: dict[str, tuple[Any, ...]] = {}
        self._elsewhere: dict[OwnedTensor, tuple[Any, ...]] = {}
        self._gradients: dict[str, tuple[Any, ...] | None] = {}  # places of gradients, by the name of their tensor
        self._values: dict[Any, WatchedValue | WatchedVersion] = {}
        self._modules: dict[str, tuple[weakref.ref[nn.Module], tuple[Any, ...]]] = {}
        self._names: dict[str, None] = {}  # in their order
        self._generators: dict[str, torch.Generator] = {}
        self._aliases: dict[str, str] = {}  # as of a survey

    def add(self, read: MemoryRead, survey: Survey, *, names_gradients: bool = False) -> None:
        """Add the state that new graphs read. If the state of earlier graphs changed meanwhile, it counts as moved.

        Args:
            read: all memory that observed runs read.
            survey: the module's present tensors and modules.
            names_gradients: True if the code reads `.grad`, so that a graph depends on which tensors have a gradient.
        """
        moved = bool(self._modules) and bool(self._differences(survey))
        self._read = MemoryRead(set(read.keys), dict(read.elsewhere), reads_anything=read.reads_anything)
        for at, tensor in read.values.items():
            self._values.setdefault(at, WatchedValue(tensor))
        self._values.update((id(watched), watched) for watched in read.versions)
        tensors = survey.tensors.values()
        guarded = [entry for entry in tensors if self._read.includes(entry)]
        for entry in guarded:
            self._places.setdefault(entry.name, _place(entry.tensor))
        for owned in self._read.elsewhere.values():
            self._elsewhere.setdefault(owned, _place(owned.tensor))
            owned.note_holders()  # now: after the call returns, the user may release the tensor
        for entry in () if self._own_gradients else tensors:
            gradient = gradient_of(entry.tensor)
            if entry.tensor.is_leaf and (names_gradients or self._reads(gradient)):
                self._gradients.setdefault(entry.name, _gradient_place(gradient))
        if not self._modules:
            self._modules = {
                name: (weakref.ref(module), tuple(code_of(module))) for name, module in survey.modules.items()
            }
            self._names = dict.fromkeys(survey.tensors)
            self._generators, self._aliases = survey.generators, survey.aliases
            self._empty = survey.attributes() - {entry.attribute for entry in tensors}
        # Attributes to which no tensor may be added. New attributes, and those that no graph reads, may get tensors.
        self._watched_attributes = self._empty | {entry.attribute for entry in guarded}
        self.reading = None if moved else self._new_reading(survey)

    def accept(self, survey: Survey) -> None:
        """Accept tensors that the forward itself has just added, such as to a cache for each size.

        Attributes that were empty are not accepted: earlier graphs may depend on their being None.
        """
        added = (entry.name for entry in survey.tensors.values() if entry.attribute not in self._empty)
        self._names |= dict.fromkeys(added)

    def _new_reading(self, survey: Survey) -> Reading:
        """Make the reading that checks the present state at every call."""
        entries = [
            entry for entry in survey.tensors.values() if self._read.includes(entry) or entry.name in self._gradients
        ]
        links = [entry.links for entry in entries if entry.links]
        elsewhere = self._read.elsewhere.values()
        owned = [owned for owned in elsewhere if is_wrapper(owned.tensor) or has_address(owned.tensor)]
        values = list(self._values.values())
        with_gradients = {id(survey.tensors[name].tensor) for name in self._gradients if name in survey.tensors}
        return Reading(
            list(survey.modules.values()), (*links, *survey.links), owned, values, survey.carried, with_gradients
        )

    def _reads(self, gradient: Tensor | None) -> bool:
        """True if the graphs read a gradient's memory."""
        return gradient is not None and has_address(gradient) and storage_key(gradient) in self._read.keys

    def moved(self) -> bool:
        """True if any state that the graphs read was moved. A call checks the `reading` first, which is faster."""
        module, reading = self.module(), self.reading
        if reading is not None and module is not None and reading.holds(vars(module)):
            return False
        self.reading = None
        survey = self._survey()
        if self._differences(survey):
            return True
        self.reading = self._new_reading(survey)  # other state changed, or the change was reverted
        return False

    def renew(self, versions: Mapping[int, int]) -> None:
        """Replace versions of dicts: `versions` maps old versions to new ones."""
        reading = self.reading
        if reading is not None:
            reading.renew(versions)

    def wants_grad(self) -> bool:
        """True if any tensor that the graphs read requires grad, or if a survey is needed to know that."""
        module, reading = self.module(), self.reading
        if reading is None or module is None:
            return True
        wanted = reading.requires_grad(vars(module))
        return wanted is None or (wanted and not self._own_gradients)

    def what_moved(self) -> list[str]:
        """Return the names of everything that was moved or replaced."""
        return self._differences(self._survey())

    def _survey(self) -> Survey:
        module = self.module()
        if module is None:
            raise ReplayError("the module of these graphs is gone.")
        return Survey(module)

    def _differences(self, survey: Survey) -> list[str]:
        now = survey.tensors
        names = []
        for name, laid in self._places.items():
            if name not in now:
                names.append(f"{name} (removed)")
            elif _place(now[name].tensor) != laid:
                names.append(f"{name} (moved or replaced)")
        added = [entry for entry in now.values() if entry.name not in self._names]
        names += [
            f"{entry.name} (added)"
            for entry in added
            if entry.registered or entry.attribute in self._watched_attributes
        ]
        for name, place in self._gradients.items():
            if name in now and _gradient_place(gradient_of(now[name].tensor)) != place:
                names.append(f"the gradient of {name} (moved or replaced)")
        for owned, laid in self._elsewhere.items():
            if _place(owned.tensor) != laid or owned.is_released():
                names.append(f"a {tuple(owned.tensor.shape)} tensor from elsewhere (moved or replaced)")
        names += [_what_changed(value, survey) for value in self._values.values() if not value.is_same()]
        before, after = self._generators, survey.generators
        drawn = [name for name in before | after if before.get(name) is not after.get(name)]
        names += [f"{name} (random generator, replaced)" for name in drawn]
        names += self._changed_modules(survey.modules)
        moved = [place for place, name in self._aliases.items() if survey.aliases.get(place) != name]
        names += [f"{place} (another object)" for place in moved]
        order = [name for name in self._names if name in now and now[name].registered]
        is_same = order == [name for name, entry in now.items() if entry.registered and name in self._names]
        return names or ([] if is_same else ["parameters or buffers (another order)"])

    def _changed_modules(self, now: dict[str, nn.Module]) -> list[str]:
        before = self._modules
        names = [f"submodule {name} (added)" for name in now if name not in before]
        for name, (module_ref, code) in before.items():
            module = now.get(name)
            if module is None or module is not module_ref():
                names.append(f"submodule {name} (replaced)")
            elif not is_same(code_now := tuple(code_of(module)), code):
                if is_same(_without_mode(code_now), _without_mode(code)):
                    names.append(f"{name or 'the module'} (train() or eval())")
                    continue
                names.append(f"{name or 'the module'} (class, forward, training mode, hooks, functions or settings)")
        return names or ([] if list(now) == list(before) else ["submodules (another order)"])


def _without_mode(code: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the entries of `code_of` without the training mode, which is the third."""
    return (*code[:2], *code[3:])


def _what_changed(value: WatchedValue | WatchedVersion, survey: Survey) -> str:
    """Describe a changed value that graphs hold as a constant."""
    name = None if value.tensor is None else survey.name_of(value.tensor)
    if isinstance(value, WatchedValue):
        return f"{name or 'a CPU tensor from elsewhere'} (changed on the CPU)"
    return f"{name or 'a tensor that is gone'} (written to; a value that was read from it is in a graph)"


def any_requires_grad(leaves: Iterable[Any]) -> bool:
    """True if eager would build an autograd graph for one of these leaves."""
    return any(issubclass(type(leaf), Tensor) and leaf.requires_grad for leaf in leaves)


def _gradient_place(gradient: Tensor | None) -> tuple[Any, ...] | None:
    return None if gradient is None else _place(gradient)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # `tuple(generator)` would fail while another thread's capture lists all objects of the process.
    return tuple([lies_at(part) if has_address(part) else id(part) for part in parts(tensor)])
