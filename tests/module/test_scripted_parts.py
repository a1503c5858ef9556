"""A module that holds TorchScript modules is served by graphs, which follow all state that these hold in C++."""

import copy
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.device.select import graph_device

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Layer(nn.Module):
    """Reads every kind of state that TorchScript holds: parameters, buffers, other tensors, numbers, and its mode."""

    scales: list[float]
    lines: dict[int, int]
    pair: Pair

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(8, 8), nn.Sequential(Gain())
        self.register_buffer("shift", torch.rand(8))
        self.table = torch.rand(8)
        self.tables = [torch.rand(8), torch.rand(8)]
        self.times, self.factor, self.name = 1000, 0.5, "layer"
        self.scales = [1.0, 2.0]
        self.pair = Pair(torch.rand(8), torch.rand(8))
        self.lines = {at: at for at in range(300)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(torch.tanh(self.linear(x)) * self.table) + self.shift * self.factor
        for table in self.tables:
            y = y + table
        if self.training or self.name == "other":
            y = y * 2
        return y * (self.times // 500) + self.scales[1] + self.pair.second + self.lines[299]


class Old(torch.jit.ScriptModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    @torch.jit.script_method
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scripted(module: nn.Module, device: torch.device) -> Any:
    return torch.jit.script(module.to(device).eval())


def moved(module: Layer, device: torch.device) -> Layer:
    """Plain attributes stay where they are when a module is moved."""
    module.table, module.tables = module.table.to(device), [table.to(device) for table in module.tables]
    module.pair = Pair(*(part.to(device) for part in module.pair))
    return module


@pytest.fixture
def layer(device: torch.device) -> Any:
    return scripted(moved(Layer(), device), device)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def served(model: Any, module: nn.Module, device: torch.device, sizes: tuple[int, ...] = (4,), calls: int = 6) -> int:
    """Compare calls of each size with the plain module; return how many of them were replays."""
    before = model.graph_stats.replays
    for at in range(calls):
        x = torch.rand(sizes[at % len(sizes)], 8, device=device)
        torch.testing.assert_close(model(x), module(x), msg=lambda text: f"{text}\n{model.graph_report()}")
    return int(model.graph_stats.replays) - before


def saved(layer: Any, path: Path) -> Any:
    torch.jit.save(layer, path / "layer.pt")
    return torch.jit.load(path / "layer.pt")


MADE: dict[str, Callable[[Any, torch.device, Path], Any]] = {
    "scripted": lambda layer, device, path: layer,
    "traced": lambda layer, device, path: torch.jit.trace(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(device).eval(), torch.ones(1, 8, device=device)
    ),
    "frozen": lambda layer, device, path: torch.jit.freeze(layer),
    "loaded": lambda layer, device, path: saved(layer, path),
    "of script methods": lambda layer, device, path: Old().to(device).eval(),
}


@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize("made", MADE)
def test_a_module_with_a_torchscript_part_is_served(
    made: str, upfront: bool, layer: Any, device: torch.device, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Linear(8, 8), MADE[made](layer, device, tmp_path)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    if upfront:
        assert model.capture_graphs(torch.rand(4, 8, device=device)).captured == 2
    assert served(model, module, device, sizes=(4, 3, 2, 1), calls=20) >= 4


def test_a_module_whose_only_parameters_are_torchscripts_is_served(layer: Any, device: torch.device) -> None:
    module = nn.Sequential(layer).eval()
    assert served(sg.wrap(module, capture_sizes=[4], progress=False), module, device) >= 3


def test_a_torchscript_module_itself_is_served_in_a_sequential(layer: Any, device: torch.device) -> None:
    with pytest.raises(sg.ConfigError, match=r"or torch\.nn\.Sequential\(module\)"):
        sg.wrap(layer)
    with pytest.raises(sg.ConfigError, match="or a function that calls it"):
        sg.wrap(torch.jit.script(doubled))
    assert served(sg.wrap(nn.Sequential(layer).eval(), capture_sizes=[4], progress=False), layer, device) >= 3
    script = torch.jit.script(doubled)
    assert served(sg.wrap(lambda x: script(x)), doubled, device) >= 3  # type: ignore[arg-type]


def doubled(x: Tensor) -> Tensor:
    return x * 2


def replaced_weight(layer: Any) -> None:
    layer.linear.weight = nn.Parameter(torch.rand_like(layer.linear.weight), requires_grad=False)


def moved_weight(layer: Any) -> None:
    layer.linear.weight.data = torch.rand_like(layer.linear.weight)


def replaced_buffer(layer: Any) -> None:
    layer.shift = torch.rand_like(layer.shift)


def replaced_list(layer: Any) -> None:
    layer.tables = [torch.rand_like(table) for table in layer.tables]


def replaced_part(layer: Any) -> None:
    layer.linear = scripted(nn.Linear(8, 8), layer.shift.device)


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, value)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a weight is replaced": replaced_weight,
    "a weight moves": moved_weight,
    "a weight is written": lambda layer: layer.linear.weight.data.add_(1),
    "a buffer is replaced": replaced_buffer,
    "another tensor is replaced": lambda layer: setattr(layer, "table", torch.rand_like(layer.table)),
    "a list of tensors is replaced": replaced_list,
    "a submodule is replaced": replaced_part,
    "a number": set_to("times", 2000),
    "a float": set_to("factor", 0.25),
    "a float of a submodule": lambda layer: setattr(getattr(layer.part, "0"), "gain", 2.5),
    "a pair of tensors is replaced": lambda layer: setattr(layer, "pair", Pair(*map(torch.rand_like, layer.pair))),
    "a long dict": set_to("lines", dict.fromkeys(range(300), 0)),
    "a string": set_to("name", "other"),
    "a list": set_to("scales", [1.0, 3.0]),
    "training mode": lambda layer: layer.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_a_torchscript_module_is_missed(change: str, layer: Any, device: torch.device) -> None:
    module = nn.Sequential(nn.Linear(8, 8), layer).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    assert served(model, module, device) >= 3
    CHANGES[change](layer)
    assert served(model, module, device) >= 3, str(model.graph_report())


def test_a_replay_of_the_first_value_uses_the_first_graph(layer: Any, device: torch.device) -> None:
    module = nn.Sequential(layer).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    served(model, module, device)
    layer.times = 2000
    served(model, module, device)
    layer.times = 1000
    assert served(model, module, device) >= 4


def test_no_change_of_a_torchscript_module_that_a_function_names_is_missed(layer: Any, device: torch.device) -> None:
    def called(x: Tensor) -> Tensor:
        return layer(x) + 1  # type: ignore[no-any-return]

    model: Any = sg.wrap(called, capture_sizes=[4], progress=False)
    for change in ("a number", "a float of a submodule", "a weight is replaced", "a list of tensors is replaced"):
        assert served(model, called, device) >= 3  # type: ignore[arg-type]
        CHANGES[change](layer)
    assert served(model, called, device) >= 3  # type: ignore[arg-type]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Keeping(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sum(0)
        return x * 2


class Logging(nn.Module):
    log: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.log = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x.shape[0])
        return x * 2


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("kind", [Counting, Keeping, Logging])
def test_what_torchscript_code_changes_is_changed_by_every_call(
    kind: type[nn.Module], is_inner: bool, device: torch.device
) -> None:
    whole = scripted(nn.Sequential(kind()) if is_inner else kind(), device)
    layer = getattr(whole, "0") if is_inner else whole  # `whole[0]` is a copy
    model = sg.wrap(nn.Sequential(whole).eval(), capture_sizes=[4], progress=False)
    for _ in range(6):
        x = torch.rand(4, 8, device=device)
        torch.testing.assert_close(model(x), x * 2)
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[Reason.PYTHON_STATE] >= 3
    assert "(0._c)" in str(model.graph_report())
    if kind is Keeping:
        torch.testing.assert_close(layer.last, x.sum(0))
    else:
        assert (layer.calls if kind is Counting else len(layer.log)) == 6


def test_a_buffer_that_torchscript_code_writes_is_written_once_a_call(device: torch.device) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x * self.calls

    module = nn.Sequential(scripted(Writing(), device)).eval()
    plain = copy.deepcopy(module)
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    assert served(model, plain, device) >= 3, str(model.graph_report())
    assert module[0].calls[0] == 6


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 1e9):
            return x - 1
        return x * 2


class Around(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]


def test_a_part_that_reads_a_tensor_back_can_break_at_the_module_around_it(device: torch.device) -> None:
    part = scripted(Reading(), device)
    alone = sg.wrap(nn.Sequential(nn.Linear(8, 8).to(device), part).eval(), capture_sizes=[4], progress=False)
    assert served(alone, nn.Sequential(alone[0], part), device) == 0
    (message,) = alone.graph_stats.failures.values()
    assert "break_at(" not in str(message)  # which takes no TorchScript module
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(part)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    assert served(model, module, device) == 0
    (message,) = model.graph_stats.failures.values()
    assert 'simplegraph.break_at(model, "1")' in str(message)
    sg.unwrap(model)
    sg.break_at(module, "1")
    assert served(sg.wrap(module, capture_sizes=[4], mode="PIECEWISE", progress=False), module, device) >= 3


def test_an_object_that_python_cannot_compare_is_named(device: torch.device) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)).eval())
    module = nn.Sequential(torch.jit.script(quantized)).eval()
    if device.type == "cuda":
        pytest.skip("quantized layers run on a CPU")
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    assert served(model, module, device) == 0, str(model.graph_report())
    (message,) = model.graph_stats.failures.values()
    assert "0.0._packed_params._packed_params of a TorchScript module is a ScriptObject" in str(message)
    assert "use the module that the TorchScript module was made from" in str(message)


