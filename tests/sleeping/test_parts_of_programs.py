"""Engines, training steps, generation and ranks sleep and wake between two steps, with answers as without."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.manager.engines import Engine


@pytest.fixture
def engine(device: torch.device, inference_mode: None) -> Engine:
    with torch.inference_mode(False), sg.sleepable(device=device):
        made = Engine(device)
    made.manager.capture(made.forward)
    return made


def test_an_engines_manager_sleeps_with_what_its_graphs_read(engine: Engine) -> None:
    for size in (1, 3, 8):
        engine.step(size)
    eager = engine.eager_runs
    report = engine.manager.sleep()
    assert report.given_back >= engine.model.weight.nbytes + engine.x.nbytes
    batch = engine.manager.dispatch(4)
    for use in (
        lambda: engine.manager.run(batch, engine.forward),
        lambda: engine.manager.replay(batch),
        lambda: engine.manager.capture(engine.forward),
        lambda: engine.manager.memory_estimate(engine.forward),
    ):
        with pytest.raises(sg.AsleepError, match="model is asleep"):
            use()
    engine.manager.wake()
    for size in (1, 3, 8):
        engine.step(size)
    assert engine.eager_runs == eager


def test_a_replay_that_holds_the_graph_already_is_refused(engine: Engine) -> None:
    """Whoever has a table's graph in hand asks to be ordered on its pool's stream first."""
    engine.manager.sleep()
    with pytest.raises(sg.AsleepError):
        engine.manager.table.order_streams()
    engine.manager.wake()
    engine.manager.table.order_streams()
    engine.step(4)


def test_managers_of_one_pool_sleep_together(device: torch.device, inference_mode: None) -> None:
    pool = sg.graph_pool(device)
    with torch.inference_mode(False), sg.sleepable(device=device):
        first = Engine(device, pool=pool)
    with torch.inference_mode(False), sg.sleepable(device=device):
        second = Engine(device, pool=pool)
    for each in (first, second):
        each.manager.capture(each.forward)
    with pytest.raises(sg.ConfigError, match="shares sleepable memory"):
        first.manager.sleep()
    sg.sleep()
    sg.wake()
    for each in (first, second):
        each.step(3)
        assert each.eager_runs == 1


def trained(device: torch.device) -> tuple[Any, Any]:
    """A training step after its first call, with its optimizer."""
    torch.manual_seed(0)
    with sg.sleepable(device=device):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=device.type == "cuda")

        def train(x: Tensor) -> Tensor:
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = sg.train_step(train, optimizers=optimizer)
        step(torch.ones(4, 8, device=device))
    return step, optimizer


def training(device: torch.device, *, sleeps: bool) -> tuple[list[float], Any]:
    step, optimizer = trained(device)
    losses = []
    for number in range(10):
        torch.manual_seed(number)
        losses.append(step(torch.randn(4, 8, device=device)).item())
        if sleeps and number in (1, 5, 8):
            states = [each for entry in optimizer.state.values() for each in entry.values()]
            report = step.sleep()
            assert report.given_back >= sum(each.nbytes for each in states)
            if device.type == "cpu":
                assert all(each.isnan().all() for each in states)
            with pytest.raises(sg.AsleepError):
                step(torch.randn(4, 8, device=device))
            step.wake()
    return losses, step.graph_stats


def test_a_training_step_sleeps_with_its_optimizers_state(device: torch.device) -> None:
    losses, stats = training(device, sleeps=True)
    assert losses == training(device, sleeps=False)[0]
    assert stats.replays > 2
    assert not stats.recaptures


@pytest.mark.parametrize(
    "use", [lambda each: each.state_dict(), lambda each: each.load_state_dict({}), copy.deepcopy, pickle.dumps]
)
def test_an_optimizer_is_not_read_while_its_step_sleeps(device: torch.device, use: Any) -> None:
    """Its state would be NaN in the checkpoint; on a GPU the read ends the process's use of the GPU."""
    step, optimizer = trained(device)
    x = torch.ones(4, 8, device=device)
    for _ in range(4):
        step(x)
    own, state = set(vars(optimizer)), copy.deepcopy(optimizer.state_dict()["state"])
    for sleep in (step.sleep, sg.sleep):
        sleep()
        with pytest.raises(sg.AsleepError, match=r"asleep \(weights, graphs\): call wake\(\) first"):
            use(optimizer)
        step.wake(parts="weights")
        torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
        step.wake()
        assert set(vars(optimizer)) == own
    step.sleep(wake_on_call=True)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    step(x)
    assert not step.graph_stats.recaptures


def test_forward_and_backward_graphs_sleep(device: torch.device) -> None:
    torch.manual_seed(0)
    with sg.sleepable(device=device):
        model = sg.wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device), training=True)
    x, found = torch.randn(4, 8, device=device), []
    for number in range(9):
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        found.append(model[0].weight.grad.clone())
        if number in (4, 6):
            replays = model.graph_stats.replays
            model.sleep()
            with pytest.raises(sg.AsleepError):
                model(x)
            model.wake()
    assert all(torch.equal(each, found[0]) for each in found)
    assert model.graph_stats.replays > replays > 0
    assert not model.graph_stats.recaptures


