"""TensorDicts in and out: a module writes to the one that it was passed and returns it, replayed as eagerly."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytest.importorskip("tensordict", minversion="0.15", reason="needs tensordict 0.15")
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
    set_skip_existing,
)

from tests.module.answers import reasons

WIDTH = 4
pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]


class Writes(nn.Module):
    """Calls a function with a layer and the TensorDict."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, td: Any, **others: Any) -> Any:
        return self.function(self.layer, td, **others)


def chain(device: torch.device) -> Any:
    first = TensorDictModule(nn.Linear(WIDTH, 3), in_keys=["obs"], out_keys=["hidden"])
    second = TensorDictModule(nn.Linear(3, 2), in_keys=["hidden"], out_keys=[("out", "action")])
    return TensorDictSequential(first, second).to(device).eval()


def made(rows: int, device: torch.device, **more: Any) -> TensorDict:
    generator = torch.Generator().manual_seed(rows)
    obs = torch.randn(rows, WIDTH, generator=generator).to(device)
    return TensorDict({"obs": obs, "steps": torch.arange(rows).to(device), **more}, batch_size=[rows])


def assert_same(found: Any, expected: Any) -> None:
    """Compare two TensorDicts: classes, batch sizes, keys in their order, devices, locks and what they hold."""
    assert type(found) is type(expected)
    if isinstance(expected, TensorDict):
        assert list(found.keys()) == list(expected.keys())
        assert found.batch_size == expected.batch_size
        assert found.device == expected.device
        assert found.names == expected.names
        assert found.is_locked == expected.is_locked
        for key, value in expected.items():
            assert_same(found.get(key), value)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert (found.data, found.batch_size) == (expected.data, expected.batch_size)


def check(model: Any, plain: Any, make: Any, sizes: Any, least: int) -> None:
    """Call both with TensorDicts of these sizes: answers and arguments are alike, and so is what they share."""
    for rows in sizes:
        passed, expected = make(rows), make(rows)
        result, answer = model(passed), plain(expected)
        assert (result is passed) is (answer is expected)
        assert_same(passed, expected)
        assert_same(result, answer)
    assert model.graph_stats.replays >= least, model.graph_report()


def test_a_module_writes_its_keys_into_the_tensordict_that_it_is_passed(device: torch.device) -> None:
    plain = chain(device)
    model = sg.wrap(plain, capture_sizes=[2, 4, 8], progress=False)
    check(model, plain, lambda rows: made(rows, device), (2, 5, 4, 8, 7) * 6, 10)
    td = made(3, device)
    for _ in range(4):  # as in a rollout: the one that it wrote before
        assert model(td) is td
    assert_same(td, plain(made(3, device)))


