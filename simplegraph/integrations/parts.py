"""`wrap_parts`: gives graphs to the largest submodules of a model that can have them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.config import check_settings
from simplegraph.base.errors import ConfigError, InputError, VerificationError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import SOON, Reason
from simplegraph.call.signature import device_of
from simplegraph.device.protocol import GraphPool
from simplegraph.integrations.graphed_parts import GraphedParts
from simplegraph.manager.replay_proof import cloned, first_difference
from simplegraph.serve.runner import CudaGraphWrapper
from simplegraph.serve.wrap import graph_pool, wrap

# Reasons of eager calls after which graphs may serve.
_RUNS = 8  # of the model, until parts that can have graphs have replayed


def wrap_parts(
    model: nn.Module,
    inputs: Any,
    *,
    others: Sequence[Any] = (),
    call: Callable[..., Any] | None = None,
    min_operators: int = 8,
    pool: GraphPool | None = None,
    **settings: Any,
) -> GraphedParts:
    """Give graphs to the largest submodules that can have them, in place: for a model that `wrap` cannot serve whole.

        graphs = sg.wrap_parts(detector.eval(), [images])
        detector(images)  # backbone and heads are replayed, what reads values back runs eagerly
        print(graphs.report())  # which parts, and why the others have none
        graphs.remove()

    The model is run on the inputs a few times, from its children down: a part that is not replayed by then, or that
    replays too little, is put back, and its own children are tried. Each graph is compared with eager at its first
    replays, and the model's result with what it was. Parts capture each combination of input shapes that comes by
    itself, up to `max_signatures` (64), unless `capture_sizes` is given; all share their graphs' memory.

    Args:
        model: in evaluation mode, on its device.
        inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        others: further inputs, such as batches of other shapes: a part then needs a graph for each.
        call: what is called with them, such as ``model.generate``; the model by default.
        min_operators: what a part has at least; with fewer, a replay with its copies is not worth it.
        pool: graph memory to share with other wrappers.
        **settings: fields of `CudaGraphConfig`, for every part.

    Returns:
        A handle with `parts`, `skipped`, `report` and `remove`; as a context manager it calls `remove` at the end.

    Raises:
        InputError: the model is in training mode, or has graphs already.
        ConfigError: a setting is unknown or invalid, or `model` is no module.
        VerificationError: the model with graphs returned something else; nothing is changed.
    """
    _check(model, settings)
    runs = _Runs(model, call or model, [inputs, *others])
    given: dict[str, Any] = {
        "progress": False,
        "max_signatures": 64,  # of parts that are called several times
        "exact_shapes": "capture_sizes" not in settings,
        "pool": pool or graph_pool(runs.device),
    }
    graphs = GraphedParts(model)
    try:
        level, tried = _children("", model), set[nn.Module]()
        while level:
            level = _wrap_level(graphs, model, level, tried, given | settings)
            level = _sift(graphs, level, runs.until_replayed(graphs, level), min_operators)
        runs.compare(graphs)
    except BaseException:
        graphs.remove()
        raise
    return graphs


def _check(model: Any, settings: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap_parts got a {type(model).__name__}; expected a torch.nn.Module.")
    check_settings(settings, "wrap_parts: ")
    wrapped = next((name for name, part in model.named_modules() if isinstance(part, CudaGraphWrapper)), None)
    if model.training or wrapped is not None:
        state = "in training mode: call .eval() first" if model.training else f"with graphs already, in {wrapped!r}"
        raise InputError(f"wrap_parts got a {type(model).__name__} {state}.")


class _Runs:
    """Runs of a model on the same inputs, with the same random numbers, without gradients.

    Attributes:
        device: of the model.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self._name, self._call = type(model).__name__, call
        self._inputs = [flatten(_arguments(example)) for example in inputs]
        leaves = [leaf for leaves, _ in self._inputs for leaf in leaves]
        self.device = device_of([*model.parameters(), *model.buffers(), *leaves])
        self._expected = self._run()
        self._repeats = first_difference(self._run(), self._expected) is None

    def _run(self) -> list[Any]:
        """Run on copies, which a forward may write to; returns what can be compared."""
        results: list[Any] = []
        for leaves, spec in self._inputs:
            args, kwargs = spec.unflatten(cloned(leaves))
            with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                results += flatten(self._call(*args, **kwargs))[0]
        return cloned([leaf for leaf in results if isinstance(leaf, (Tensor, bool, int, float, str))])

    def until_replayed(self, graphs: GraphedParts, level: Mapping[str, nn.Module]) -> dict[str, tuple[int, int]]:
        """Run until no part of a level is about to be replayed; returns the last run's replays and eager calls."""
        stats = {name: graphs.parts[name].graph_stats for name in level}
        for _ in range(_RUNS):
            before = {name: (graph_stats.replays, graph_stats.eager.copy()) for name, graph_stats in stats.items()}
            self.compare(graphs)
            eager = {name: graph_stats.eager - before[name][1] for name, graph_stats in stats.items()}
            if not any(SOON & set(reasons) for reasons in eager.values()):
                break
        return {
            name: (graph_stats.replays - before[name][0], eager[name].total()) for name, graph_stats in stats.items()
        }

    def compare(self, graphs: GraphedParts) -> None:
        """Run once. Raises VerificationError if the result differs from the one without graphs."""
        results = self._run()
        different = first_difference(results, self._expected) if self._repeats else None
        if different is not None:
            raise VerificationError(
                f"wrap_parts: {self._name} with graphs in {', '.join(graphs.parts)} returned something else: "
                f"{different}. Nothing was changed. Please wrap its parts by hand."
            )


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _wrap_level(
    graphs: GraphedParts, model: nn.Module, level: Mapping[str, nn.Module], tried: set[nn.Module], settings: Any
) -> dict[str, nn.Module]:
    """Wrap those parts of a level that were not tried under another name; return those that can be wrapped."""
    places = _places(model)
    for name, part in level.items():
        if part in tried:
            continue
        tried.add(part)
        try:
            graphs.put(name, wrap(part, **settings), places[part])
        except ConfigError as error:  # TorchScript, or a setting that no part can have
            graphs.skipped[name] = str(error)
    return {name: part for name, part in level.items() if name in graphs.parts}