def test_kernels_that_the_emulator_cannot_see_are_refused(
    layer: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU captures all kernels")
    monkeypatch.setattr(torch._C, "_jit_can_fuse_on_cpu", lambda: True)
    module = nn.Sequential(layer).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    assert served(model, module, device) == 0
    (message,) = model.graph_stats.failures.values()
    assert "0 is TorchScript, whose fused kernels no emulator sees" in str(message)
    assert "torch._C._jit_override_can_fuse_on_cpu(False)" in str(message)


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * 2).sum()


def test_forces_of_a_torchscript_energy_are_served(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("kernels are fused there: tests/gpu/test_cuda_scripted.py")
    energy = scripted(Energy(), device)

    def forces(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return -torch.autograd.grad(energy(x), x)[0]

    model: Any = sg.wrap(forces, exact_shapes=True, progress=False)
    assert served(model, forces, device) >= 3  # type: ignore[arg-type]
    energy.up.weight = nn.Parameter(torch.rand_like(energy.up.weight))
    assert served(model, forces, device) >= 3  # type: ignore[arg-type]


def steps_of(module: nn.Module, x: Tensor, model: Any) -> list[Tensor]:
    module.zero_grad()
    with torch.enable_grad():
        model(x).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]  # type: ignore[misc]


def test_a_pair_of_graphs_holds_no_parameters_of_torchscript(device: torch.device) -> None:
    def made(kind: type[nn.Module], *args: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), scripted(kind(*args), device)).to(device)

    for kind, args in ((nn.Tanh, ()), (nn.Linear, (8, 8))):
        module, plain = made(kind, *args), made(kind, *args)
        model: Any = sg.wrap(module, training=True)
        for _ in range(6):
            x = torch.rand(4, 8, device=device)
            torch.testing.assert_close(steps_of(module, x, model), steps_of(plain, x, plain))
        if kind is nn.Tanh:
            assert model.graph_stats.replays >= 3
        else:
            assert model.graph_stats.eager[Reason.UNTRAINABLE] >= 3
            assert "1.weight is a parameter of a TorchScript module" in str(model.graph_report())
            assert "let simplegraph.train_step have the whole step" in str(model.graph_report())


