"""Host time of one call compared with a bare graph replay, on a module too small for device time to show."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.tools.measure import Call, synchronize
from bench.tools.replays import Replays, Served, timed
from simplegraph import eager_break, wrap
from simplegraph.base.reasons import Reason

SIZE = 8
WIDTH = 64
CALLS = 200
ROUNDS = {"cuda": 50, "cpu": 3}


class FourInputs(nn.Module):
    """Four inputs of (batch, width), one output."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a + b) * (c + d)


@eager_break
def broken(a: Tensor) -> Tensor:
    """Do nothing between two graphs."""
    return a


class Broken(FourInputs):
    """The same in two graphs, with a break between them."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return broken(a + b) * (c + d)


class Refused(FourInputs):
    """The same, but no graph can hold it: it counts its calls. It waits for nothing, so the host's time shows."""

    calls = 0

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, more: object = None) -> Tensor:
        self.calls += 1
        return super().forward(a, b, c, d)


def inputs(device: torch.device) -> tuple[Tensor, ...]:
    """Make four tensors of (SIZE, WIDTH)."""
    return tuple(torch.randn(SIZE, WIDTH, device=device) for _ in range(4))


def calls(device: torch.device, sizes: list[int]) -> dict[str, Call]:
    """Make the calls to compare, and check their results against eager.

    ``in place``: static outputs, inputs already in the static buffers. ``break``: the same with an eager break.
    ``copied``: static outputs, inputs elsewhere. ``constant``: the same, of a batch that is no captured size and never
    changes. ``bare``: `replay` of an equal graph; on a GPU only. ``refused``: a wrapped module whose capture failed, so
    that it runs eagerly. ``eager``: the same module without a wrapper. ``too large``, ``opaque``: calls above every
    size, and with an object that may change.

    Raises:
        RuntimeError: a call's result differs from eager's.
    """
    module, given = FourInputs().eval(), inputs(device)
    # Wrappers of their own: one whose buffers are known to callers must check for inputs that overlap them.
    graphed, copying, breaking = (
        wrap(model, mode=mode, capture_sizes=sizes, outputs="static", capture="upfront", verify=0, progress=False)
        for model, mode in ((module, "FULL"), (module, "FULL"), (Broken().eval(), "PIECEWISE"))
    )
    views = {}
    for model in (graphed, copying, breaking):
        model.capture_graphs(*given)
        if model is not copying:
            views[model] = tuple(model.static_inputs(SIZE).values())
            torch._foreach_copy_(views[model], given)
    refused = refused_calls(given, sizes)
    constant = wrap(module, capture_sizes=[SIZE - 1, SIZE + 1], outputs="static", verify=0, progress=False)
    for _ in range(4):
        constant(*given)
    found: dict[str, Call] = {
        "in place": Served(lambda: graphed(*views[graphed]), Replays(graphed, name="in place")),
        "break": Served(lambda: breaking(*views[breaking]), Replays(breaking, name="break")),
        "copied": Served(lambda: copying(*given), Replays(copying, name="copied")),
        "constant": Served(lambda: constant(*given), Replays(constant, name="constant")),
    }
    for name, call in found.items():
        if not torch.equal(call(), module(*given)):  # type: ignore[arg-type]
            raise RuntimeError(f"{name}: the replay's result is not eager's.")
    found |= refused
    return found if device.type != "cuda" else found | {"bare": bare_replay(module, given)}


def refused_calls(given: tuple[Tensor, ...], sizes: list[int]) -> dict[str, Call]:
    """A module that cannot be captured, wrapped and as it is.

    Raises:
        RuntimeError: its calls do not run eagerly for that reason.
    """
    eager, model = Refused().eval(), wrap(Refused().eval(), capture_sizes=sizes, progress=False)
    for _ in range(5):
        model(*given)
    reasons = model.graph_stats.eager
    if model.graph_stats.replays or reasons[Reason.CAPTURE_FAILED] < 2:
        raise RuntimeError(f"the capture did not fail: {reasons}.")
    opaque, large = object(), tuple(tensor[:1].repeat(max(sizes) + 1, 1) for tensor in given)
    bare = FourInputs().eval()
    plain = wrap(bare, capture_sizes=sizes, progress=False)
    found: dict[str, Call] = {
        "refused": lambda: model(*given),
        "eager": lambda: eager(*given),
        "too large": lambda: plain(*large),
        "too large, eager": lambda: bare(*large),
        "opaque": lambda: model(*given, opaque),
        "opaque, eager": lambda: eager(*given, opaque),
    }
    for call in found.values():
        call()
    if set(plain.graph_stats.eager) != {Reason.BATCH_TOO_LARGE} or not reasons[Reason.OPAQUE_ARGUMENT]:
        raise RuntimeError(f"calls were not refused: {plain.graph_stats.eager}, {reasons}.")
    return found


def bare_replay(module: nn.Module, given: tuple[Tensor, ...]) -> Call:
    """Capture the module and return its bare `CUDAGraph.replay`."""
    graph = torch.cuda.CUDAGraph()
    module(*given)
    with torch.cuda.graph(graph):
        output = module(*given)
    return _Bare(graph, (given, output))


def measure(device: torch.device, sizes: list[int], rounds: int, tell: Callable[[str], None]) -> dict[str, float]:
    """Medians over rounds, in us; each round's are told as it ends."""
    with torch.no_grad():
        compared = calls(device, sizes)
        Samples(device, compared).take()  # the first block warms up
        samples = Samples(device, compared)
        for number in range(rounds):
            samples.take()
            latest = ", ".join(f"{name} {taken[-1] * 1e6:.2f} us" for name, taken in samples.seconds.items())
            tell(f"round {number + 1} of {rounds}: {latest}")
    return samples.medians()


class _Bare:
    """A replay that keeps the tensors of its graph alive."""

    def __init__(self, graph: torch.cuda.CUDAGraph, alive: object) -> None:
        self._replay, self._alive = graph.replay, alive

    def __call__(self) -> None:
        self._replay()


class Samples:
    """Microseconds per call of several calls, measured in turn so that clock drift affects all alike."""

    def __init__(self, device: torch.device, compared: dict[str, Call]) -> None:
        self._device, self.calls = device, compared
        self.seconds: dict[str, list[float]] = {name: [] for name in compared}

    def take(self) -> None:
        """Measure one block of `CALLS` calls of each."""
        for name, call in self.calls.items():
            synchronize(self._device)
            with timed(call, CALLS) as bare:
                start = time.perf_counter()
                for _ in range(CALLS):
                    bare()
                self.seconds[name].append((time.perf_counter() - start) / CALLS)

    def medians(self) -> dict[str, float]:
        """The median of each, in us; refused calls above eager, a break above one graph, replays above ``bare``."""
        medians = {name: statistics.median(taken) * 1e6 for name, taken in self.seconds.items()}
        pairs = [("refused", "eager"), ("break", "in place")]
        pairs += [(name, f"{name}, eager") for name in ("too large", "opaque")]
        pairs += [(name, "bare") for name in ("in place", "copied") if "bare" in medians]
        return medians | {f"{name} above {than}": medians[name] - medians[than] for name, than in pairs}