CASES: dict[str, Any] = {
    "replaces": lambda layer, td: td.set("obs", layer(td["obs"])),
    "adds to a nested one": lambda layer, td: td.set(("next", "obs"), layer(td["obs"])),
    "writes in place": lambda layer, td: td.set_("obs", layer(td["obs"])),
    "adds in place": lambda layer, td: (td["obs"].add_(layer(td["obs"])), td)[1],
    "deletes": lambda layer, td: td.set("new", layer(td["obs"])).exclude("steps", inplace=True),
    "moves a tensor": lambda layer, td: td.set("copy", td["obs"]).set("new", layer(td["obs"])),
    "returns a new one": lambda layer, td: TensorDict({"a": layer(td["obs"])}, td.batch_size),
    "returns a part": lambda layer, td: td.set("new", layer(td["obs"])).select("new"),
    "returns both": lambda layer, td: (td.set("new", layer(td["obs"])), layer(td["obs"]).sum(-1)),
    "returns nothing": lambda layer, td: (td.set("new", layer(td["obs"])), None)[1],
    "sets text": lambda layer, td: td.set("new", layer(td["obs"])).set_non_tensor("name", "b"),
    "a nested one": lambda layer, td: td.set("sub", TensorDict({"x": layer(td["obs"])}, td.batch_size)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_does_to_a_tensordict_is_done(name: str, device: torch.device) -> None:
    plain = Writes(CASES[name]).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    for rows in (2, 4, 3) * 5:
        passed, expected = made(rows, device), made(rows, device)
        steps = passed["steps"]
        result, answer = model(passed), plain(expected)
        assert_same(passed, expected)
        assert passed.get("steps", steps) is steps
        if isinstance(answer, tuple):
            assert result[0] is passed
            result, answer = result[1], answer[1]
        assert (result is passed) is (answer is expected)
        if answer is not None:
            assert_same(result, answer)
    assert model.graph_stats.replays >= 4


def nested(rows: int, device: torch.device) -> TensorDict:
    return made(rows, device, next=made(rows, device), deep=TensorDict({"x": made(rows, device)}, [rows]))


def wide(rows: int, device: torch.device) -> TensorDict:
    inner = TensorDict({"x": torch.ones(rows, 3, 2, device=device)}, [rows, 3])
    return made(rows, device, sub=inner)


INPUTS: dict[str, Any] = {
    "no batch size": lambda rows, device: TensorDict({"obs": torch.ones(rows, WIDTH, device=device)}),
    "two batch dimensions": lambda rows, device: TensorDict({"obs": torch.ones(rows, WIDTH).to(device)}, [rows, WIDTH]),
    "a device": lambda rows, device: made(rows, device).to(device),
    "named dimensions": lambda rows, device: made(rows, device).refine_names("time"),
    "plain data": lambda rows, device: made(rows, device, name=NonTensorData("a"), scale=NonTensorData(2.0)),
    "nested": nested,
    "an empty one": lambda rows, device: made(rows, device, info=TensorDict({}, [rows])),
    "more batch dimensions inside": wide,
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_tensordict_is_passed_as_it_is(name: str, device: torch.device) -> None:
    def function(layer: Any, td: Any) -> Any:
        scale = td.get("scale", 1.0)
        scale = getattr(scale, "data", scale)
        return td.set("new", layer(td["obs"]) * scale * (td.batch_dims + len(td.names)))

    plain = Writes(function).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2, 5, 6], progress=False)
    check(model, plain, lambda rows: INPUTS[name](rows, device), (2, 5, 3, 6) * 5, 8)


@tensorclass
class Step:
    """Holds what an agent saw and did."""

    obs: Tensor
    action: Tensor | None = None
    name: str = "first"


def test_an_object_of_a_tensorclass_is_read_written_and_returned(device: torch.device) -> None:
    def function(layer: Any, step: Any) -> Any:
        step.action = layer(step.obs) * len(step.batch_size)
        return step, Step(obs=step.action * 2, name=step.name, batch_size=step.batch_size)

    plain = Writes(function).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[4, 8], progress=False)
    for rows in (4, 8, 3, 5) * 5:  # as large as a row in places, which is no second batch dimension
        passed, expected = (Step(obs=made(rows, device)["obs"], name="a", batch_size=[rows]) for _ in range(2))
        found, answer = model(passed), plain(expected)
        assert found[0] is passed
        assert type(found[1]) is Step
        assert found[1].name == "a"
        assert_same(passed.to_tensordict(), expected.to_tensordict())
        assert_same(found[1].to_tensordict(), answer[1].to_tensordict())
    assert model.graph_stats.replays >= 8


def test_a_locked_tensordict_is_read_and_refuses_to_be_written_as_eagerly(device: torch.device) -> None:
    plain = Writes(lambda layer, td: (td.is_locked, layer(td["obs"]))[1 if td.is_locked else 0]).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2], progress=False)
    for _ in range(4):
        passed = made(2, device).lock_()
        assert torch.equal(model(passed), plain(passed))
        assert model(made(2, device)) is False
    assert model.graph_stats.replays >= 2
    model = sg.wrap(chain(device), capture_sizes=[2], progress=False)
    for _ in range(4):
        model(made(2, device))
        with pytest.raises(RuntimeError, match="lock"):
            model(made(2, device).lock_())


def test_examples_are_not_written_and_static_outputs_are_set(device: torch.device) -> None:
    plain = chain(device)
    model = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    example = made(2, device)
    assert model.capture_graphs(example).captured == 2
    assert list(example.keys()) == ["obs", "steps"]
    check(model, plain, lambda rows: made(rows, device), (2, 3, 4) * 4, 4)
    model = sg.wrap(plain, capture_sizes=[2, 4], outputs="static", progress=False)
    check(model, plain, lambda rows: made(rows, device), (2, 3, 4) * 4, 5)
    first, second = made(4, device), made(4, device)
    model(first)
    expected = first["out", "action"].clone()
    second["obs"] += 1
    model(second)
    assert first["out", "action"].data_ptr() == second["out", "action"].data_ptr()
    assert not torch.equal(first["out", "action"], expected)


def test_a_part_that_is_returned_is_the_callers(device: torch.device) -> None:
    plain = Writes(lambda layer, td: [td.set(("next", "new"), layer(td["obs"])).get("next"), {"td": td}])
    model = sg.wrap(plain.to(device).eval(), capture_sizes=[2], progress=False)
    for _ in range(5):
        td = made(2, device, next=made(2, device))
        part, whole = model(td)
        assert part is td.get("next")
        assert whole["td"] is td
        assert torch.equal(part["new"], plain.layer(td["obs"]))
    assert model.graph_stats.replays >= 2