def test_a_whole_step_trains_parameters_of_torchscript(device: torch.device) -> None:
    losses = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), scripted(nn.Linear(8, 8), device)).to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

        def step(x: Tensor, module: nn.Module = module, optimizer: Any = optimizer) -> Tensor:
            loss = module(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = sg.train_step(step, optimizers=optimizer) if is_graphed else step
        torch.manual_seed(1)
        with torch.enable_grad():
            losses.append([run(torch.rand(4, 8).to(device)).clone() for _ in range(8)])
        if is_graphed:
            assert run.graph_stats.replays >= 3, str(run.graph_report())
    torch.testing.assert_close(losses[0], losses[1])


FACTORS = [2.0]


@torch.jit.ignore
def scaled(x: Tensor) -> Tensor:
    return x * FACTORS[0]


def scaled_and_shifted(x: Tensor) -> Tensor:
    return scaled(x) + 1


def energy_of(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    return (torch.sigmoid(y) * y + y * 2).sum()


def negated(x: Tensor) -> Tensor:
    return -x


class Scaling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("is_function", [False, True])
def test_python_that_torchscript_code_calls_is_followed(is_function: bool, device: torch.device) -> None:
    part: Any = torch.jit.script(scaled_and_shifted) if is_function else scripted(Scaling(), device)
    module = Calling(part).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    assert served(model, module, device) >= 3
    FACTORS[0] += 1
    assert served(model, module, device) >= 3


def test_another_scripted_function_is_another_graph(device: torch.device) -> None:
    module = Calling(torch.jit.script(scaled_and_shifted)).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    assert served(model, module, device) >= 3
    module.function = torch.jit.script(negated)
    assert served(model, module, device) >= 3


@torch.jit.script
def root_of_width(x: Tensor, factor: int) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)


def test_numbers_that_a_script_makes_into_tensors_are_served(device: torch.device) -> None:
    """As DeBERTa's do; nothing holds such a tensor after the run."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y / root_of_width(y, 3).to(y.dtype)

    module = Scaled(8, 8).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    assert served(model, module, device) >= 3
    gc.collect()  # nothing that a capture leaves behind counts as a holder of memory
    assert served(model, module, device) >= 3
    assert model.graph_stats.recaptures == 0


def is_compiled(function: Any) -> bool:
    """True if TorchScript runs nothing of a function in order to profile it any more."""

    def compiled(state: Any) -> bool:
        plans = list(state.execution_plans.values())
        return bool(plans) and all(compiled(inner) for plan in plans for inner in plan.code.grad_executor_states())

    try:
        return compiled(function.get_debug_state())
    except RuntimeError:  # of a part that has not run
        return False


@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_function_that_code_names_is_compiled_before_it_is_captured(
    has_gradients: bool, upfront: bool, device: torch.device
) -> None:
    """A graph of a run that TorchScript only profiles rounds otherwise than later calls, and would be dropped."""
    if has_gradients and device.type == "cuda":
        pytest.skip("kernels are fused there, whose backward keeps tensors of the run")
    energy: Any = torch.jit.script(energy_of)
    energy._debug_flush_compilation_cache()  # torch returns one object for all tests
    captured, too_early = ctypes.c_long(), ctypes.c_long()  # a list that grows would be a reason to run eagerly

    def forces(x: Tensor) -> Tensor:
        if graph_device(device).is_capturing():
            captured.value += 1
            too_early.value += not is_compiled(energy)
        if not has_gradients:
            return energy(x)  # type: ignore[no-any-return]
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return -torch.autograd.grad(energy(x), x)[0]

    model: Any = sg.wrap(forces, exact_shapes=True, progress=False)
    if upfront:
        model.capture_graphs(torch.rand(4, 8, device=device))
    xs = list(torch.rand(4, 4, 8, device=device))
    answers = list(map(model, xs))
    torch.testing.assert_close(answers, list(map(forces, xs)))
    assert model.graph_stats.replays >= 2, str(model.graph_report())
    assert (captured.value, too_early.value) == (1, 0)


def test_torchscript_modules_are_freed_with_the_model(device: torch.device) -> None:
    def weights_of_served(layer: Any) -> list[weakref.ref[Any]]:
        module = nn.Sequential(layer).eval()
        served(sg.wrap(module, capture_sizes=[4], progress=False), module, device)
        return [weakref.ref(layer), weakref.ref(layer._c), weakref.ref(layer.linear.weight)]

    references = weights_of_served(scripted(moved(Layer(), device), device))
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
