"""TorchScript modules on a GPU, whose kernels torch does not dispatch: served once they are compiled, and right."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = [
    pytest.mark.usefixtures("device_left_alone"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of TorchScript
    pytest.mark.filterwarnings("ignore:The TorchScript type system"),
]
WIDTH = 64


class Layer(nn.Module):
    """A product, and a chain of pointwise operators that fuse, which read tensors of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.table = torch.rand(WIDTH, device="cuda")
        self.tables = [torch.rand(WIDTH, device="cuda")]
        self.times, self.factor = 1000, 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.table + self.shift * self.factor
        y = torch.sigmoid(y) * y + self.tables[0]
        if self.training:
            y = y * 2
        return y * (self.times // 500)


class Constants(nn.Module):
    """Is traced, so that the tensors that it makes are constants in C++, and no object of Python."""

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(WIDTH, device="cuda", dtype=x.dtype) / WIDTH
        return torch.tanh(x * table + 1) * (table + 2)


@contextlib.contextmanager
def fusion(is_on: bool) -> Iterator[None]:
    """Compile with fusion or without, and forget what was compiled before: layers of one class share it."""
    before = torch._C._jit_texpr_fuser_enabled(), torch._C._jit_can_fuse_on_gpu()
    torch._C._jit_set_texpr_fuser_enabled(is_on)
    torch._C._jit_override_can_fuse_on_gpu(is_on)
    _forget_classes()
    yield
    torch._C._jit_set_texpr_fuser_enabled(before[0])
    torch._C._jit_override_can_fuse_on_gpu(before[1])
    _forget_classes()


def _forget_classes() -> None:
    torch._C._jit_clear_class_registry()
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    torch.jit._state._clear_class_state()


@pytest.fixture(params=[True, False], ids=["fused", "unfused"])
def fused(request: pytest.FixtureRequest) -> Iterator[bool]:
    with fusion(request.param):
        yield request.param


@pytest.fixture
def layer(fused: bool) -> Any:
    torch.manual_seed(0)
    return torch.jit.script(Layer().cuda().eval())


def is_fused(run: Callable[[], object]) -> bool:
    """True if TorchScript runs this by a kernel of its own."""
    for _ in range(4):
        run()
    graph = str(torch.jit.last_executed_optimized_graph())
    print(graph)
    return "TensorExprGroup" in graph


def served(model: Any, plain: Callable[[Tensor], Any], sizes: tuple[int, ...] = (4,), calls: int = 6) -> int:
    """Compare calls of each size with eager ones; return how many of them were replays."""
    before = model.graph_stats.replays
    for at in range(calls):
        x = torch.randn(sizes[at % len(sizes)], WIDTH, device="cuda")
        torch.testing.assert_close(model(x), plain(x), msg=lambda text, at=at: f"call {at}: {text}\n{told(model)}")
    return int(model.graph_stats.replays) - before


def told(model: Any) -> str:
    failures = [f"{at}: {error}" for at, error in model.graph_stats.failures.items()]
    return "\n".join([str(model.graph_report()), *failures])


def test_the_kernels_are_fused_where_they_shall_be(layer: Any, fused: bool) -> None:
    x = torch.randn(4, WIDTH, device="cuda")
    with torch.no_grad():
        assert is_fused(lambda: layer(x)) is fused


@pytest.mark.parametrize("upfront", [False, True])
def test_a_module_with_a_torchscript_part_is_served_at_two_sizes(layer: Any, upfront: bool) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer).cuda().eval()
    model = sg.wrap(module, capture_sizes=[4, 8], progress=False)
    with torch.no_grad():
        if upfront:
            summary = model.capture_graphs(torch.randn(8, WIDTH, device="cuda"))
            assert summary.captured == 2, told(model)
        assert served(model, module, sizes=(8, 4, 7, 3, 1), calls=40) >= 15, told(model)


def nodes_of_graphs() -> list[int]:
    """Count the kernels of the graphs of two sizes; the second one serves padded calls only."""
    module = nn.Sequential(torch.jit.script(Layer().cuda().eval())).eval()
    model = sg.wrap(module, capture_sizes=[8, 16], progress=False)
    with torch.no_grad():
        assert served(model, module, sizes=(8, 7, 13), calls=24) >= 12, told(model)
    print(told(model))
    return [graph.nodes for graph in model.graph_stats.graphs.values()]


def test_a_captured_part_is_the_compiled_one() -> None:
    """A graph of a run that TorchScript only profiles would launch each operator for good."""
    with fusion(True):
        few = nodes_of_graphs()
    with fusion(False):
        many = nodes_of_graphs()
    assert len(few) == len(many) == 2
    assert max(few) < min(many), (few, many)


def test_constants_of_a_traced_part_are_served(fused: bool) -> None:
    x = torch.ones(2, WIDTH, device="cuda")
    part = torch.jit.trace(Constants().eval(), x)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), part).cuda().eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.no_grad():
        assert served(model, module) >= 3, told(model)
        torch.cuda.empty_cache()
        assert served(model, module) == 6, told(model)


def replaced_weight(layer: Any) -> None:
    layer.linear.weight = nn.Parameter(torch.randn_like(layer.linear.weight))


def replaced_list(layer: Any) -> None:
    layer.tables = [torch.randn_like(table) for table in layer.tables]


def replaced_part(layer: Any) -> None:
    layer.linear = torch.jit.script(nn.Linear(WIDTH, WIDTH).cuda().eval())