def test_the_tensordict_that_is_to_be_written_is_another_argument(device: torch.device) -> None:
    plain = chain(device)
    model = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    for rows in (2, 4) * 4:
        passed, written, expected = made(rows, device), TensorDict({}, [rows]), TensorDict({}, [rows])
        assert model(passed, tensordict_out=written) is written
        plain(made(rows, device), tensordict_out=expected)
        assert_same(written, expected)
        assert_same(passed, made(rows, device))
    assert model.graph_stats.replays >= 4
    for _ in range(3):
        passed, expected = made(2, device), made(2, device)
        assert model(passed, tensordict_out=passed) is passed
        assert_same(passed, plain(expected, tensordict_out=expected))
    assert reasons(model)["aliased"] == 3


def test_a_batch_that_is_too_large_does_not_keep_others_from_graphs(device: torch.device) -> None:
    plain = chain(device)
    model = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    check(model, plain, lambda rows: made(rows, device), (9, 2) * 5, 2)


STORED: dict[str, Any] = {
    "a lazy stack": lambda rows, device: LazyStackedTensorDict(*made(rows, device).unbind(0)),
    "a view": lambda rows, device: made(rows + 1, device).to(device)._get_sub_tensordict(slice(0, rows)),
}


@pytest.mark.parametrize("name", STORED)
def test_other_tensordicts_are_written_eagerly_and_the_remedy_works(name: str, device: torch.device) -> None:
    plain = chain(device)
    model = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    for _ in range(3):
        passed, expected = STORED[name](2, device), STORED[name](2, device)
        assert model(passed) is passed
        assert (passed == plain(expected)).all()
    assert model.graph_stats.replays == 0
    report = str(model.graph_report())
    assert f"an argument is a {type(passed).__name__}: pass its to_tensordict(), which a graph can write to" in report
    check(model, plain, lambda rows: STORED[name](rows, device).to_tensordict(), (2, 4, 3) * 4, 4)


def test_what_is_no_entry_is_not_written_by_a_replay(device: torch.device) -> None:
    def function(layer: Any, td: Any) -> Any:
        td["new"] = layer(td["obs"])
        td.batch_size = []
        return td

    plain = Writes(function).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2], progress=False)
    for _ in range(3):
        passed, expected = made(2, device), made(2, device)
        assert_same(model(passed), plain(expected))
        assert_same(passed, expected)
    assert reasons(model) == {"first_call": 1, "changed_arguments": 2}
    assert "what a TensorDict is beside its items, such as its batch size" in str(model.graph_report())


def test_the_way_of_sampling_is_part_of_the_key(device: torch.device) -> None:
    inner = TensorDictModule(nn.Linear(WIDTH, 3), in_keys=["obs"], out_keys=["logits"])
    choice = ProbabilisticTensorDictModule(
        ["logits"],
        ["action"],
        distribution_class=torch.distributions.Categorical,
        distribution_kwargs={"validate_args": False},
    )
    plain = ProbabilisticTensorDictSequential(inner, choice).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    for seed, kind in enumerate((InteractionType.MODE, InteractionType.RANDOM) * 5):
        with set_interaction_type(kind):
            torch.manual_seed(seed)
            expected = plain(made(4, device))
            torch.manual_seed(seed)
            assert_same(model(made(4, device)), expected)
    assert model.graph_stats.replays >= 4


def test_modes_of_the_library_are_part_of_the_key_and_its_code_is_not_followed(device: torch.device) -> None:
    plain = chain(device)
    model = sg.wrap(plain, capture_sizes=[4], progress=False)
    hidden = torch.ones(4, 3, device=device)
    for skips in (False, True) * 5:
        passed, expected = made(4, device, hidden=hidden), made(4, device, hidden=hidden)
        with set_skip_existing(skips):
            assert_same(model(passed), plain(expected))
        assert (passed["hidden"] is hidden) is skips
    assert model.graph_stats.replays >= 4
    check = model._graph_runner._calls.plain.present.check
    assert len(check.holders) < 50, "each holder costs time at every call"


def test_gradients_flow_through_what_a_module_writes(device: torch.device) -> None:
    plain = chain(device)
    twin = copy.deepcopy(plain)
    model = sg.wrap(twin, training=True)
    with torch.enable_grad():
        for _ in range(6):
            passed, expected = made(4, device), made(4, device)
            assert model(passed) is passed
            passed["out", "action"].square().sum().backward()
            plain(expected)["out", "action"].square().sum().backward()
            assert_same(passed.detach(), expected.detach())
            for found, parameter in zip(twin.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad, parameter.grad)
    assert model.graph_stats.replays >= 4


