"""List every module and tensor of a module, registered or not, with its name and place."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.optim import Optimizer

from simplegraph.base.objects import class_member, own_dict
from simplegraph.base.tensors import has_address, parts, storage_key
from simplegraph.base.walk import DEPTH, REGISTERED, Policy, Walk, held_by, holder_of, is_library, items_of
from simplegraph.guard.carried import carried_by
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.links import Link, SecondPath
from simplegraph.guard.scripted import scripted_tensors
from simplegraph.guard.values import NOT_PLAIN, dotted, value_key

_OF_TORCH = (frozenset(vars(nn.Module())) | {"_simplegraph"}) - REGISTERED  # checked in other ways
_CODE = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType})
_CODE |= {types.CodeType, functools.partial}
_CLOSED = (type, types.ModuleType, torch.dtype, torch.device, torch.Generator, Optimizer)
_CONTAINERS = (collections.OrderedDict, dict, list, tuple, collections.deque)
_PRODUCTS = frozenset({torch.float16, torch.bfloat16, torch.float32})


class HeldTensor(NamedTuple):
    """A tensor that a module holds.

    Attributes:
        name: its dotted name in the module; attribute: the name up to the attribute of a module that leads to it.
        links: the links that lead to it beyond modules' own dicts: (holder, key, value) with ``holder[key] is value``.
        registered: True for parameters and buffers.
    """

    name: str
    attribute: str
    tensor: Tensor
    links: tuple[Link, ...] = ()
    registered: bool = False

    @property
    def memory(self) -> set[int]:
        """The storage keys of its memory."""
        return {storage_key(part) for part in parts(self.tensor) if has_address(part)}


class Survey:
    """Lists everything that a module holds at present, by name.

    Attributes:
        modules: the module, its children, and modules in lists, tuples, dicts and objects.
        tensors: parameters, buffers, and tensors in ordinary attributes of these modules, also inside containers.
        generators: random generators in such attributes.
        links: chains of links to modules that are not children, to generators, functions and settings, and to values in
            whose place a tensor may appear: None, and containers without tensors.
        carried: the places in which runs leave tensors; these tensors are not listed.
        aliases: the names of further places that lead to an object that has a name, with that name.
        scripted: the TorchScript modules among the modules, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, HeldTensor] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.links: list[tuple[Link, ...]] = []
        self.aliases: dict[str, str] = {}
        self._children: list[tuple[str, dict[str, Any]]] = []  # registries of children, with the names of their modules
        self.carried = carried_by(module).unguarded()
        roots: list[Any] = [module]
        policy = _POLICY
        if isinstance(module, FunctionModule):
            module.resolve()
            roots += module.held()
            policy = policy if module.computes_gradients else _WITH_OPTIMIZERS
        if self.carried:
            policy = dataclasses.replace(policy, opens=functools.partial(_without_places, policy.opens, self.carried))
        self._walk = Walk(roots, policy)
        # By id of an opened object: its name, the attribute that leads to it, and the links to it.
        self._places: dict[int, tuple[str, str, tuple[Link, ...]]] = {}
        # Modules and their own tensors get their names before objects that attributes lead to.
        opened = [(thing, contents) for thing, contents, _ in self._walk if not self._is_registered(thing, contents)]
        containers = [links for thing, contents in opened for links in self._look_into(thing, contents)]
        for name, children in self._children:
            for key, child in children.items():
                self._note_alias(name, key, child)
        self.scripted = {name: child for name, child in self.modules.items() if issubclass(type(child), ScriptModule)}
        for name, child in self.scripted.items():
            for place, links in scripted_tensors(child):
                attribute, tensor = dotted(name, links[0][1]), links[-1][2]
                self._add(HeldTensor(dotted(name, place), attribute, tensor, links, registered=True))
        # Containers are checked themselves if nothing below them is checked, or if two paths lead to them.
        first = {id(links[-1][2]): links for links in reversed(containers)}
        chains = (*self.links, *(entry.links for entry in self.tensors.values()))
        checked = {id(value) for links in chains for _, _, value in links[:-1]}
        for links in reversed(containers):  # inner containers before those that lead to them
            value = links[-1][2]
            if id(value) not in checked or first[id(value)] is not links:
                self.links.append(links if first[id(value)] is links else SecondPath(links))
                checked.update(id(value) for _, _, value in links[:-1])

    def _is_registered(self, thing: Any, contents: Any) -> bool:
        """Name an opened object; add a module and its registered tensors. True if the object is a module's registry."""
        _, above, key, _ = self._walk.ways[id(thing)]
        name, attribute, links = self._places[above] if above else ("", "", ())
        holder = self._walk.ways[above][0] if above else None
        if issubclass(type(holder), nn.Module) and key in REGISTERED:
            self._places[id(thing)] = self._places[above]
            if key == "_modules":
                self._children.append((name, contents))
            for registered_name, tensor in contents.items() if key != "_modules" else ():
                if tensor is not None and (id(thing), registered_name) not in self.carried:
                    place = dotted(name, registered_name)
                    self._add(HeldTensor(place, place, tensor, registered=True))
                    self._add_attributes(place, tensor, ((thing, registered_name, tensor),))
            return True
        if above:
            name = dotted(name, key)
        if issubclass(type(thing), nn.Module):
            while name in self.modules:  # an attribute and a child may have one name
                name = f"{name}'"
            self.modules[name] = thing
            self._places[id(thing)] = name, "", ()
        elif above:
            self._places[id(thing)] = name, attribute or name, (*links, (holder_of(holder, key), key, thing))
        else:
            self._places[id(thing)] = "", "", ()
        return False

    def _look_into(self, thing: Any, contents: Any) -> Iterator[tuple[Link, ...]]:
        """Add tensors and generators in and below a module's attributes; yield the links to each container."""
        name, attribute, above = self._places[id(thing)]
        is_module = issubclass(type(thing), nn.Module)
        for key, value in items_of(contents):
            kind = type(value)
            if is_module and key in REGISTERED:
                continue
            if value is not None and value_key(value) is not NOT_PLAIN:  # a part of a call's key
                continue
            links = (*above, (holder_of(thing, key), key, value))
            self._note_alias(name, key, value)
            if issubclass(kind, Tensor):
                place = dotted(name, key)
                self._add(HeldTensor(place, attribute or place, value, links))
                self._add_attributes(place, value, links)
            elif issubclass(kind, torch.Generator):
                place = dotted(name, key)
                while place in self.generators:
                    place = f"{place}'"
                self.generators[place] = value
                self.links.append(links)
            elif value is None or issubclass(kind, nn.Module) or (kind in _CODE and not attribute):
                self.links.append(links)
            elif id(value) in self._places or id(value) in self._walk.empty:
                yield links

    def _note_alias(self, above: str, key: Any, value: Any) -> None:
        """Note a place that leads to an object that has another name."""
        found = self._places.get(id(value))
        if found is not None and found[0] != (place := dotted(above, key)):
            self.aliases[place] = found[0]

    def _add_attributes(self, name: str, tensor: Tensor, links: tuple[Link, ...]) -> None:
        """Add tensors that are attributes of a tensor, such as the mask of a weight."""
        attributes = own_dict(tensor) if type(tensor) in (Tensor, nn.Parameter) else None
        for key, value in list(attributes.items()) if attributes else ():
            if issubclass(type(value), Tensor):
                place = dotted(name, key)
                self._add(HeldTensor(place, place, value, (*links, (attributes, key, value))))

    def _add(self, entry: HeldTensor) -> None:
        while entry.name in self.tensors:  # {1: a, "1": b}
            entry = entry._replace(name=f"{entry.name}'")
        self.tensors[entry.name] = entry

    def attributes(self) -> set[str]:
        """Return the names of all parameters, buffers and other attributes of all modules, except torch's own."""
        holders = (
            (name, holder)
            for name, module in self.modules.items()
            for holder in (*holders_of(module), module._parameters, module._buffers)
        )
        return {dotted(name, key) for name, holder in holders for key in {*holder.keys()} - REGISTERED - _OF_TORCH}

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor of the module in the same memory; None if there is none."""
        return next((entry.name for entry in self._at(tensor)), None)

    def tensors_at(self, tensor: Tensor) -> list[Tensor]:
        """List the module's tensors in the same memory."""
        return [entry.tensor for entry in self._at(tensor)]

    def _at(self, tensor: Tensor) -> Iterator[HeldTensor]:
        keys = {storage_key(part) for part in parts(tensor) if has_address(part)}
        return (entry for entry in self.tensors.values() if not keys.isdisjoint(entry.memory))