def moved_buffer(layer: Any) -> None:
    layer.shift.data = torch.randn_like(layer.shift)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight is replaced": replaced_weight,
    "a weight is written": lambda layer: layer.linear.weight.data.add_(1),
    "a buffer moves": moved_buffer,
    "a buffer is replaced": lambda layer: setattr(layer, "shift", torch.randn_like(layer.shift)),
    "another tensor is replaced": lambda layer: setattr(layer, "table", torch.randn_like(layer.table)),
    "a list of tensors is replaced": replaced_list,
    "a submodule is replaced": replaced_part,
    "a number": lambda layer: setattr(layer, "times", 2000),
    "a float": lambda layer: setattr(layer, "factor", 0.25),
    "training mode": lambda layer: layer.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_is_missed_though_no_operator_shows_what_kernels_read(change: str, layer: Any) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer).cuda().eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.no_grad():
        assert served(model, module, calls=8) >= 3, told(model)
        CHANGES[change](layer)
        assert served(model, module, calls=10) >= 3, told(model)


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        return self.down(torch.sigmoid(y) * y + y * 2).sum()


@pytest.mark.parametrize("trainable", [False, True])
def test_forces_by_autograd_grad_are_served_where_kernels_are_not_fused(fused: bool, trainable: bool) -> None:
    """Torch keeps a tensor of the run for fused kernels under autograd: the message says how to leave them out."""
    energy = torch.jit.script(Energy().cuda().eval().requires_grad_(trainable))

    def forces(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            value = energy(x)
            (gradient,) = torch.autograd.grad(value, x)
        return value.detach(), -gradient

    model: Any = sg.wrap(forces, exact_shapes=True, progress=False)
    with torch.no_grad():
        if fused:
            assert served(model, forces, sizes=(4, 6), calls=16) == 0, told(model)
            assert "torch._C._jit_set_texpr_fuser_enabled(False)" in next(iter(model.graph_stats.failures.values()))
            return
        assert served(model, forces, sizes=(4, 6), calls=16) >= 6, told(model)
        energy.up.weight = nn.Parameter(torch.randn_like(energy.up.weight), requires_grad=trainable)
        assert served(model, forces, sizes=(4, 6), calls=16) >= 6, told(model)


def test_a_whole_step_trains_parameters_of_torchscript(fused: bool) -> None:
    losses = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(Energy())).cuda()
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

        def step(x: Tensor, module: nn.Module = module, optimizer: Any = optimizer) -> Tensor:
            loss = module(x).square()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = sg.train_step(step, optimizers=optimizer) if is_graphed else step
        torch.manual_seed(1)
        losses.append([run(torch.randn(4, WIDTH, device="cuda")).clone() for _ in range(10)])
        if is_graphed:
            assert run.graph_stats.replays >= 3, told(run)
    torch.testing.assert_close(losses[0], losses[1])


def chain(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    return torch.sigmoid(y) * y + y * 2 + x * 0.3


def test_a_function_that_code_names_is_captured_as_it_is_compiled(fused: bool) -> None:
    function: Any = torch.jit.script(chain)
    function._debug_flush_compilation_cache()  # torch returns one object for all tests
    model: Any = sg.wrap(lambda x: function(x) * 2, exact_shapes=True, progress=False)
    with torch.no_grad():
        xs = list(torch.randn(6, 4, WIDTH, device="cuda"))
        answers = list(map(model, xs))
        torch.testing.assert_close(answers, [function(x) * 2 for x in xs])
        assert model.graph_stats.replays >= 4, told(model)
        assert is_fused(lambda: function(xs[0])) is fused


@contextlib.contextmanager
def scripted_by_e3nn() -> Iterator[Any]:
    e3nn = pytest.importorskip("e3nn")
    torch.serialization.add_safe_globals([slice])  # which e3nn 0.4.4 loads its constants with
    before = dict(e3nn.get_optimization_defaults())
    key, value = ("jit_mode", "script") if "jit_mode" in before else ("jit_script_fx", True)
    e3nn.set_optimization_defaults(**{key: value})
    try:
        yield pytest.importorskip("e3nn.o3")
    finally:
        e3nn.set_optimization_defaults(**{key: before[key]})


def test_layers_of_e3nn_are_served_with_their_forces(fused: bool) -> None:
    with scripted_by_e3nn() as o3:

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                irreps = o3.Irreps("4x0e + 4x1o")
                self.mix = o3.Linear(irreps, irreps)
                self.product = o3.FullyConnectedTensorProduct(irreps, irreps, o3.Irreps("4x0e"))

            def forward(self, x: Tensor) -> Tensor:
                y = self.mix(x)
                return torch.tanh(self.product(y, x)).sum(-1)

        module = Model().cuda().eval()
    assert any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())

    def forces(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = module(x)
            (gradient,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), -gradient

    model, graphed = sg.wrap(module, capture_sizes=[4, 8], progress=False), sg.wrap(forces, exact_shapes=True)
    with torch.no_grad():
        for run, plain in ((model, copy.deepcopy(module)), (graphed, forces)):
            before = run.graph_stats.replays
            for at in range(16):
                x = torch.randn((4, 8)[at % 2], 16, device="cuda")
                torch.testing.assert_close(run(x), plain(x), msg=lambda text, run=run: f"{text}\n{told(run)}")
            assert run.graph_stats.replays - before >= 6, told(run)


class Forking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.jit.fork(self.linear, x)
        return torch.jit.wait(later) + torch.tanh(x)


def test_a_part_that_forks_is_right_whoever_runs_it(fused: bool) -> None:
    """Its tasks may run on other threads, whose work no capture of this one holds."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(Forking().cuda().eval())).cuda().eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.no_grad():
        served(model, module, calls=12)
    print(told(model))
