"""A module with graphs and its eager twin, called and changed alike; every difference between them is raised."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from eager_twin import Raised, difference, outcome, same_objects, shared, tensors
from quiet import quiet
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import simplegraph as sg
from simplegraph.device.select import graph_device

W = 6  # features of every row
KEPT = 4  # outputs of earlier calls that must stay as they were
_ATOMS = (int, float, str, bool, type(None))


class Box:
    """An ordinary object, as an argument or an attribute."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Bare:
    """An object without attributes."""


class Scaling(Box):
    """A box that is called."""

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.value


@sg.eager_break
def attend(h: Tensor, out: Tensor, *more: Tensor) -> None:
    """Write to buffers of the caller, as a kernel of attention does."""
    for buffer in (out, *more):
        buffer.copy_(torch.tanh(h) * 0.5)


class Shifting(Scaling):
    """One that does something else when it is called."""

    def __call__(self, h: Tensor) -> Tensor:
        return h + self.value


_REFUSED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def refuse_captures(h: Tensor, owner: nn.Module, times: int) -> None:
    """Fail in the first captures of an owner, as what only a capture cannot do."""
    if graph_device(h.device).is_capturing() and _REFUSED.setdefault(owner, 0) < times:
        _REFUSED[owner] += 1
        raise LookupError("not in a capture")