def _sift(
    graphs: GraphedParts, level: Mapping[str, nn.Module], ran: Mapping[str, tuple[int, int]], least: int
) -> dict[str, nn.Module]:
    """Put back parts that are not replayed or are too small; returns the children to try next."""
    below: dict[str, nn.Module] = {}
    for name, part in level.items():
        (replays, eager), stats = ran[name], graphs.parts[name].graph_stats
        operators = max((least if graph.nodes is None else graph.nodes for graph in stats.graphs.values()), default=0)
        if replays and not eager and operators >= least:
            continue
        graphs.take_out(name)
        if replays and not eager:
            graphs.skipped[name] = f"fewer operators than {least}: a graph would not be faster"
            continue
        if eager:
            graphs.skipped[name] = _why(stats)
        below |= _children(f"{name}.", part)
    return below


def _why(stats: Any) -> str:
    reason = max(stats.eager, key=lambda candidate: (candidate not in SOON, stats.eager[candidate]))
    if reason is Reason.CAPTURE_FAILED and stats.failures:
        return str(next(iter(stats.failures.values())))
    return str(stats.explained(reason))


def _children(prefix: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the children that may be worth a graph: all but torch's single layers, recurrent ones excepted."""
    return {
        f"{prefix}{name}": child
        for name, child in module.named_children()
        if not isinstance(child, CudaGraphWrapper)
        and (
            any(True for _ in child.children())
            or isinstance(child, nn.RNNBase)
            or not type(child).__module__.startswith("torch.nn.")
        )
    }


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[Any, str]]]:
    """Return where each submodule is held."""
    places: dict[nn.Module, list[tuple[Any, str]]] = collections.defaultdict(list)
    for holder in model.modules():
        for name, child in holder._modules.items():
            if child is not None:
                places[child].append((holder, name))
    return places
