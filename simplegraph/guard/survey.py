"""Find what a module holds: every module and tensor, registered or not, and where it stands."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.objects import own_dict
from simplegraph.base.tensors import has_address, parts, storage_key
from simplegraph.guard.functions import FunctionModule
from simplegraph.program.snapshot import held_by, is_library, items_of, layer_settings

Link = tuple[Any, Any, Any]  # a holder, a key or index in it, and what it held
SETTINGS = frozenset({type(None), bool, int, float, str})  # types whose values are compared
_VALUES = SETTINGS - {type(None)}
# Tuples of torch's own layers, of which a convolution has six: to compare them took a third of its guards' time.
_SHAPES = frozenset(
    {
        *("kernel_size", "stride", "padding", "dilation", "output_padding", "normalized_shape"),
        "_reversed_padding_repeated_twice",
    }
)
_DEPTH = 3  # containers inside each other that an attribute's tensors and modules are looked for in
_REGISTERED = frozenset(vars(nn.Module())) | {"_simplegraph"}  # looked at by themselves
_CODE = frozenset(
    {types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType, functools.partial}
)
_CLOSED = (type, types.ModuleType, Tensor, torch.dtype, torch.device)
_PRODUCTS = frozenset({torch.float16, torch.bfloat16, torch.float32})


class HeldTensor(NamedTuple):
    """A tensor that a module holds.

    Attributes:
        name: dotted from the module; attribute: the name up to the attribute of a module that it hangs on.
        links: every (holder, key, value) on the way that no module's own dicts tell of: ``holder[key] is value``.
        registered: True for parameters and buffers.
    """

    name: str
    attribute: str
    tensor: Tensor
    links: tuple[Link, ...] = ()
    registered: bool = False

    @property
    def memory(self) -> set[int]:
        """The keys of its storages."""
        return {storage_key(part) for part in parts(self.tensor) if has_address(part)}


class Survey:
    """Lists everything that a module holds at the moment, by name.

    Attributes:
        modules: it, and all that it holds: children, and modules in lists, tuples, dicts and objects.
        tensors: theirs: parameters, buffers, and tensors in ordinary attributes, alone or in containers.
        generators: random generators in such attributes.
        links: chains of links to modules that are no children, to generators, functions and settings, and to what may
            become a tensor or get one: None and containers without any.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, HeldTensor] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.links: list[tuple[Link, ...]] = []
        self._seen: set[int] = set()
        self._opened: set[int] = set()
        if isinstance(module, FunctionModule):
            module.resolve()
        self._add_tree("", module)
        for name in list(self.modules):
            self._look_at_attributes(name)

    def _add_tree(self, name: str, module: nn.Module) -> list[str]:
        """Add a module and its children; they are named before anything that attributes lead to."""
        if id(module) in self._seen:
            return []
        self._seen.add(id(module))
        self.modules[name] = module
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    self._add(HeldTensor(_dotted(name, key), _dotted(name, key), tensor, registered=True))
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        return [name, *(added for key, child in children for added in self._add_tree(_dotted(name, key), child))]

    def _look_at_attributes(self, name: str) -> None:
        module = self.modules[name]
        attributes = vars(module)
        shapes = _SHAPES if layer_settings(type(module)) else frozenset()
        for held in holders_of(module):
            for key, value in list(held.items()):
                if type(value) in _CODE:
                    self.links.append(((held, key, value),))
                elif held is not attributes or not (key in _REGISTERED or (key in shapes and _is_shape(value))):
                    self._look_inside(_dotted(name, key), _dotted(name, key), ((held, key, value),))
        self.links += [((attributes, key, attributes[key]),) for key in _settings(module)]

    def _look_inside(self, name: str, attribute: str, links: tuple[Link, ...]) -> None:
        value = links[-1][-1]
        kind = type(value)
        if kind in _VALUES:
            return
        if issubclass(kind, Tensor):
            self._add(HeldTensor(name, attribute, value, links))
        elif value is None:
            self.links.append(links)
        elif issubclass(kind, torch.Generator):
            self.links.append(links)
            self.generators[name] = value
        elif issubclass(kind, nn.Module):
            self.links.append(links)
            for added in self._add_tree(name, value):
                self._look_at_attributes(added)
        elif len(links) <= _DEPTH and not issubclass(kind, Optimizer):  # whose state has parameters for keys
            inner, items = _contents(value)
            if inner is None:
                return
            before = len(self.links), len(self.tensors)
            if id(inner) not in self._opened:  # else what it holds is read by another way
                self._opened.add(id(inner))
                for index, (key, item) in enumerate(items):
                    label = index if issubclass(type(key), Tensor) else key  # of an optimizer's state
                    self._look_inside(f"{name}.{label}", attribute, (*links, (inner, key, item)))
            if before == (len(self.links), len(self.tensors)):
                self.links.append(links)

    def _add(self, held: HeldTensor) -> None:
        while held.name in self.tensors:  # {1: a, "1": b}
            held = held._replace(name=f"{held.name}'")
        self.tensors[held.name] = held

    def attributes(self) -> set[str]:
        """Name every parameter, buffer and other attribute of every module, whatever it holds, but for torch's own."""
        holders = (
            (name, held)
            for name, module in self.modules.items()
            for held in (*holders_of(module), module._parameters, module._buffers)
        )
        return {_dotted(name, key) for name, holder in holders for key in holder if key not in _REGISTERED}

    def name_of(self, tensor: Tensor) -> str | None:
        """Name the place that holds a tensor's memory; None if there is none."""
        keys = {storage_key(part) for part in parts(tensor) if has_address(part)}
        return next((each.name for each in self.tensors.values() if not keys.isdisjoint(each.memory)), None)


