"""Each remedy for what a library reads back, keeps or steps works on the case that prints it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.distributions import Distribution

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.doctor.explain import explain
from tests.graph.test_remedies import WIDTH, check_served, message_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
UNVALIDATED = "torch.distributions.Distribution.set_default_validate_args(False)"


@pytest.fixture(autouse=True)
def distributions_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do by default: the first use of torch.compile switches it off for the process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """Follow the remedy, and undo it."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


# Distributions.


def likely(x: Tensor, **settings: Any) -> Tensor:
    return distributions.Normal(x, x.abs() + 1, **settings).log_prob(x + 1)


def straight(x: Tensor, **settings: Any) -> Tensor:
    return distributions.OneHotCategoricalStraightThrough(logits=x, **settings).mean


def relaxed(x: Tensor, **settings: Any) -> Tensor:
    warm = torch.ones((), device=x.device)
    return distributions.RelaxedOneHotCategorical(warm, logits=x, **settings).logits


@pytest.mark.parametrize(("part", "enough"), [(likely, True), (straight, False), (relaxed, False)])
def test_checks_of_a_distribution_are_switched_off(
    part: Callable[..., Tensor], enough: bool, device: torch.device
) -> None:
    """Some distributions make others, which are passed nothing: what was passed already is not advised alone."""

    def off(x: Tensor) -> Tensor:
        return part(x, validate_args=False)

    assert UNVALIDATED in message_of(part, device)
    if enough:
        check_served(off, device)
    else:
        assert UNVALIDATED in message_of(off, device)
    with unvalidated():
        check_served(part, device)


@pytest.mark.parametrize("around", [lambda normal: normal, lambda normal: distributions.Independent(normal, 1)])
def test_a_sample_of_a_normal_distribution_is_drawn_as_in_eager(around: Any, device: torch.device) -> None:
    """`torch.normal` looks at every standard deviation first, which a graph leaves out."""

    def draw(x: Tensor) -> tuple[Tensor, ...]:
        normal = around(distributions.Normal(x, x.abs() + 1, validate_args=False))
        return normal.sample(), torch.normal(0.5, x.abs()), torch.normal(x[:1].half(), x.abs())

    with unvalidated():
        served: Any = sg.wrap(draw, capture_sizes=[4], progress=False)
        for seed in range(6):
            x = torch.randn(4, WIDTH, device=device)
            torch.manual_seed(seed)
            found = served(x)
            torch.manual_seed(seed)
            assert all(map(torch.equal, found, draw(x)))
        assert served.graph_stats.replays >= 4
        wrong: Any = sg.wrap(lambda x: torch.normal(0.0, x), capture_sizes=[4], progress=False)
        with pytest.raises(RuntimeError, match="std"):  # eager calls are checked
            wrong(torch.full((4, 2), -1.0, device=device))


def test_a_distribution_that_decides_by_what_it_draws_is_not_told_of_checks(device: torch.device) -> None:
    def drawn(x: Tensor) -> Tensor:
        return distributions.VonMises(x, x.abs() + 1, validate_args=False).sample()

    remedy = message_of(drawn, device).rpartition("\n")[2]
    assert "validate_args" not in remedy
    assert "mark the function with @simplegraph.eager_break" in remedy
    marked = sg.eager_break(drawn)
    served: Any = sg.wrap(lambda x: marked(x + 1) + 1, capture_sizes=[4], progress=False, mode="PIECEWISE")
    for _ in range(6):
        served(torch.randn(4, WIDTH, device=device))
    assert served.graph_stats.replays >= 4


# PyTorch Geometric, as its files read back.

SCATTER = """
def scatter(src, index, dim_size=None):
    if dim_size is None:
        dim_size = int(index.max()) + 1
    return src.new_zeros(dim_size, src.shape[1]).index_add(0, index, src)
"""
LOOPS = """
def remove_self_loops(edge_index):
    mask = edge_index[0] != edge_index[1]
    return edge_index[:, mask]
"""


def library(folder: Path, name: str, source: str) -> Any:
    file = folder / "site-packages" / "torch_geometric" / name
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    held: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), held)
    return next(value for key, value in held.items() if not key.startswith("__"))