def descend(module: nn.Module, kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
    """Take a step of an optimizer of this kind on all parameters, in place, with gradients that are drawn."""
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    kind(parameters, lr=0.05, **settings).step()
    for parameter in parameters:
        parameter.grad = None


def train(module: Any) -> None:
    """Train the layers named f... for a few steps in place; beside the module with graphs, most are replays."""
    layers = [child for name, child in module.named_children() if name[0] == "f"]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    wanted = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.SGD(parameters, lr=0.5)

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    def step(x: Tensor) -> None:
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if isinstance(module, sg.CudaGraphWrapper):
        step = sg.train_step(step, optimizers=optimizer, modules=layers, progress=False)
    x = torch.randn(4, W, device=parameters[0].device)
    for turn in range(5):
        with torch.enable_grad():
            step(x)
        if turn == 3:  # what is folded is up to date here, and the last step is a replay
            forward(x)
    for parameter, grads in zip(parameters, wanted, strict=True):
        parameter.requires_grad_(grads)


_STATIC: weakref.WeakKeyDictionary[nn.Module, dict[Any, Tensor]] = weakref.WeakKeyDictionary()


def in_place(module: Any, x: Tensor, *, largest: bool = False) -> Tensor:
    """The static input of this many rows, or so many of the largest, with these values; else a tensor of them.

    It is held, and used on when the graphs are gone.
    """
    if isinstance(module, sg.CudaGraphWrapper):
        held, size = _STATIC.setdefault(module, {}), None if largest else len(x)
        with contextlib.suppress(sg.ReplayError, sg.CaptureSizeError, KeyError):
            held[size, len(x)] = module.static_inputs(size)["x"][: len(x)]
        static = held.get((size, len(x)))
        if static is not None and (static.shape, static.stride(), static.dtype) == (x.shape, x.stride(), x.dtype):
            return static.copy_(x)
    return x.clone()


class Different(AssertionError):
    """The wrapped module and its twin differ."""


def collect(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


class Twins:
    """Two modules of one class with the same weights; one of them has graphs.

    Args:
        kind: the class.
        device: where.
        seed: of weights and of everything drawn later.
        frozen: True for parameters that do not require gradients.
        optimized: True if `sg.optimize` rewrites the one with graphs first.
        mixin: True if its class has graphs, instead of a wrapper around it.
        sleepable: True if its memory can sleep.
        settings: of its graphs.
    """

    def __init__(
        self,
        kind: type[nn.Module],
        device: torch.device | str,
        seed: int = 0,
        frozen: bool = True,
        optimized: bool = False,
        mixin: bool = False,
        sleepable: bool = False,
        **settings: Any,
    ) -> None:
        self.device, self.seed, self.turn = torch.device(device), seed, 0
        graphed = type(kind.__name__, (sg.CudaGraphWrapper, kind), {}, progress=False, **settings) if mixin else kind
        self.eager = self._made(kind, frozen)
        with sg.sleepable(device=device) if sleepable else contextlib.nullcontext():
            self.module = self._made(graphed, frozen)
        if optimized:
            sg.optimize(self.module)
        self.model: Any = self.module if mixin else sg.wrap(self.module, progress=False, **settings)
        self.spaces = {id(m): _namespace(m, self.device) for m in (self.eager, self.model)}
        self.kept: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=KEPT)
        self._coarse = False
        self._static = settings.get("outputs") == "static"
        self._churn = random.Random(seed)
        self._garbage: collections.deque[Tensor] = collections.deque(maxlen=12)
        self._compare_state("after wrap")

    def _made(self, kind: type[nn.Module], frozen: bool) -> nn.Module:
        torch.manual_seed(self.seed)
        module = kind().to(self.device).eval()
        return module.requires_grad_(not frozen)

    # What a program does.

    def call(self, rows: int, mode: str, arguments: str) -> None:
        """Call both with the same arguments, written with x, y, base (all of random rows), kept and m."""
        self.turn += 1
        results = []
        for module in (self.model, self.eager):
            space = self.spaces[id(module)]
            torch.manual_seed(self.seed + self.turn)
            space |= {name: torch.randn(rows + more, W, device=self.device) for name, more in _INPUTS.items()}
            space["n"] = rows
            before = self._counted
            with quiet():
                args, kwargs = eval(f"collect({arguments})", space)
                given = args, kwargs, space["x"], space["y"], space["base"]
                with _entered(mode, self.device.type, module is self.model):
                    result = outcome(lambda: module(*args, **kwargs))  # noqa: B023
            results.append((result, given, _random_state(self.device)))
            if module is self.model and not isinstance(result, Raised) and self._counted == before:
                raise Different(f"call {self.turn}: neither a replay nor an eager call is counted")
            if isinstance(result, Raised):
                result.error.__traceback__ = None  # its frames hold weights, which then cannot be swapped
            else:
                kept = _first_tensor(result, torch.zeros(1, W, device=self.device))
                # A static output that nobody holds may be overwritten before a call is compared.
                space["kept"] = kept.clone() if self._static and self.seed % 2 else kept
        self._churn_memory()
        lent = self._static and "kept" in arguments  # the replay itself may overwrite that
        self._coarse = "autocast" in mode
        self._compare_call(*results, lent=lent, keep="in_place" not in arguments)

    def change(self, statement: str) -> None:
        """Change both modules, `m`, the same way; a change that is refused must be refused for both."""
        refused = []
        for module in (self.model, self.eager):
            torch.manual_seed(self.seed + self.turn)
            with quiet(), torch.no_grad():
                refused.append(outcome(lambda: exec(statement, self.spaces[id(module)])))  # noqa: B023
            if isinstance(refused[-1], Raised):
                refused[-1].error.__traceback__ = None  # as in a call
        found = difference(*refused)
        self._churn_memory()
        self._raise(found, f"change {statement!r}")
        self._compare_state(f"after {statement!r}")

    def graphs(self, statement: str) -> None:
        """Change the graphs alone, of `m`."""
        with quiet(), torch.no_grad():
            exec(statement, self.spaces[id(self.model)])
        self._compare_state(f"after {statement!r}")

    def capture(self, rows: int, arguments: str = "x") -> None:
        """Capture all sizes; only the wrapped module sees the real runs of this, so its twin is a copy of it."""
        space = self.spaces[id(self.model)]
        torch.manual_seed(self.seed + self.turn)
        space |= {name: torch.randn(rows + more, W, device=self.device) for name, more in _INPUTS.items()} | {"n": rows}
        args, kwargs = eval(f"collect({arguments})", space)
        with quiet(), torch.no_grad(), contextlib.suppress(sg.InputError):
            self.model.capture_graphs(*args, **kwargs)
        self.eager = copy.deepcopy(sg.unwrap(self.model))
        self.spaces[id(self.eager)] = _namespace(self.eager, self.device) | {"kept": space["kept"].clone()}

    @property
    def _counted(self) -> int:
        stats = self.model.graph_stats
        return int(stats.replays) + sum(stats.eager.values())

    # What must be the same.

    def _compare_call(self, mine: Any, other: Any, *, lent: bool, keep: bool) -> None:
        (actual, given, state), (expected, twin, other_state) = mine, other
        where = f"call {self.turn}"
        coarsest = torch.bfloat16 if self._coarse else None
        if lent:  # so do outputs that lie in it
            actual, expected = _without_lent((actual, given), (expected, twin))
        self._raise(difference(_unboxed(actual), _unboxed(expected), coarsest=coarsest), where)
        if not lent:
            self._raise(difference(_plain(given), _plain(twin), coarsest=coarsest), f"{where}: arguments")
        if not isinstance(expected, Raised) and not lent:
            for name, related in (("memory shared", shared), ("objects returned", same_objects)):
                found = related(actual, (*given, _holders(self.model)))
                wanted = related(expected, (*twin, _holders(self.eager)))
                self._raise(None if found == wanted else f"{found}, eager's {wanted}", f"{where}: {name}")
        self._raise(None if torch.equal(state, other_state) else "differs", f"{where}: state of the generator")
        self._compare_state(f"after {where}")
        for result, wanted in self.kept:
            self._raise(difference(result, wanted, coarsest=torch.bfloat16), f"after {where}: an earlier output")
        if keep and not (isinstance(actual, Raised) or self._static):
            self.kept.append((_unboxed(actual), _unboxed(expected)))

    def _compare_state(self, where: str) -> None:
        state, wanted = _state(self.model), _state(self.eager)
        for name in state.keys() & wanted.keys():
            if ".cache" in name:  # sizes that calls are padded to have entries, too, and early: graphs read them
                state[name] = {size: state[name][size] for size in wanted[name] if size in state[name]}
        found = difference(state, wanted, coarsest=torch.bfloat16 if self._coarse else None)
        self._raise(found, f"{where}: state of the module")

    def _raise(self, found: str | None, where: str) -> None:
        if found is not None:
            raise Different(f"{where}: {found}\n{self.model.graph_report()}")

    def _churn_memory(self) -> None:
        """Fill freed memory with garbage, so that reading it shows."""
        shapes = self._churn.choices([(W,), (W, W), (1, W), (2, W), (4, W), (6, W), (8, W), (64,), (300,)], k=8)
        made = [
            torch.full(shape, self._churn.choice([float("nan"), 1e30, -7.0]), device=self.device) for shape in shapes
        ]
        self._garbage.extend(self._churn.sample(made, 3))


_INPUTS = {"x": 0, "y": 0, "base": 3}  # and how many rows more than the call's


def _namespace(module: Any, device: torch.device) -> dict[str, Any]:
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "sg": sg,
        "W": W,
        "Box": Box,
        "Scaling": Scaling,
        "Shifting": Shifting,
        "OrderedDict": collections.OrderedDict,
        "gc": gc,
        "contextlib": contextlib,
        "collect": collect,
        "m": module,
        "in_place": in_place,
        "descend": descend,
        "train": train,
    }
    return names | {"kept": torch.zeros(1, W, device=device), "device": device, "copy": copy}


