"""Read the state of TorchScript modules, which lies in C++ and not in the attributes of the Python object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.errors import HostError
from simplegraph.base.walk import items_of
from simplegraph.guard.links import Link
from simplegraph.guard.values import NOT_PLAIN, CompiledModule, value_key

_NO_FUSION = "Call torch._C._jit_override_can_fuse_on_cpu(False) first. On a GPU its kernels are captured."
_REMEDY = "Python cannot compare what it holds: use the module that the TorchScript module was made from."

_CONTAINERS = (dict, list, tuple)
_EXACT = (type(None), bool, int, str)  # classes whose equal values cannot be distinguished


def python_below(compiled: Any) -> dict[str, Any]:
    """Return the Python functions that a TorchScript function or module calls (`torch.jit.ignore`), by name."""
    codes = [compiled]
    if issubclass(type(compiled), CompiledModule):
        codes = list(map(compiled._get_method, compiled._method_names()))
    graphs = [code.inlined_graph for code in codes]  # its nodes die with a graph
    nodes = [node for graph in graphs for node in graph.findAllNodes("prim::PythonOp", True)]
    return {f"{at}.{node.pyname()}": node.pyobj() for at, node in enumerate(nodes)}


class ScriptedAttributes:
    """Reads the attributes of one TorchScript module, except its submodules, by name.

    Args:
        compiled: the module's object in C++.
    """

    def __init__(self, compiled: Any) -> None:
        described: Any = torch._C.ConcreteModuleType.from_jit_type(compiled._type())
        self.names, self.has_modules = list(described.get_attributes()), bool(described.get_modules())
        self._compiled = compiled

    def __getitem__(self, name: str) -> Any:
        """Return the attribute's value: a copy in Python if it is a container, but of the same tensors."""
        return self._compiled.getattr(name)

    def __len__(self) -> int:
        return len(self.names)


def _tensors_in(name: str, value: Any, links: tuple[Link, ...]) -> Iterator[tuple[str, tuple[Link, ...]]]:
    if issubclass(type(value), Tensor):
        yield name, links
    elif issubclass(type(value), _CONTAINERS):
        for key, item in items_of(value):
            yield from _tensors_in(f"{name}.{key}", item, (*links, (value, key, item)))


def _attributes_of(module: nn.Module) -> list[ScriptedAttributes]:
    """Return the attributes of a TorchScript module; none for a wrapper of such a module, which is surveyed itself."""
    own = vars(module)
    return [ScriptedAttributes(own["_c"])] if "_c" in own else []


def scripted_tensors(module: nn.Module) -> Iterator[tuple[str, tuple[Link, ...]]]:
    """Yield (name, links) of each tensor in attributes of a TorchScript module; the last link leads to the tensor."""
    for attributes in _attributes_of(module):
        for name in attributes.names:
            value = attributes[name]
            yield from _tensors_in(name, value, ((attributes, name, value),))


class _ClassAt(NamedTuple):
    """A TorchScript class at one place of a tree of modules.

    Attributes:
        kind: the class in C++; code: the names of the place and of the class.
        names: the names of its attributes, without and with those of the modules above.
        has_modules: True if it has submodules.
    """

    kind: Any
    code: tuple[str, str]
    names: list[tuple[str, str]]
    has_modules: bool