def test_the_size_of_a_scatter_is_passed(device: torch.device, tmp_path: Path) -> None:
    scatter = library(tmp_path, "utils/_scatter.py", SCATTER)
    index = torch.tensor([0, 0, 1, 2], device=device)
    message = message_of(lambda x: scatter(x, index + 0 * x[:, 0].long()), device)
    assert "Pass the number of nodes or graphs to the call (dim_size=, size=, batch_size= or num_nodes=" in message
    assert "cached" not in message
    for dim_size in (3, None):  # an index that stays has the same maximum at every call
        served: Any = sg.wrap(
            lambda x, size=dim_size: scatter(x, index, dim_size=size), exact_shapes=True, progress=False
        )
        for _ in range(6):
            x = torch.randn(4, WIDTH, device=device)
            torch.testing.assert_close(served(x), scatter(x, index))
        assert served.graph_stats.replays >= 4


def test_self_loops_are_added_once_outside(device: torch.device, tmp_path: Path) -> None:
    remove = library(tmp_path, "utils/loop.py", LOOPS)
    edges = torch.tensor([[0, 1, 2], [0, 2, 1]], device=device)
    message = message_of(lambda x: x + remove(edges).sum(), device)
    assert "Pass cached=True to the layer if its edges stay the same, or add_self_loops=False" in message


def test_layers_of_pytorch_geometric_follow_what_they_are_told(device: torch.device) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]], device=device)
    batch = torch.tensor([0, 0, 1, 1], device=device)

    class Net(nn.Module):
        def __init__(self, layer: Any, *passed: Any, **settings: Any) -> None:
            super().__init__()
            self.layer, self.passed, self.settings = layer, passed, settings

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(x, *self.passed, **self.settings)
            return found

    pairs = [
        (Net(geometric.GCNConv(WIDTH, 4), edges), Net(geometric.GCNConv(WIDTH, 4, cached=True), edges), "cached=True"),
        (
            Net(geometric.GATConv(WIDTH, 4), edges),
            Net(geometric.GATConv(WIDTH, 4, add_self_loops=False), edges),
            "loops",
        ),
        (Net(geometric.global_mean_pool, batch), Net(geometric.global_mean_pool, batch, size=2), "size="),
        (Net(geometric.MeanAggregation(), batch), Net(geometric.MeanAggregation(), batch, dim_size=2), "dim_size="),
        (Net(geometric.GraphNorm(WIDTH), batch), Net(geometric.GraphNorm(WIDTH), batch, batch_size=2), "batch_size="),
    ]
    for plain, mended, said in pairs:
        plain.to(device).eval()
        mended.to(device).eval()
        refused: Any = sg.wrap(plain, exact_shapes=True, progress=False)
        failed = refused.capture_graphs(torch.randn(4, WIDTH, device=device)).failed.values()
        assert all(said in str(error) for error in failed)
        # The largest index of a tensor that nothing writes is read once, so where there is no mask, nothing is refused.
        assert len(failed) == (said in ("cached=True", "loops")), failed
        served: Any = sg.wrap(mended, exact_shapes=True, progress=False)
        for _ in range(6):
            x = torch.randn(4, WIDTH, device=device)
            torch.testing.assert_close(served(x), mended(x))
        assert served.graph_stats.replays >= 4
        # Edges fit one batch alone: the run of fewer rows ends before a kernel reads others.
        sized: Any = sg.wrap(mended, capture_sizes=[2, 4], progress=False)
        sized.capture_graphs(x)
        for _ in range(3):
            torch.testing.assert_close(sized(x), mended(x))


# Tensors that others keep.