def held_tensors(module: nn.Module) -> list[HeldTensor]:
    """List every tensor that the module holds in parameters, buffers and ordinary attributes."""
    return list(Survey(module).tensors.values())


def device_of_state(module: nn.Module) -> torch.device | None:
    """Return the device of a module's tensors: that of the first tensor that is not on the CPU, or else the CPU.

    It is None if the module has no tensors.
    """
    # Parameters first: they are found faster.
    registered = Walk([module], Policy(_kind_of_guarded, depth=0)).collect_tensors()
    devices = [tensor.device for tensor in registered if issubclass(type(tensor), nn.Parameter)]
    devices = devices or [entry.tensor.device for entry in held_tensors(module)]
    device = next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
    return device if devices else None


def dtype_of_products(module: nn.Module) -> torch.dtype:
    """Return the most likely dtype of a module's matrix products: that of its first matrix."""
    entries = sorted(Survey(module).tensors.values(), key=lambda entry: not isinstance(entry.tensor, nn.Parameter))
    return next((entry.tensor.dtype for entry in entries if entry.tensor.dtype in _PRODUCTS), torch.bfloat16)


def _kind_of_guarded(kind: type) -> Any:
    """Return how objects of a class are opened: containers, and attributes of both libraries' and users' objects."""
    if issubclass(kind, Tensor):
        return Tensor
    if issubclass(kind, nn.Module):
        return _attributes
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base is not None:
        return base if kind is base else _contents
    # Objects that hold no users' tensors, or are checked in other ways.
    is_called = class_member(kind, "__call__") is not None and is_library(kind.__module__)
    return None if kind in _CODE or issubclass(kind, _CLOSED) or is_called else _attributes