def test_a_step_trains_with_a_tensordict_and_writes_to_it(device: torch.device) -> None:
    def step_of(module: Any, optimizer: Any) -> Any:
        def step(td: Any) -> Tensor:
            error = (module(td)["out", "action"] - td["target"]).square()
            td.set("td_error", error.detach().mean(-1))
            optimizer.zero_grad()
            error.mean().backward()
            optimizer.step()
            return error.mean().detach()

        return step

    plain = chain(device).train()
    twin = copy.deepcopy(plain)
    optimizers = [torch.optim.Adam(module.parameters(), lr=1e-2, fused=True) for module in (twin, plain)]
    model = sg.train_step(step_of(twin, optimizers[0]), optimizers=optimizers[0])
    eager = step_of(plain, optimizers[1])
    with torch.enable_grad():
        for _ in range(8):
            passed, expected = (made(4, device, target=torch.ones(4, 2, device=device)) for _ in range(2))
            torch.testing.assert_close(model(passed), eager(expected))
            assert_same(passed.detach(), expected.detach())
    assert_same_state(twin, plain)
    assert model.graph_stats.replays >= 4


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(found.state_dict(), expected.state_dict())


def test_lengths_of_a_tensordict_that_is_written_are_not_padded(device: torch.device) -> None:
    plain = Writes(lambda layer, td: td.set("new", layer(td["obs"]))).to(device).eval()
    model = sg.wrap(plain, lengths=[4, 8], length_dims={"td.obs": 1}, capture_sizes=[2], progress=False)
    for length in (3, 4, 5) * 5:
        td = TensorDict({"obs": torch.randn(2, length, WIDTH, device=device)}, [2])
        assert model(td) is td
        assert torch.equal(td["new"], plain.layer(td["obs"]))
    assert reasons(model)["length_padding"] == 9
    assert model.graph_stats.replays >= 3


def test_tensors_by_their_keys_are_dispatched(device: torch.device) -> None:
    plain = chain(device)
    model = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    for rows in (2, 4, 3) * 5:
        obs = made(rows, device)["obs"]
        for found, expected in zip(model(obs=obs), plain(obs=obs), strict=True):
            torch.testing.assert_close(found, expected)
    assert model.graph_stats.replays >= 6


class Remembers(Writes):
    """Leaves a tensor in an attribute, too."""

    def __init__(self) -> None:
        super().__init__(None)
        self.hidden = torch.zeros(1, WIDTH)

    def forward(self, td: Any) -> Any:
        self.hidden = torch.tanh(self.layer(td["obs"]) + self.hidden)
        return td.set("new", self.hidden * 2)


def test_tensors_are_left_in_attributes_beside_entries(device: torch.device) -> None:
    plain = Remembers().to(device).eval()
    plain.hidden = plain.hidden.to(device)
    model = sg.wrap(copy.deepcopy(plain), capture_sizes=[2], progress=False)
    check(model, plain, lambda rows: made(rows, device), (2,) * 9, 4)
    torch.testing.assert_close(model.hidden, plain.hidden)


def test_tensordicts_in_a_list_are_read_by_graphs_and_written_eagerly(device: torch.device) -> None:
    plain = Writes(lambda layer, tds: layer(tds[0]["obs"] + tds[1]["obs"])).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2], progress=False)
    for _ in range(4):
        tds = [made(2, device), made(2, device)]
        assert torch.equal(model(tds), plain(tds))
    assert model.graph_stats.replays >= 2

    def write(layer: Any, tds: Any) -> Any:
        for td in tds:
            td["new"] = layer(td["obs"])
        return tds[0]

    plain = Writes(write).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2], progress=False)
    for _ in range(4):
        tds = [made(2, device), made(2, device)]
        assert model(tds) is tds[0]
        assert torch.equal(tds[1]["new"], plain.layer(tds[1]["obs"]))
    assert reasons(model) == {"first_call": 1, "changed_arguments": 3}


def test_a_break_at_the_network_inside_is_passed_tensors(device: torch.device) -> None:
    plain = chain(device)
    twin = copy.deepcopy(plain)
    sg.break_at(twin, "module.0.module")
    model = sg.wrap(twin, capture_sizes=[2, 4], mode="PIECEWISE", progress=False)
    check(model, plain, lambda rows: made(rows, device), (2, 4, 3) * 5, 4)


def test_the_package_is_imported_by_users_only() -> None:
    code = "import sys, simplegraph as sg, torch; sg.wrap(torch.nn.ReLU()); assert 'tensordict' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