def refusal(target: Any, device: torch.device, **settings: Any) -> str:
    served: Any = sg.wrap(target, exact_shapes=True, progress=False, **settings)
    for _ in range(4):
        x = torch.randn(4, WIDTH, device=device)
        served(x)
    assert not served.graph_stats.replays
    (message,) = served.graph_stats.failures.values()
    return str(message)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_weight_that_a_hook_of_torch_sets_is_made_another_way_for_breaks(name: str, device: torch.device) -> None:
    def model(norm: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU()).to(device).eval()

    check_served(model(getattr(nn.utils, name)), device)
    message = refusal(model(getattr(nn.utils, name)), device, mode="PIECEWISE")
    assert "`0.weight` would keep a tensor" in message
    assert (
        "call remove_weight_norm or remove_spectral_norm on the layer before, or make it by torch.nn.utils." in message
    )
    assert "Return it" not in message
    removed: Any = model(getattr(nn.utils, name))
    getattr(nn.utils, f"remove_{name}")(removed[0])
    check_served(removed, device, mode="PIECEWISE")
    check_served(model(getattr(nn.utils.parametrizations, name)), device, mode="PIECEWISE")


SPIKING = """
from torch import nn
class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.states = []
    def forward(self, x):
        self.states[:] = [x * 2]
        return self.states[0] + 1
"""


@pytest.fixture
def spiking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "spiking_layers.py").write_text(SPIKING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("spiking_layers").Leaky
    sys.modules.pop("spiking_layers")


def test_a_tensor_that_a_library_keeps_is_kept_in_a_break(spiking: Any, device: torch.device) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), spiking(), nn.Linear(WIDTH, WIDTH)).to(device).eval()

    message = refusal(model(), device)
    assert "`1.states` would keep a tensor" in message
    assert "Return it" not in message
    assert "simplegraph.break_at(model, \"1\") and mode='PIECEWISE'" in message
    broken = model()
    sg.break_at(broken, "1")
    check_served(broken, device, mode="PIECEWISE")
    part = model()
    message = refusal(lambda x: part(x) * 2, device)
    assert "simplegraph.break_at(part, \"1\") and mode='PIECEWISE'" in message


def test_a_tensor_that_ones_own_module_keeps_is_returned_or_an_attribute(device: torch.device) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.states: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.states[:] = [x * 2]
            return self.states[0] + 1

    class Sets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.state = x * 2
            return self.state + 1

    class SetsTwo(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.state = (x * 2, x * 3)
            return self.state[0] + self.state[1]

    class Returns(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            state = x * 2
            return state + 1, state

    message = refusal(Keeps().to(device).eval(), device)
    advised = "keep it in an attribute of a module, alone or in a tuple, with no list, dict or object around it: "
    advised += "self.last = tensor, self.state = (h, c)."
    assert f"Return it instead, or {advised}" in message
    check_served(Returns().to(device).eval(), device)
    check_served(Sets().to(device).eval(), device)
    check_served(SetsTwo().to(device).eval(), device)


# Gradients that a function computes itself.


def test_a_function_that_calls_backward_itself_is_told_where_gradients_are_enabled(device: torch.device) -> None:
    grown = nn.Linear(WIDTH, WIDTH, device=device)
    place = nn.Parameter(torch.randn(WIDTH, device=device))

    def descend(x: Tensor) -> Tensor:
        place.grad = None
        energy = (grown(x) * place).square().mean()
        energy.backward(inputs=[place])
        return energy.detach() + place.grad.sum()

    def enabled(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return descend(x)

    def returned(x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = (grown(x) * place).square().mean()
            (gradient,) = torch.autograd.grad(energy, [place])
            return energy.detach() + gradient.sum()

    with torch.inference_mode(False), torch.enable_grad():
        plain: Any = sg.wrap(descend, capture_sizes=[4], progress=False)
        plain(torch.randn(4, WIDTH, device=device))
        assert Reason.GRAD in plain.graph_stats.eager
        assert "with torch.enable_grad():" in explain("grad")
        with torch.no_grad():
            eager: Any = sg.wrap(enabled, exact_shapes=True, progress=False)
            for _ in range(3):
                eager(torch.randn(4, WIDTH, device=device))
            message = eager.graph_stats.details[Reason.PYTHON_STATE]
            assert "return what torch.autograd.grad(loss, inputs) gives in place of calling backward()" in message
            assert "Return it" not in message
            served: Any = sg.wrap(returned, exact_shapes=True, progress=False)
            for _ in range(6):
                x = torch.randn(4, WIDTH, device=device)
                torch.testing.assert_close(served(x), enabled(x))
            assert served.graph_stats.replays >= 4