def _attributes(thing: Any) -> dict[str, Any] | None:
    attributes = own_dict(thing)
    if attributes is None:
        return None
    if issubclass(type(thing), FunctionModule):  # objects that it reaches are surveyed separately
        return {name: attributes[name] for name in REGISTERED}
    if issubclass(type(thing), ScriptModule):  # its registries are views of C++ objects
        attributes = attributes | {name: {} for name in REGISTERED} | {"_modules": dict(thing._modules.items())}
    return {name: value for name, value in attributes.items() if name not in _OF_TORCH}


def _without_places(opens: Callable[[type], Any], places: Collection[tuple[int, str]], kind: type) -> Any:
    """Return how objects of a class are opened, with these attributes of modules left out."""
    if not issubclass(kind, nn.Module):
        return opens(kind)

    def attributes(module: nn.Module) -> dict[str, Any] | None:
        holder, entries = own_dict(module), _attributes(module)
        return entries and {name: value for name, value in entries.items() if (id(holder), name) not in places}

    return attributes


def _contents(container: Any) -> Any:
    return held_by(container) if _is_sized(container) else None


def _is_sized(value: Any) -> bool:
    """True if a container has a length; a subclass may refuse to give it, as e3nn's representations do."""
    try:
        return len(value) >= 0
    except Exception:
        return False


def _kind_with_optimizers(kind: type) -> Any:
    """Return how to open objects of a class, optimizers included, which only training steps check in another way."""
    return _attributes if issubclass(kind, Optimizer) else _kind_of_guarded(kind)


_POLICY = Policy(_kind_of_guarded, depth=DEPTH)
_WITH_OPTIMIZERS = Policy(_kind_with_optimizers, depth=DEPTH)


def code_of(module: nn.Module) -> Iterator[Any]:
    """Yield the other state that a call of the module depends on: mode, hooks, functions, settings of layers."""
    kind = type(module)
    yield from (kind, class_member(kind, "forward"), module.training, class_member(kind, "__call__"))
    backward: tuple[Any, ...] = (module._backward_pre_hooks, module._backward_hooks)
    for hooks in (module._forward_pre_hooks, module._forward_hooks, *backward):
        for item in hooks.items():
            yield from item
        yield len(hooks)
    for holder in holders_of(module):
        for key, value in list(holder.items()):
            if type(value) in _CODE:
                yield from (key, value)


def holders_of(module: nn.Module) -> list[dict[str, Any]]:
    """List the dicts of a module's other attributes, or of the objects that a function reaches."""
    return module.held() if isinstance(module, FunctionModule) else [vars(module)]