def test_generation_sleeps_between_two_texts(device: torch.device, inference_mode: None) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    import tiny_models as tiny
    from tiny_generation import GREEDY, graphed, inputs

    with torch.inference_mode(False), sg.sleepable(device=device):
        model = tiny.build(tiny.DECODERS["llama"], device)
    graphed(model)
    batch = inputs("llama", [3, 6], device)
    model.generate(**batch, **GREEDY)
    wanted = model.generate(**batch, **GREEDY)
    sg.sleep()
    with pytest.raises(sg.AsleepError):
        model.generate(**batch, **GREEDY)
    sg.wake()
    assert torch.equal(model.generate(**batch, **GREEDY), wanted)
    sg.sleep(wake_on_call=True)
    assert torch.equal(model.generate(**batch, **GREEDY), wanted)


def test_a_generation_wakes_its_cache_before_it_writes_there(device: torch.device, inference_mode: None) -> None:
    """Between two texts, where the cache sleeps though the weights stay, and in the middle of a text."""
    pytest.importorskip("transformers", minversion="5.0")
    import tiny_models as tiny
    from tiny_generation import GREEDY, graphed, inputs

    with torch.inference_mode(False):
        model = tiny.build(tiny.DECODERS["llama"], device)
    graphed(model)
    batch = inputs("llama", [3, 6], device)
    with sg.sleepable("caches", device=device):
        model.generate(**batch, **GREEDY)  # makes the cache
    model.generate(**batch, **GREEDY)
    wanted = model.generate(**batch, **GREEDY)
    sg.sleep()
    with pytest.raises(sg.AsleepError):
        model.generate(**batch, **GREEDY)
    sg.wake()
    sg.sleep(wake_on_call=True)
    assert torch.equal(model.generate(**batch, **GREEDY), wanted)

    def sleeps(ids: Tensor, scores: Any, **rest: Any) -> Tensor:
        if ids.shape[1] == 9:
            sg.sleep(wake_on_call=True)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    assert torch.equal(model.generate(**batch, **GREEDY, stopping_criteria=[sleeps]), wanted)


def test_a_layer_that_runs_by_itself_is_refused_where_its_weights_sleep(
    device: torch.device, inference_mode: None
) -> None:
    """As a prefill does; on a GPU it would read memory that is not there, which ends the process's use of the GPU."""
    with torch.inference_mode(False):
        awake = nn.Linear(8, 8).to(device)
        with sg.sleepable(device=device):
            layer, norm = nn.Linear(8, 8).to(device), nn.BatchNorm1d(8, affine=False).to(device)
        model = sg.wrap(nn.Sequential(awake, nn.Sequential(layer, norm)).eval(), capture_sizes=[4], progress=False)
    x = torch.randn(4, 8, device=device)
    uses: list[Any] = [lambda part: part(x), lambda part: model[1](x), copy.deepcopy, nn.Module.half]
    uses.append(lambda part: nn.ModuleList([part]).state_dict())
    model.capture_graphs(x)
    wanted = model(x).clone(), layer(x), norm(x)
    for weights in ("host", "keep"):
        model.sleep(weights=weights)
        assert awake(x).isfinite().all()  # another model may use it, too
        for part, answer in zip((layer, norm), wanted[1:], strict=True):
            if weights == "keep":
                assert torch.equal(part(x), answer)
                continue
            for use in uses:
                with pytest.raises(sg.AsleepError, match=r"Sequential is asleep \(weights, graphs\): call wake"):
                    use(part)
        model.wake()
    assert all(map(torch.equal, (model(x), layer(x), norm(x)), wanted))
    assert not {"forward", "__getstate__"} & (vars(layer).keys() | vars(norm).keys())


def test_an_engine_that_speculates_sleeps_between_two_rounds(device: torch.device) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("bench.engine")
    from bench.engine import SamplingParams
    from bench.engine.spec import SpecEngine
    from bench.engine.spec_config import SpecConfig
    from bench.models.eagle import tiny_pair

    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_tokens": 32, "max_model_len": 64, "num_pages": 60}

    def outputs(*sleeps: int) -> tuple[list[list[int]], int]:
        with sg.sleepable(device=device):
            pair = tiny_pair("eagle", device=device)
        with sg.sleepable("caches", device):
            engine = SpecEngine(*pair, SpecConfig(**limits, num_draft_tokens=2, capture_sizes=(1, 2, 4)))
        engine.capture()
        requests = [engine.add([7 + index, 3, 11], SamplingParams(max_tokens=12)) for index in range(3)]
        for number in range(100):
            if engine.idle:
                break
            engine.step()
            if number in sleeps:
                sg.sleep()
                sg.wake()
        return [request.output for request in requests], sum(each.stats.captures for each in engine.managers)

    assert outputs(2, 4) == outputs()
