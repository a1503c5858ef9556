"""What guards compare of a module: a survey finds it by name, and a reading compares all of it at each call.

A survey lists every module and tensor that a module holds, registered or not, and where. A reading has the addresses
and layouts of tensors, which objects stand where, and settings.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from simplegraph.base.modes import ANY_AUTOCAST
from simplegraph.base.tensors import has_address, is_wrapper, parts, storage_key
from simplegraph.guard.functions import FunctionModule
from simplegraph.program.snapshot import held_by, is_library, items_of, layer_settings, own_dict

Link = tuple[Any, Any, Any]

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_READERS = tuple(map(operator.itemgetter, _REGISTRIES))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SETTINGS = frozenset({type(None), bool, int, float, str})  # types whose values are compared
_CONTAINERS = (list, dict, collections.deque)
_chain = itertools.chain.from_iterable
_get = object.__getattribute__  # past what the class of an object makes of it
_is_inference_mode = torch.is_inference_mode_enabled  # looked up once
_training = operator.itemgetter("training")
_requires_grad = operator.attrgetter("requires_grad")
_layout: Callable[[Tensor], Any] = operator.attrgetter("shape", "dtype", "requires_grad")
# Compares types, shapes, strides and dtypes of many tensors by one call. Private to torch, and an object of it holds
# only in the dispatch state in which it was made; where it is absent, Python compares them.
_TensorGuards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


# The slots that are read of containers which the level before opened: the index of each slot's container, each slot's
# key, and the index of each value that is a container, and if its attributes are what is read of it.
_Level = tuple[list[int], list[Any], list[tuple[int, bool]]]


class Reading:
    """Reads what a module holds, and compares that with what it held when this was made.

    It holds dicts of submodules, but no tensor; once a submodule is gone it holds nothing, and reads as changed.

    Args:
        modules: the module first, then everything below it.
        links: (holder, key, value) from a module's attributes, or from any other place, to what is compared beside
            parameters, buffers, children and hooks.
        owned: tensors that nothing else is known to hold.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        links: Iterable[Sequence[Link]],
        owned: Sequence[Tensor] = (),
    ) -> None:
        root, *children = modules
        registries = [vars(module)[name] for module in modules for name in _REGISTRIES]
        filled = [[vars(child) for child in children if vars(child)[name]] for name in _REGISTRIES]
        hooks: list[dict[int, Any]] = [vars(module)[name] for module in modules for name in _HOOKS]
        attributes = [vars(child) for child in children]
        self._empty_registries = [held for held in registries if not held]
        self._empty_hooks = [held for held in hooks if not held]
        self._hooks = [held for held in hooks if held]
        self._hooks_before = [dict(held) for held in self._hooks]
        self._handles = RemovableHandle.next_id
        self._owned = owned
        self._kinds = list({type(module): None for module in modules})
        self._forwards = [kind.forward for kind in self._kinds]
        bases, self._levels = _levels(vars(root), attributes, links)
        self._held = [(filled, attributes, bases)]
        held = self._held  # cleared once a submodule is gone
        self._deaths = [weakref.ref(child, lambda _: held.clear()) for child in children]
        values, self._lengths = self._read(vars(root))
        tensors = [
            at
            for at, value in enumerate(values)
            if isinstance(value, Tensor) and (is_wrapper(value) or has_address(value))
        ]
        # Of containers their length and what is read of them is compared, whichever objects they are.
        others = sorted(set(range(len(values))) - set(tensors) - self._opened(sum(map(len, registries))))
        numbers = [at for at in others if type(values[at]) in SETTINGS]
        others = sorted(set(others) - set(numbers))
        self._tensors_at, self._others_at, self._numbers_at = map(_getter, (tensors, others, numbers))
        self._numbers = self._numbers_at(values)
        self._number_types = list(map(type, self._numbers))
        # A module's id is its own for as long as it lives, and it is noticed when it ends; others are owned.
        self._anchors = [value for at in others if not isinstance(value := values[at], nn.Module)]
        self._ids = list(map(id, self._others_at(values)))
        self._modules_at = _getter([at for at in others if isinstance(values[at], nn.Module)])
        self._types = list(map(type, self._modules_at(values)))
        self._modes = list(map(_training, attributes))
        self._wraps = any(is_wrapper(values[at]) for at in tensors)
        self._is_more = self._wraps or bool(owned)
        live = self._of(values)
        self._addresses = list(map(Tensor.data_ptr, live))
        # Tied weights, and parameters that an optimizer holds, too: `_TensorGuards` takes no tensor twice.
        first = {id(tensor): at for at, tensor in reversed(list(enumerate(live)))}
        again = [at for at, tensor in enumerate(live) if first[id(tensor)] != at]
        self._is_again = bool(again)
        self._again, self._first = _getter(again), _getter([first[id(live[at])] for at in again])
        self._once = _getter(sorted(first.values()))
        self._layouts = _layouts_of(self._once(live))
        self._checks: dict[tuple[bool, bool], Any] = {}

    def _opened(self, start: int) -> set[int]:
        """Return the indices of the containers among all values; those of slots begin at `start`."""
        indices: set[int] = set()
        for _, keys, opened in self._levels:
            indices |= {start + at for at, _ in opened}
            start += len(keys)
        return indices

    def _read(self, attributes: dict[str, Any]) -> tuple[list[Any], list[int]]:
        """Read all values and the lengths of all containers. Raises whatever a place that is gone raises."""
        filled, below, bases = self._held[0]
        own = map(attributes.__getitem__, _REGISTRIES)
        parameters, buffers, modules = map(map, _READERS, filled)
        values = list(_chain(map(dict.values, itertools.chain(own, parameters, buffers, modules))))
        lengths = list(map(len, below))
        lengths += len(values), len(attributes)
        if not self._levels:
            return values, lengths
        holders: Sequence[Any] = [attributes, *below, *bases]
        for parents, keys, opened in self._levels:
            found = list(map(operator.getitem, map(holders.__getitem__, parents), keys))
            values += found
            holders = [_get(found[at], "__dict__") if by_attributes else found[at] for at, by_attributes in opened]
            lengths += map(len, holders)
        return values, lengths

    def _of(self, values: list[Any]) -> Sequence[Tensor]:
        tensors = self._tensors_at(values)
        if self._wraps:
            tensors = tuple(part for tensor in tensors for part in parts(tensor))
        return (*tensors, *self._owned) if self._owned else tensors

    def requires_grad(self, attributes: dict[str, Any]) -> bool | None:
        """True if a tensor that is compared requires grad now; None if one cannot be read, or is none any more."""
        try:
            values, lengths = self._read(attributes)
            return any(map(_requires_grad, self._of(values))) if lengths == self._lengths else None
        except Exception:  # a survey finds out what it was
            return None

    def same(self, attributes: dict[str, Any]) -> bool:
        """True if all is as it was; `attributes` are the module's own. What cannot be read has changed."""
        try:
            if any(self._empty_registries) or self._hooks != self._hooks_before:
                return False
            if RemovableHandle.next_id != self._handles:  # a hook was registered somewhere
                if any(self._empty_hooks):
                    return False
                self._handles = RemovableHandle.next_id
            values, lengths = self._read(attributes)
            if lengths != self._lengths or list(map(id, self._others_at(values))) != self._ids:
                return False
            numbers = self._numbers_at(values)  # their types first: a tensor of one element may equal a number
            if list(map(type, numbers)) != self._number_types or numbers != self._numbers:
                return False
            tensors = self._of(values) if self._is_more else self._tensors_at(values)
            if list(map(Tensor.data_ptr, tensors)) != self._addresses:
                return False
            if self._is_again:
                if not all(map(operator.is_, self._again(tensors), self._first(tensors))):
                    return False
                tensors = self._once(tensors)
            check = self._checks.get((_is_inference_mode(), ANY_AUTOCAST()))
            return (
                (check.check(*tensors) if check is not None else self._same_layouts(tensors))
                and list(map(type, self._modules_at(values))) == self._types
                and list(map(_training, self._held[0][1])) == self._modes
                and [kind.forward for kind in self._kinds] == self._forwards
            )
        except Exception:  # a survey finds out what it was
            return False

    def _same_layouts(self, tensors: Sequence[Tensor]) -> bool:
        """Compare the layouts in Python, and prepare a quicker comparison for the next time."""
        if _layouts_of(tensors) != self._layouts:
            return False
        if _TensorGuards is not None and tensors:
            check = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._checks[_is_inference_mode(), ANY_AUTOCAST()] = check
        return True