def held_tensors(module: nn.Module) -> list[HeldTensor]:
    """List every tensor that the module holds in parameters, buffers and ordinary attributes."""
    return list(Survey(module).tensors.values())


def device_of_state(module: nn.Module) -> torch.device | None:
    """Return the device of the tensors that a module holds: the first one's that is not on the CPU, or else the CPU.

    It is None if the module holds none.
    """
    # Before looking any further; not by methods, which a module may have other things in place of.
    left, known, devices = [module], {id(module)}, list[torch.device]()
    while left:
        child = left.pop(0)
        devices += [parameter.device for parameter in child._parameters.values() if parameter is not None]
        inner = [each for each in child._modules.values() if each is not None and id(each) not in known]
        known.update(map(id, inner))
        left += inner
    devices = devices or [held.tensor.device for held in held_tensors(module)]
    found = next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
    return found if devices else None


def dtype_of_products(module: nn.Module) -> torch.dtype:
    """Return the dtype that a module's products are most likely in: that of its first such parameter, or tensor."""
    held = sorted(Survey(module).tensors.values(), key=lambda each: not isinstance(each.tensor, nn.Parameter))
    return next((each.tensor.dtype for each in held if each.tensor.dtype in _PRODUCTS), torch.bfloat16)


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(type(size) is int for size in value)


def _dotted(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _contents(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Open a container, or an object's attributes: it, and what it holds by index or key; None if it is neither."""
    if not issubclass(type(value), (list, tuple, dict, collections.deque)):
        value = None if _is_closed(value) else own_dict(value)
    elif not _is_sized(value):
        value = None
    # A copy: the collector may take entries out of a weak dictionary while a list of them is made.
    return value, list(items_of(dict(value) if type(value) is dict else held_by(value)))


def _is_sized(value: Any) -> bool:
    """True if a container tells its length; that of a class may refuse to, as e3nn's of representations does."""
    try:
        return len(value) >= 0
    except Exception:
        return False


def _is_closed(value: Any) -> bool:
    """True for what holds no tensors of the user's, or is looked at in other ways."""
    kind = type(value)
    return kind in _CODE or issubclass(type(value), _CLOSED) or (callable(value) and is_library(kind.__module__))


def code_of(module: nn.Module) -> Iterator[Any]:
    """Yield what else decides what a call of the module does: mode, hooks, functions, settings of torch's layers."""
    kind = type(module)
    yield from (kind, kind.forward, module.training)
    backward: tuple[Any, ...] = (module._backward_pre_hooks, module._backward_hooks)
    for hooks in (module._forward_pre_hooks, module._forward_hooks, *backward):
        for item in hooks.items():
            yield from item
        yield len(hooks)
    for held in holders_of(module):
        for key, value in list(held.items()):
            if type(value) in _CODE:
                yield from (key, value)
    for key in _settings(module):
        yield from (key, vars(module)[key])


def holders_of(module: nn.Module) -> list[dict[str, Any]]:
    """List the dicts of what a module holds beside parameters, buffers and children, or what a function reaches."""
    return module.held() if isinstance(module, FunctionModule) else [vars(module)]


def _settings(module: nn.Module) -> list[str]:
    """Name the settings of torch's own layers, such as `Dropout.p`, that parameters do not tell."""
    held, names = vars(module), layer_settings(type(module))
    return [name for name in names if name in held and type(held[name]) in SETTINGS]
