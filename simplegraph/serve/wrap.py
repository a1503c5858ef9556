"""Gives a module graphs without the mixin: a class decorator, and a wrapper around an instance or a function."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch import nn

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import ConfigError
from simplegraph.base.patches import subclass
from simplegraph.call.signature import check_names
from simplegraph.device.protocol import GraphPool
from simplegraph.device.select import graph_device
from simplegraph.guard.functions import FunctionModule, GraphedFunction, P, R, check_function
from simplegraph.manager.manager import CudaGraphSettings, Unpack
from simplegraph.serve.runner import CudaGraphWrapper, new_runner

ModuleType = TypeVar("ModuleType", bound=nn.Module)


if TYPE_CHECKING:
    from simplegraph.distributed.group import RankGroup

    class WrappedModule(CudaGraphWrapper, nn.Module, Any, Generic[ModuleType]):  # type: ignore[misc]
        """A module that `wrap` returned, for type checkers: a wrapper that is also accepted as the module's class.

        Attributes of that class cannot be expressed in types, and are Any.
        """

        def __getattr__(self, name: str) -> Any: ...


@overload
def cuda_graph(target: type[ModuleType]) -> type[WrappedModule[ModuleType]]: ...
@overload
def cuda_graph(
    target: None = None, **settings: Unpack[CudaGraphSettings]
) -> Callable[[type[ModuleType]], type[WrappedModule[ModuleType]]]: ...
def cuda_graph(target: Any = None, **settings: Any) -> Any:
    """Class decorator that makes an `nn.Module` class a `CudaGraphWrapper`, with or without settings.

        @cuda_graph
        class Decoder(nn.Module): ...

        @cuda_graph(capture_sizes=[1, 2, 4, 8])
        class Decoder(nn.Module): ...

    The class itself is changed and returned, so that ``super()``, pickling and subclasses work as
    before. Decorating twice, or a subclass of a decorated class, does no harm: settings add up. For mypy, which ignores
    what decorators of classes return, name the plugin `simplegraph.integrations.mypy` in its configuration.

    Raises:
        ConfigError: the target is no module class, or a setting is invalid.
    """
    if target is None:
        return functools.partial(cuda_graph, **settings)
    if not isinstance(target, type) or not issubclass(target, nn.Module):
        raise ConfigError(
            f"@cuda_graph got {target!r}; expected a subclass of torch.nn.Module. "
            "For a module that exists already, or a function, use simplegraph.wrap."
        )
    if not issubclass(target, CudaGraphWrapper):
        if "__call__" in vars(target):
            raise ConfigError(
                f"{target.__name__} defines __call__ itself; rename it to forward, or use simplegraph.wrap."
            )
        config = CudaGraphConfig().replace(**settings)  # which names unknown settings, and the known ones
        _insert_base(target)
        target.cuda_graph_config = config  # type: ignore[attr-defined]
    elif settings:
        target.cuda_graph_config = target.cuda_graph_config.replace(**settings)
    return target


@overload
def wrap(
    module: ModuleType,
    config: CudaGraphConfig | None = None,
    *,
    pool: GraphPool | None = None,
    ranks: RankGroup | None = None,
    **settings: Unpack[CudaGraphSettings],
) -> WrappedModule[ModuleType]: ...
@overload
def wrap(
    module: Callable[P, R],
    config: CudaGraphConfig | None = None,
    *,
    pool: GraphPool | None = None,
    ranks: RankGroup | None = None,
    **settings: Unpack[CudaGraphSettings],
) -> GraphedFunction[P, R]: ...
def wrap(
    module: Any,
    config: CudaGraphConfig | None = None,
    *,
    pool: GraphPool | None = None,
    ranks: RankGroup | None = None,
    **settings: Any,
) -> Any:
    """Wrap an existing module or function with graphs; the module or function itself is not changed.

    The result shares everything with the module (parameters, buffers, children, attributes, mode), is
    an instance of its class and of `CudaGraphWrapper`, has the same ``state_dict`` keys, and can be
    moved, copied and pickled; calls to it go through graphs, calls to `module` do not.

    A function, bound method or other callable works in the same way. Modules and tensors that it reaches through
    globals, its closure, defaults and the object that it belongs to are watched like a module's own, and plain values
    there (numbers, strings, flags) are part of the key, like arguments. The result is a `GraphedFunction`. On a method
    in a class body, ``@wrap`` gives each instance graphs of its own.

    Args:
        module: any `nn.Module` instance, or a function.
        config: settings.
        pool: graph memory to share with other wrappers (see `graph_pool`); None for its own. Graphs for training always
            have their own, since values that a forward saves there must last until its backward.
        ranks: the ranks whose graphs share collectives with this one's; see `RankGroup`. Copies do not keep them.
        **settings: fields of `CudaGraphConfig`, which win over `config`.

    Raises:
        ConfigError: it is no module or function, a TorchScript module, or a setting is invalid.
    """
    if isinstance(module, type) or not callable(module):
        expected = "expected a torch.nn.Module instance (use @cuda_graph for a class) or a function"
        raise ConfigError(f"wrap got {module!r}; {expected}.")
    if isinstance(module, nn.Module) and not issubclass(type(module), nn.Module):
        raise ConfigError(
            f"wrap got a {type(module).__name__} that passes for a module; wrap a function that calls it."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "wrap got a TorchScript module; wrap the Python module it was made from, or torch.nn.Sequential(module)."
        )
    if config is not None and not isinstance(config, CudaGraphConfig):
        raise ConfigError(
            f"wrap got {config!r} as its config; expected a CudaGraphConfig. Give settings by name: "
            "wrap(module, capture_sizes=[1, 2, 4])."
        )
    if not isinstance(module, nn.Module):
        if isinstance(module, GraphedFunction):
            config, module = config or module._wrapped._graph_runner.settings, vars(module)["__wrapped__"]
        check_function(module, "wrap")
        if settings.get("training"):
            raise ConfigError("wrap got a function and training=True, which is for modules; a step is for train_step.")
        made = wrap(FunctionModule(module), config or CudaGraphConfig(), pool=pool, ranks=ranks, **settings)
        return GraphedFunction(module, made, wrap)
    if config is None:
        config = module._graph_runner.settings if isinstance(module, CudaGraphWrapper) else CudaGraphConfig()
    module = unwrap(module)
    config = config.replace(**settings)
    check_names(module.forward, config)
    runner = new_runner(config, module, pool, ranks)
    kind: Any = type(module)
    kind = getattr(kind, "_simplegraph_overridden", kind)  # a class that overrides methods serves one model only
    wrapped = _share(module, _graphed(kind))
    wrapped._graph_runner = runner
    object.__setattr__(wrapped, "_graph_original", module)  # past `nn.Module`, which would make it a child
    return wrapped


@overload
def unwrap(module: WrappedModule[ModuleType]) -> ModuleType: ...
@overload
def unwrap(module: ModuleType) -> ModuleType: ...
def unwrap(module: Any) -> Any:
    """Return the module that `wrap` was given; other modules as they are."""
    return module._graph_original if hasattr(type(module), "_graph_original") else module


def check_unwrapped(model: Any, function: str) -> None:
    """Refuse a model that has graphs of its own.

    Raises:
        ConfigError: it is wrapped, or its class is.
    """
    if isinstance(model, CudaGraphWrapper):
        raise ConfigError(
            f"{function} got a {type(model).__name__} that has graphs itself: pass simplegraph.unwrap(model), or leave "
            "@simplegraph.cuda_graph and CudaGraphWrapper away from its class."
        )


def _share(module: Any, kind: type[Any]) -> Any:
    """Make an instance of another class that shares all attributes: setting one on either sets it on both."""
    other = object.__new__(kind)
    object.__setattr__(other, "__dict__", vars(module))
    return other


def _graphed(original: Any) -> type[nn.Module]:
    """Make a subclass that calls through graphs. Its runner and the module are in slots, not shared."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # ``type(self)(...)``, as slicing a Sequential does, makes another module, which is not wrapped.
        return original(*args, **kwargs)

    def reduce(self: Any, protocol: Any = None) -> tuple[Any, ...]:
        return wrap, (unwrap(self), self._graph_runner.settings)

    def shallow_copy(self: Any) -> Any:
        return wrap(copy.copy(unwrap(self)), self._graph_runner.settings)

    unscripted = getattr(original, "__jit_unused_properties__", ())
    members: dict[str, Any] = {
        "__slots__": ("_graph_original", "_graph_runner"),
        "__new__": new,
        "__copy__": shallow_copy,
        "__reduce_ex__": reduce,
        "_simplegraph_original": original,
        "__jit_unused_properties__": [*CudaGraphWrapper.__jit_unused_properties__, *unscripted],
    }
    mixins = () if issubclass(original, CudaGraphWrapper) else (CudaGraphWrapper,)
    return subclass(original, members, *mixins, mark="_simplegraph_original")  # type: ignore[no-any-return]


def _insert_base(target: Any) -> None:
    # A subclass decorated earlier lists CudaGraphWrapper before this class, which did not inherit from it then.
    children = target.__subclasses__()
    for child in children:
        children += child.__subclasses__()  # this loop will reach them
        if CudaGraphWrapper in child.__bases__:
            child.__bases__ = tuple(base for base in child.__bases__ if base is not CudaGraphWrapper)
    target.__bases__ = (CudaGraphWrapper, *target.__bases__)


def graph_pool(device: torch.device | str = "cuda") -> GraphPool:
    """Make graph memory for several wrappers or managers to share; their graphs reuse each other's memory.

    Correct only if they never run at the same time and none needs another's static output after it ran.

    Args:
        device: "cuda", a device with an index, or "cpu" for the emulator.
    """
    return graph_device(device).new_pool()