class ScriptedValues:
    """Reads the attributes of a TorchScript module and all its submodules as values that can be compared.

    Names and plain values that did not change are the same objects at each reading, by which they are compared.

    Args:
        compiled: returns the module's object in C++; None once it is gone.
    """

    def __init__(self, compiled: Callable[[], Any]) -> None:
        self._compiled = compiled
        self._types: dict[str, _ClassAt] = {}  # by the names of the modules above
        self._names: dict[str, str] = {}
        self._plain: dict[str, Any] = {}  # no tensors, which would be kept alive
        self._read: dict[str, Any] = {}  # what was read of each attribute whose equal values are the same

    def read(self) -> dict[str, Any]:
        """Return tensors and plain values by their dotted names."""
        values: dict[str, Any] = {}
        self._add_module("", self._compiled(), values)
        return values

    def _add_module(self, prefix: str, compiled: Any, values: dict[str, Any]) -> None:
        kind, get, read, plain = compiled._type(), compiled.getattr, self._read, self._plain
        class_at = self._types.get(prefix)
        if class_at is None or class_at.kind is not kind:
            attributes = ScriptedAttributes(compiled)
            names = [(name, prefix + name) for name in attributes.names]
            code = prefix + "__class__", kind.qualified_name()
            class_at = self._types[prefix] = _ClassAt(kind, code, names, attributes.has_modules)
        values[class_at.code[0]] = class_at.code[1]
        for name, dotted in class_at.names:
            value = get(name)
            if issubclass(type(value), Tensor):
                values[dotted] = value
            elif dotted in read and type(value) is type(read[dotted]) and value == read[dotted]:
                values[dotted] = plain[dotted]
            elif _is_exact(value):
                read[dotted] = value
                values[dotted] = plain[dotted] = repr(value) if type(value) in _CONTAINERS else value
            else:
                read.pop(dotted, None)
                self._add(dotted, _as_tuples(value), values)
        for name, child in torch._C.ModuleDict(compiled).items() if class_at.has_modules else ():
            self._add_module(f"{prefix}{name}.", child, values)

    def _add(self, name: str, value: Any, values: dict[str, Any]) -> None:
        name, key = self._names.setdefault(name, name), value_key(value)
        if issubclass(type(value), Tensor):
            values[name] = value
        elif key is not NOT_PLAIN:
            before = self._plain.get(name)
            values[name] = self._plain[name] = before if value_key(before) == key else value
        elif type(value) is tuple:
            for at, item in enumerate(value):
                self._add(f"{name}.{at}", item, values)
        else:  # captures are refused
            values[name] = type(value)


def scripted_state(compiled: Any) -> tuple[Any, ...]:
    """Return all attributes of a TorchScript module and its submodules, in their order."""
    return tuple(ScriptedValues(lambda: compiled).read().items())


def _as_tuples(value: Any) -> Any:
    """Return a value with tuples in place of its containers, which are new at each reading."""
    if type(value) is dict:
        return tuple((key, _as_tuples(item)) for key, item in value.items())
    return tuple(map(_as_tuples, value)) if issubclass(type(value), (list, tuple)) else value


def _is_exact(value: Any) -> bool:
    """True if an equal value of its class is the same to every code, which floats and tensors are not."""
    if type(value) is dict:
        return all(map(_is_exact, value)) and all(map(_is_exact, value.values()))
    return all(map(_is_exact, value)) if issubclass(type(value), (list, tuple)) else type(value) in _EXACT


def settling_runs() -> int:
    """Count the runs of a size after which TorchScript compiles nothing any more: a capture must not contain that.

    Some runs are profiled, and the next one compiles. Where gradients are computed, the parts that this gives are
    profiled from that run on, and compiled in their turn.
    """
    profiled: Callable[[], int] = torch._C._jit_get_num_profiled_runs  # type: ignore[attr-defined]
    return 2 * profiled() + 1


def refused_script(modules: Mapping[str, nn.Module], scripts: Sequence[str], *, emulated: bool) -> HostError | None:
    """Say why no graph can hold the TorchScript that calls lead to; None if graphs can.

    Args:
        modules: the modules of it, by name.
        scripts: the names of modules and functions of it.
        emulated: True if the emulator captures, which sees only operators that torch dispatches.
    """
    if emulated and torch._C._jit_can_fuse_on_cpu():
        return HostError(f"{scripts[0]} is TorchScript, whose fused kernels no emulator sees", _NO_FUSION)
    for module_name, module in modules.items():
        for attributes in _attributes_of(module):
            for name in attributes.names:
                value = attributes[name]
                if not _is_readable(_as_tuples(value)):
                    cause = f"{module_name}.{name} of a TorchScript module is a {type(value).__name__}"
                    return HostError(cause, _REMEDY)
    return None


def _is_readable(value: Any) -> bool:
    if issubclass(type(value), tuple):
        return all(map(_is_readable, value))
    return issubclass(type(value), Tensor) or value_key(value) is not NOT_PLAIN
