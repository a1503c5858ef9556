"""`cuda_graph`, a class decorator, and `wrap`, for an instance or a function: graphs without the mixin."""

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
from simplegraph.guard.functions import FunctionModule
from simplegraph.manager.manager import CudaGraphSettings, Unpack
from simplegraph.serve.graphed_function import GraphedFunction, P, R, check_function
from simplegraph.serve.runner import CudaGraphWrapper, new_runner

ModuleType = TypeVar("ModuleType", bound=nn.Module)


if TYPE_CHECKING:
    from simplegraph.distributed.group import RankGroup

    class WrappedModule(CudaGraphWrapper, nn.Module, Any, Generic[ModuleType]):  # type: ignore[misc]
        """The type of a module that `wrap` returned: a wrapper that type checkers also accept as the module's class.

        Attributes of the module's class cannot be expressed in types, and are Any.
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

    The class itself is changed and returned, so that ``super()``, pickling and subclasses work as before. You may
    decorate a class twice, or a subclass of a decorated class: settings add up. Mypy ignores the types that class
    decorators return: name the plugin `simplegraph.integrations.mypy` in its configuration.

    Raises:
        ConfigError: the target is not a module class, or a setting is invalid.
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
    """Wrap an existing module or function, so that its calls go through graphs; the original is not changed.

    The result shares everything with the module (parameters, buffers, children, attributes, mode), is an instance of
    its class and of `CudaGraphWrapper`, has the same ``state_dict`` keys, and can be moved, copied and pickled. Calls
    of the result go through graphs; calls of `module` do not.

    A function, bound method or other callable is wrapped in the same way; the result is a `GraphedFunction`. Modules
    and tensors that the function reaches (through globals, its closure, its defaults, or the object that it belongs to)
    are guarded like a module's own, and plain values there (numbers, strings, flags) are part of the key, like
    arguments. On a method in a class body, ``@wrap`` gives each instance its own graphs.

    Args:
        module: any `nn.Module` instance, or a function.
        config: settings.
        pool: graph memory to share with other wrappers (see `graph_pool`); None for a separate pool. Graphs for
            training always have a separate pool, since values that a forward saves there must last until its backward.
        ranks: the ranks whose graphs share collectives with these graphs; see `RankGroup`. Copies do not keep them.
        **settings: fields of `CudaGraphConfig`, which take precedence over `config`.

    Raises:
        ConfigError: `module` is neither a module nor a function, or is a TorchScript module; or a setting is invalid.
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
    """Return the module that was passed to `wrap`; return other modules as they are."""
    return module._graph_original if hasattr(type(module), "_graph_original") else module


def check_unwrapped(model: Any, function: str) -> None:
    """Refuse a model that has graphs of its own.

    Raises:
        ConfigError: the model is wrapped, or its class is.
    """
    if isinstance(model, CudaGraphWrapper):
        raise ConfigError(
            f"{function} got a {type(model).__name__} that has graphs itself: pass simplegraph.unwrap(model), or leave "
            "@simplegraph.cuda_graph and CudaGraphWrapper away from its class."
        )


def _share(module: Any, kind: type[Any]) -> Any:
    """Make an instance of another class that shares all attributes: an attribute set on one is set on both."""
    other = object.__new__(kind)
    object.__setattr__(other, "__dict__", vars(module))
    return other


def _graphed(original: Any) -> type[nn.Module]:
    """Make a subclass whose calls go through graphs. Its runner and the original are in slots, which are not shared."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # ``type(self)(...)``, as in slicing a Sequential, makes a module that is not wrapped.
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
    # A subclass that was decorated earlier lists CudaGraphWrapper as a base of its own.
    children = target.__subclasses__()
    for child in children:
        children += child.__subclasses__()  # this loop will reach them
        if CudaGraphWrapper in child.__bases__:
            child.__bases__ = tuple(base for base in child.__bases__ if base is not CudaGraphWrapper)
    target.__bases__ = (CudaGraphWrapper, *target.__bases__)


def graph_pool(device: torch.device | str = "cuda") -> GraphPool:
    """Make graph memory to share among several wrappers or managers, whose graphs reuse each other's memory.

    Share it only if they never run at the same time, and if none reads another's static output after its own run.

    Args:
        device: "cuda", a device with an index, or "cpu" for the emulator.
    """
    return graph_device(device).new_pool()