@contextlib.contextmanager
def _entered(mode: str, kind: str, graphed: bool) -> Iterator[None]:
    """Modes by their names: no_grad, inference_mode, grad, autocast, flops, eager, or several."""
    modes: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": torch.enable_grad,
        "autocast": lambda: torch.autocast(kind, torch.bfloat16),
        "flops": lambda: FlopCounterMode(display=False),
        "eager": sg.eager if graphed else contextlib.nullcontext,
    }
    with contextlib.ExitStack() as stack:
        for name in mode.split():
            stack.enter_context(modes[name]())
        yield


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _state(module: Any) -> dict[str, Any]:
    """Everything that the modules below one hold, by name: tensors, containers, objects, numbers, hooks by count."""
    found: dict[str, Any] = {}
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if name.startswith("_simplegraph"):
                continue
            if name == "_modules":
                found[f"{prefix}.{name}"] = list(value)
            elif name.endswith("_hooks"):
                found[f"{prefix}.{name}"] = len(value)
            elif name.startswith("seen"):
                found[f"{prefix}.{name}"] = _plain(value())  # what left the module by another way
            else:
                found[f"{prefix}.{name}"] = _plain(value)
    return found


def _plain(value: Any, depth: int = 0) -> Any:
    """Objects as their attributes, modules as their state, what has no value as its type."""
    if isinstance(value, (Tensor, *_ATOMS)):
        return value
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)  # equal sets are in any order
    if isinstance(value, collections.deque):
        value = list(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, nn.Module) and depth < 4:
        return _state(value)
    if isinstance(value, Box):
        return {"box": _plain(value.value, depth + 1)}
    return type(value).__name__


def _unboxed(value: Any) -> Any:
    """Return an output with boxes as what is in them: those of the two modules are never the same."""
    if isinstance(value, Box):
        return {"box": value.value}
    return type(value)(map(_unboxed, value)) if type(value) in (tuple, list) else value


def _holders(module: Any) -> list[Tensor]:
    """The tensors that a module holds, in a fixed order, as things that an output may share memory with."""
    return [*module.parameters(), *module.buffers()]


def _first_tensor(result: Any, default: Tensor) -> Tensor:
    """A tensor of this shape of inputs in a result, to be passed to a later call."""
    found = (t.detach() for t in tensors(result) if t.dim() == 2 and t.shape[1] == W and t.dtype is torch.float32)
    return next(found, default)


def _without_lent(mine: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Replace what shares memory with an argument, in either of two results given with arguments, by None in both."""
    trees = [pytree.tree_flatten(result) for result, _ in (mine, other)]
    lent = [_shared_with(leaves, given) for (leaves, _), (_, given) in zip(trees, (mine, other), strict=True)]
    if len(lent[0]) != len(lent[1]):
        return mine[0], other[0]
    either = [any(pair) for pair in zip(*lent, strict=True)]
    kept = ([None if out else leaf for leaf, out in zip(leaves, either, strict=True)] for leaves, _ in trees)
    first, second = (pytree.tree_unflatten(leaves, spec) for leaves, (_, spec) in zip(kept, trees, strict=True))
    return first, second


def _shared_with(leaves: list[Any], given: Any) -> list[bool]:
    memory = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    return [isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in memory for leaf in leaves]