def _levels(
    root: dict[str, Any], attributes: list[dict[str, Any]], links: Iterable[Sequence[Link]]
) -> tuple[list[Any], list[_Level]]:
    """Order slots so that each is read of a container which was read before it, and each is read once.

    Returns:
        The containers that the first slots are read of, beside attributes of modules, and the levels.
    """
    first = {id(held): at for at, held in enumerate((root, *attributes))}
    bases: list[Any] = []
    levels: list[_Level] = []
    slots: dict[tuple[int, int, Any], int] = {}  # (level, container, key) -> the index of what it holds
    opened: dict[tuple[int, int, bool], int] = {}  # (level, that index, by attributes) -> the index of the container
    for chain in links:
        container = first.get(id(chain[0][0]))
        if container is None:
            container = first[id(chain[0][0])] = len(first)
            bases.append(chain[0][0])
        for depth, (_, key, value) in enumerate(chain):
            if depth == len(levels):
                levels.append(([], [], []))
            parents, keys, containers = levels[depth]
            at = slots.get((depth, container, _key(key)))
            if at is None:
                at = slots[depth, container, _key(key)] = len(keys)
                parents.append(container)
                keys.append(key)
            is_last = depth + 1 == len(chain)
            known = isinstance(value, _CONTAINERS)
            # An empty one may be filled, an object without attributes get some; code is compared by identity.
            if not is_last or known or (not callable(value) and own_dict(value) == {}):
                step = at, not known if is_last else chain[depth + 1][0] is not value
                container = opened.setdefault((depth, *step), len(containers))
                if container == len(containers):
                    containers.append(step)
    return bases, levels


def _layouts_of(tensors: Sequence[Tensor]) -> list[Any]:
    return [(_layout(tensor), tensor.stride()) for tensor in tensors]


def _key(key: Any) -> Any:
    """Tell keys apart as dicts do, without asking tensors if they are equal."""
    return id(key) if isinstance(key, Tensor) else (type(key), key)


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else (lambda values: ())


_DEPTH = 3  # containers inside each other that an attribute's tensors and modules are looked for in
_REGISTERED = frozenset(vars(nn.Module())) | {"_simplegraph"}  # looked at by themselves
_CODE = frozenset(
    {types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType, functools.partial}
)
_CLOSED = (type, types.ModuleType, Tensor, torch.dtype, torch.device)


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
        for held in holders_of(module):
            for key, value in list(held.items()):
                if type(value) in _CODE:
                    self.links.append(((held, key, value),))
                elif held is not attributes or key not in _REGISTERED:
                    self._look_inside(_dotted(name, key), _dotted(name, key), ((held, key, value),))
        self.links += [((attributes, key, attributes[key]),) for key in _settings(module)]

    def _look_inside(self, name: str, attribute: str, links: tuple[Link, ...]) -> None:
        value = links[-1][-1]
        if isinstance(value, Tensor):
            self._add(HeldTensor(name, attribute, value, links))
        elif value is None:
            self.links.append(links)
        elif type(value) in SETTINGS:
            return
        elif isinstance(value, torch.Generator):
            self.links.append(links)
            self.generators[name] = value
        elif isinstance(value, nn.Module):
            self.links.append(links)
            for added in self._add_tree(name, value):
                self._look_at_attributes(added)
        elif len(links) <= _DEPTH and not isinstance(value, Optimizer):  # whose state has parameters for keys
            inner, items = _contents(value)
            if inner is None:
                return
            before = len(self.links), len(self.tensors)
            if id(inner) not in self._opened:  # else what it holds is read by another way
                self._opened.add(id(inner))
                for index, (key, item) in enumerate(items):
                    label = index if isinstance(key, Tensor) else key  # of an optimizer's state
                    self._look_inside(f"{name}.{label}", attribute, (*links, (inner, key, item)))
            if before == (len(self.links), len(self.tensors)):
                self.links.append(links)

    def _add(self, held: HeldTensor) -> None:
        while held.name in self.tensors:  # {1: a, "1": b}
            held = held._replace(name=f"{held.name}'")
        self.tensors[held.name] = held

    def attributes(self) -> set[str]:
        """Name every parameter, buffer and other attribute of every module, whatever it holds, but for torch's own."""
        holders = [(name, held) for name, module in self.modules.items() for held in holders_of(module)]
        holders += [(name, held) for name, each in self.modules.items() for held in (each._parameters, each._buffers)]
        return {_dotted(name, key) for name, holder in holders for key in holder if key not in _REGISTERED}

    def name_of(self, tensor: Tensor) -> str | None:
        """Name the place that holds a tensor's memory; None if there is none."""
        keys = {storage_key(part) for part in parts(tensor) if has_address(part)}
        return next((each.name for each in self.tensors.values() if not keys.isdisjoint(each.memory)), None)


def held_tensors(module: nn.Module) -> list[HeldTensor]:
    """List every tensor that the module holds in parameters, buffers and ordinary attributes."""
    return list(Survey(module).tensors.values())


def device_of_state(module: nn.Module) -> torch.device:
    """Return the device of the tensors that a module holds: the first one's that is not on the CPU, or else the CPU."""
    parameters = [parameter.device for parameter in module.parameters()]  # before looking any further
    devices = parameters or [held.tensor.device for held in held_tensors(module)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _dotted(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _contents(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Open a container, or an object's attributes: it, and what it holds by index or key; None if it is neither."""
    if not isinstance(value, (list, tuple, dict, collections.deque)):
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
    return kind in _CODE or isinstance(value, _CLOSED) or (callable(value) and is_library(kind.__module__))


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
