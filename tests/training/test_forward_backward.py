"""A module wrapped for training gives losses, gradients and weights of eager, to the bit, at graph speed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
import torch
from run_log import unwatched
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.call.plan import Plan
from simplegraph.device.select import graph_device
from simplegraph.training.pair import PairPlan
from simplegraph.training.runner import PairProof
from tests.module.answers import reasons
from tests.training.models import MODELS, ROWS, WIDTH, assert_same, batches, made, mlp, same, state, train, twins

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, 3)


def step(model, x, scale=1.0):
    out = model(x)
    (out * out).sum().mul(scale).backward()
    return out


def captured(make, device, **settings):
    """A plain model, and a wrapped one that replays calls of `ROWS` rows; gradients of both are None."""
    plain, model = twins(make, device, **settings)
    for x, _ in batches(2, device):
        step(plain, x)
        step(model, x)
    plain.zero_grad()
    model.zero_grad()
    return plain, model


def replays(model) -> dict[str, int]:
    found: dict[str, int] = {}
    for graph in model.graph_stats.graphs.values():
        found[graph.mode] = found.get(graph.mode, 0) + graph.replays
    return found


@pytest.mark.proofs
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_eagers_to_the_bit(device, name, optimizer):
    if device.type == "cuda" and name == "recurrent":
        pytest.skip("cuDNN drops by random numbers of its own")
    plain, model = twins(MODELS[name], device)
    data = batches(50, device)
    expected = train(plain, OPTIMIZERS[optimizer](plain.parameters()), data)
    actual = train(model, OPTIMIZERS[optimizer](model.parameters()), data)
    assert torch.equal(actual, expected)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "proof": 1}
    graphs = {graph.mode: graph for graph in model.graph_stats.graphs.values()}
    assert {mode: (graph.replays, graph.proof) for mode, graph in graphs.items()} == {
        "FORWARD": (48, "exact"),
        "BACKWARD": (48, "exact"),
    }


POOLS = {
    "max_pool1d": nn.MaxPool1d(2),
    "max_pool2d": nn.Sequential(nn.Unflatten(1, (2, -1)), nn.MaxPool2d(2)),
    "max_pool3d": nn.Sequential(nn.Unflatten(1, (2, 2, -1)), nn.MaxPool3d(2)),
    "adaptive_max_pool1d": nn.AdaptiveMaxPool1d(2),
    "adaptive_max_pool2d": nn.Sequential(nn.Unflatten(1, (2, -1)), nn.AdaptiveMaxPool2d(2)),
    "adaptive_max_pool3d": nn.Sequential(nn.Unflatten(1, (2, 2, -1)), nn.AdaptiveMaxPool3d(2)),
}


@pytest.mark.parametrize("name", POOLS)
def test_the_indices_of_a_pool_reach_its_backward(device, name):
    def make():
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.Unflatten(1, (8, 8)), POOLS[name], nn.Flatten())

    plain, model = twins(make, device)
    for x, _ in batches(6, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert replays(model) == {"FORWARD": 5, "BACKWARD": 5}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_the_indices_of_an_embedding_bag_reach_its_backward(device, mode):
    plain, model = twins(lambda: nn.EmbeddingBag(50, 8, mode=mode), device)
    for seed in range(6):
        ids = torch.randint(50, (ROWS, 5), generator=torch.Generator().manual_seed(seed)).to(device)
        step(plain, ids)
        step(model, ids)
    assert_same(model, plain)
    assert replays(model) == {"FORWARD": 5, "BACKWARD": 5}


@pytest.mark.parametrize("waits", [True, False])
def test_a_replay_waits_for_copies_from_the_cpu_as_eager_does(device, waits, monkeypatch):
    waited = []
    mark = type("Mark", (), {"wait": lambda self: waited.append(1)})()
    _, model = captured(linear, device)
    # As for a pinned tensor that is moved by a copy which waits: the caller may overwrite it.
    monkeypatch.setattr(PairPlan, "waits", property(lambda plan: waits, lambda plan, value: None), raising=False)
    monkeypatch.setattr(type(graph_device(device)), "mark", lambda of: mark)
    before = model.graph_stats.replays
    step(model, batches(1, device)[0][0])
    assert model.graph_stats.replays > before
    assert waited == [1] * waits


class Flattening(nn.LSTM):
    """Gives its weights one buffer when they are others than before, as torch does for cuDNN, which no CPU has."""

    def flatten_parameters(self):
        weights = getattr(self, "_flat_weights", [])
        if weights and all(isinstance(weight, Tensor) for weight in weights):
            flat, begin = torch.cat([weight.detach().flatten() for weight in weights]), 0
            for weight in weights:
                weight.data = flat[begin : begin + weight.numel()].view(weight.shape)
                begin += weight.numel()


@pytest.mark.proofs
def test_recurrent_weights_keep_their_memory_when_a_capture_replaces_them(device):
    def make():
        made = MODELS["recurrent"]()
        made.lstm = Flattening(2, 6, batch_first=True)
        return made

    plain, model = twins(make, device)
    places = [weight.data_ptr() for weight in model.parameters()]
    train(plain, OPTIMIZERS["sgd"](plain.parameters()), batches(6, device))
    train(model, OPTIMIZERS["sgd"](model.parameters()), batches(6, device))
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "proof": 1}
    model(batches(1, device)[0][0][:1])  # another size: eagerly first
    assert [weight.data_ptr() for weight in model.parameters()] == places


def test_gradients_add_up_over_several_backwards(device):
    """Torch's own graphed callables give twice the last gradient: their static memory becomes `.grad`."""
    plain, model = captured(linear, device)
    for x, _ in batches(4, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert replays(model)["BACKWARD"] == 5


def test_gradients_that_are_kept_stay_what_they_are(device):
    plain, model = captured(mlp, device)
    kept = []
    for x, _ in batches(3, device):
        torch.manual_seed(1)
        expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
        torch.manual_seed(1)
        kept.append((torch.autograd.grad(model(x).sum(), list(model.parameters())), expected))
    for actual, expected in kept:
        assert all(map(same, actual, expected))


def test_outputs_that_are_kept_stay_what_they_are(device):
    plain, model = captured(linear, device)
    data = [x for x, _ in batches(3, device)]
    kept = [model(x).detach() for x in data]
    assert all(torch.equal(out, plain(x)) for out, x in zip(kept, data, strict=True))


def test_an_input_that_wants_gradients_gets_them(device):
    plain, model = twins(linear, device)
    for x, _ in batches(5, device):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        step(plain, theirs * 2)
        step(model, ours * 2)
        assert torch.equal(ours.grad, theirs.grad)
    step(model, x)  # now it wants none: other graphs
    step(plain, x)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 2}


def test_a_call_with_scalars_alone_goes_through_graphs_and_one_without_rows_runs_eagerly(device):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.weight * x

    plain, model = twins(Scaled, device)
    for number in range(5):
        for each in (plain, model):
            step(each, torch.tensor(float(number), device=device))
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 1}
    for each in (plain, model):
        step(each, torch.ones(0, 3, device=device))
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "empty_batch": 1}


def test_forwards_before_the_backward_of_another_run_eagerly(device):
    plain, model = captured(linear, device)
    data = [x for x, _ in batches(3, device)]
    for order in ([0, 1], [1, 0], [2, 0, 1], [0, 1, 2]):
        for each in (plain, model):
            outs = [each(data[at]) for at in sorted(order)]
            for at in order:
                outs[at].pow(2).sum().backward()
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "backward_pending": 6}
    assert replays(model) == {"FORWARD": 5, "BACKWARD": 5}


def test_a_forward_of_another_shape_before_a_backward_runs_eagerly(device):
    plain, model = captured(linear, device)
    for rows in (2, 3):
        for x, _ in batches(3, device, rows):
            step(plain, x)
            step(model, x)
    few, many = batches(1, device, 2)[0][0], batches(1, device, 3)[0][0]
    for each in (plain, model):
        one, other = each(few), each(many)
        one.pow(2).sum().backward()
        other.pow(2).sum().backward()
    assert_same(model, plain)
    assert reasons(model)["backward_pending"] == 1


def test_a_thread_that_calls_just_before_a_replay_keeps_its_graphs(device, monkeypatch):
    plain, model = captured(linear, device)
    one, other = (x for x, _ in batches(2, device))
    found, bind = [], Plan.bind

    def interrupted(plan, leaves):
        monkeypatch.setattr(Plan, "bind", bind)
        thread = threading.Thread(target=lambda: found.append(model(other)))
        thread.start()
        thread.join()
        return bind(plan, leaves)

    monkeypatch.setattr(Plan, "bind", interrupted)
    model.zero_grad()
    found.append(model(one))
    plain.zero_grad()
    for out, x in zip(found, (other, one), strict=True):
        out.pow(2).sum().backward()
        plain(x).pow(2).sum().backward()
    assert_same(model, plain)


def test_outputs_that_no_backward_comes_for_do_not_hold_graphs(device):
    _, model = captured(linear, device)
    for x, _ in batches(6, device):
        model(x)
    assert reasons(model) == {"first_call": 1}


def test_a_second_backward_is_right_where_one_was_seen_before(device):
    plain, model = twins(linear, device)
    for x, _ in batches(4, device):
        for each in (plain, model):
            out = each(x)
            out.sum().backward(retain_graph=True)
            out.pow(2).sum().backward()
        assert_same(model, plain)
    assert replays(model) == {"FORWARD": 3, "BACKWARD": 6}


def test_a_second_backward_that_comes_new_is_an_error_and_right_from_then_on(device):
    plain, model = captured(mlp, device)
    x = batches(1, device)[0][0]
    out = model(x).sum()
    out.backward(retain_graph=True)
    with pytest.raises(sg.ReplayError, match="retain_graph=True"):
        out.backward()
    model.zero_grad()
    for each in (plain, model):
        torch.manual_seed(2)
        out = each(x).sum()
        out.backward(retain_graph=True)
        out.backward()
    assert_same(model, plain)


def test_a_second_backward_without_retain_graph_is_torchs_error(device):
    _, model = captured(linear, device)
    out = model(batches(1, device)[0][0])
    out.backward(torch.ones_like(out))
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(torch.ones_like(out))


def test_differentiating_twice_is_an_error_after_a_replay_and_eager_from_then_on(device):
    plain, model = captured(linear, device)
    x = batches(1, device)[0][0]
    with pytest.raises(sg.ReplayError, match="create_graph=True"):
        torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()), create_graph=True)

    def penalty(each):
        (grad, _) = torch.autograd.grad(each(x).pow(2).sum(), list(each.parameters()), create_graph=True)
        grad.pow(2).sum().backward()

    penalty(plain)
    penalty(model)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "untrainable": 1}


class Several(nn.Module):
    """Returns nested outputs: a dataclass with a dict, integers and one that is not differentiable."""

    @dataclasses.dataclass
    class Output:
        hidden: Tensor
        others: dict[str, object]

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor, factor: float = 1.0, *, twice: bool = False) -> Several.Output:
        hidden = self.one(x) * factor
        two = self.two(x)
        others = {"two": (two, 2 * two) if twice else (two,), "classes": hidden.argmax(-1), "same": hidden, "x": x}
        return self.Output(hidden, {**others, "name": "several", "weight": self.one.weight})


def test_nested_outputs_come_back_as_they_are_and_unused_parameters_have_no_gradient(device):
    plain, model = twins(Several, device)
    for x, _ in batches(4, device):
        found = []
        for each in (plain, model):
            out = each(x, 2.0, twice=True)
            (out.hidden.sum() + out.others["two"][1].pow(2).sum()).backward()
            found.append(out)
        theirs, ours = found
        assert type(ours) is Several.Output
        assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(ours.others["classes"], theirs.others["classes"])
        assert not ours.others["classes"].requires_grad
        assert ours.others["same"] is ours.hidden
        assert ours.others["x"] is x
        assert ours.others["weight"] is model.one.weight
        assert ours.others["name"] == "several"
        assert_same(model, plain)
    assert model.unused.weight.grad is None
    assert reasons(model) == {"first_call": 1}


def test_outputs_without_a_gradient_leave_their_parameters_without_one(device):
    plain, model = twins(Several, device)

    def run(x, use):
        for each in (plain, model):
            each.zero_grad()
            use(each(x)).backward()
        assert_same(model, plain)

    uses = {
        "one": lambda out: out.hidden.sum(),
        "two": lambda out: out.others["two"][0].pow(2).sum(),
        "both": lambda out: out.hidden.sum() + out.others["two"][0].sum(),
    }
    data = [x for x, _ in batches(8, device)]
    for x, name in zip(data, ["one", "one", "two", "both", "one", "both", "two", "two"], strict=True):
        run(x, uses[name])
    assert reasons(model) == {"first_call": 1}


def test_arguments_that_are_no_tensors_tell_graphs_apart(device):
    plain, model = twins(Several, device)
    for factor in (2.0, 3.0, 2.0, 3.0, 2.0, 3.0):
        for each in (plain, model):
            each(batches(1, device)[0][0], factor).hidden.sum().backward()
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 2}


def test_parameters_frozen_and_unfrozen_between_steps(device):
    plain, model = captured(mlp, device)
    for round_, frozen in enumerate((True, False, True, False, True)):
        for each in (plain, model):
            each.zero_grad()
            for parameter in each[0].parameters():
                parameter.requires_grad_(not frozen)
            torch.manual_seed(round_)
            step(each, batches(1, device)[0][0])
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 2}


def test_a_frozen_module_and_calls_without_gradients_go_the_ordinary_way(device):
    plain, model = captured(lambda: linear().eval(), device, capture_sizes=[4])
    x = batches(1, device, 3)[0][0]
    with torch.no_grad():
        for rows in (3, 4, 3, 2, 3):
            assert torch.allclose(
                model(x[:rows] if rows < 4 else x.repeat(2, 1)[:4]).sum(),
                model(x[:rows] if rows < 4 else x.repeat(2, 1)[:4]).sum(),
            )
        assert torch.allclose(model(x), plain(x))
    modes = {graph.mode for graph in model.graph_stats.graphs.values()}
    assert modes == {"FORWARD", "BACKWARD", "FULL"}
    model.requires_grad_(False)
    before = model.graph_stats.replays
    assert torch.allclose(model(x), plain(x))
    assert not model(x).requires_grad
    assert model.graph_stats.replays == before + 2


def test_switching_between_training_and_evaluation_keeps_both_sets_of_graphs(device):
    plain, model = twins(lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), device)
    for turn in range(6):
        for each in (plain, model):
            each.train(turn % 2 == 0)
            torch.manual_seed(turn)
            step(each, batches(1, device)[0][0])
            each.eval()
            with torch.no_grad():
                each(batches(1, device)[0][0])
        assert_same(model, plain)
    assert model.graph_stats.recaptures == 0
    assert reasons(model)["first_call"] == 3


def test_a_weight_that_is_replaced_is_never_stale(device):
    plain, model = captured(linear, device)
    x = batches(1, device)[0][0]
    for each in (plain, model):
        torch.manual_seed(9)
        each.weight = nn.Parameter(torch.randn(3, WIDTH, device=device))
    for _ in range(3):
        for each in (plain, model):
            step(each, x)
        assert_same(model, plain)
    assert model.graph_stats.recaptures == 1


def test_a_weight_that_is_replaced_before_the_backward_of_a_replay_loses_no_step(device):
    plain, model = captured(linear, device)
    x = batches(1, device)[0][0]
    for each in (plain, model):
        out, old = each(x), each.weight
        torch.manual_seed(9)
        each.weight = nn.Parameter(torch.randn(3, WIDTH, device=device))
        each(x).sum().backward()
        out.sum().backward()
        each.old = old.grad
    assert same(model.old, plain.old)
    assert_same(model, plain)


def test_weights_written_in_place_are_read_by_the_next_replay(device):
    plain, model = captured(linear, device)
    other = state(made(linear, device))
    for scale in (2.0, 3.0):
        for each in (plain, model):
            each.load_state_dict({name: tensor * scale for name, tensor in other.items()})
            step(each, batches(1, device)[0][0])
        assert_same(model, plain)
    assert model.graph_stats.recaptures == 0


def test_a_weight_changed_between_forward_and_backward_is_an_error_as_in_eager(device):
    plain, model = captured(mlp, device)
    x = batches(1, device)[0][0]
    for each, kind in ((plain, RuntimeError), (model, sg.ReplayError)):
        out = each(x).sum()
        with torch.no_grad():
            each[4].weight.add_(1)
        with pytest.raises(kind):
            out.backward()


def test_hooks_of_parameters_run_once_a_backward(device):
    plain, model = twins(linear, device)
    for each in (plain, model):
        each.seen = []
        each.weight.register_hook(lambda grad, each=each: each.seen.append(grad.clone()) or grad * 2)
        each.bias.register_post_accumulate_grad_hook(lambda bias, each=each: each.seen.append(bias.grad.clone()))
    for x, _ in batches(4, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert len(model.seen) == len(plain.seen) == 8
    assert all(map(same, model.seen, plain.seen))
    assert reasons(model) == {"first_call": 1}


def test_backward_hooks_of_modules_run_eagerly_for_as_long_as_they_are_there(device):
    _, model = captured(mlp, device)
    called = []
    handle = model[0].register_full_backward_hook(lambda *_: called.append(1))
    for x, _ in batches(2, device):
        step(model, x.clone().requires_grad_())  # torch warns of such hooks where no input wants gradients
    assert len(called) == 2
    assert reasons(model) == {"first_call": 1, "hooks": 2}
    handle.remove()
    before = replays(model).get("FORWARD", 0)
    for _ in range(3):
        step(model, batches(1, device)[0][0])
    assert len(called) == 2
    assert replays(model)["FORWARD"] > before


class Odd(nn.Module):
    """Does something in its forward that no pair of graphs can do."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(WIDTH, 3)
        self.calls, self.kept = 0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "writes":
            x.add_(1)
        out = self.linear(x)
        if self.what == "item" and out.sum().item() > 1e9:
            return out
        if self.what == "hook":
            out.register_hook(lambda grad: grad * 2)
        if self.what == "counts":
            self.calls += 1
        if self.what == "keeps":
            self.kept = out * 2
        if self.what == "checkpoint":
            return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)
        if self.what == "reentrant":
            return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True, preserve_rng_state=False)
        if self.what == "view":
            return self.linear.weight[:2]
        if self.what == "elsewhere":
            return out * ELSEWHERE
        return out


ELSEWHERE = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("what", "reason", "said"),
    [
        ("item", "capture_failed", "item"),
        ("hook", "untrainable", "Tensor.register_hook"),
        ("writes", "untrainable", "writes to x"),
        ("counts", "capture_failed", "calls"),
        ("keeps", "capture_failed", "kept"),
        ("checkpoint", "capture_failed", "checkpoint"),
        ("reentrant", "capture_failed", "heckpoint"),
        ("view", "capture_failed", "memory of the module"),
    ],
)
def test_what_no_pair_of_graphs_can_do_runs_eagerly_with_its_reason(device, what, reason, said):
    if device.type == "cuda" and what == "checkpoint":
        pytest.skip("a GPU's generator may be put back in a capture")
    plain, model = twins(lambda: Odd(what), device)
    for x, _ in batches(4, device):
        for each in (plain, model):
            own = x.clone().requires_grad_() if what == "reentrant" else x.clone()
            each(own).pow(2).sum().backward()
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, reason: 3}
    assert said in str(model.graph_report())
    assert model.calls == plain.calls


def test_checkpoints_that_draw_nothing_again_are_captured(device):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            return self.head(torch.utils.checkpoint.checkpoint(self.inner, x, **options))

    plain, model = twins(Checkpointed, device)
    for x, _ in batches(4, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert replays(model) == {"FORWARD": 3, "BACKWARD": 3}


def test_a_leaf_that_the_module_does_not_hold_is_named(device):
    if device.type != "cpu":
        pytest.skip("the leaf is on the CPU")
    plain, model = twins(lambda: Odd("elsewhere"), device)
    for x, _ in batches(3, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert "which the forward does not find in its module" in str(model.graph_report())


def test_sparse_gradients_run_eagerly(device):
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.embedding((x.abs() * 2).long() % 5).sum(1)

    plain, model = twins(Sparse, device)
    for x, _ in batches(3, device):
        for each in (plain, model):
            each.zero_grad()
            step(each, x)
        assert same(model.embedding.weight.grad.to_dense(), plain.embedding.weight.grad.to_dense())
    assert reasons(model) == {"first_call": 1, "capture_failed": 2}


class Tied(nn.Module):
    """Uses one weight twice: with autocast's cache both uses share one cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).relu()).float()


@pytest.mark.proofs
@pytest.mark.parametrize("cached", [True, False])
def test_autocast_gives_eagers_gradients_to_the_bit(device, cached):
    plain, model = twins(Tied, device)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for x, _ in batches(6, device):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=cached):
                loss = each(x).pow(2).sum()
            loss.backward()
            optimizer.step()
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "proof": 1}
    step(model, x)  # no cast of the capture is left
    step(plain, x)
    assert_same(model, plain)


class Exact(nn.Module):
    """Leaves autocast for its forward, so that autocast around the backward is what rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.linear(self.linear(x).relu())


@pytest.mark.parametrize("inside", [True, False])
def test_a_backward_is_captured_under_the_autocast_that_it_runs_under(device, inside):
    plain, model = twins(Exact, device)
    for x, _ in batches(4, device):
        for each in (plain, model):
            each.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = each(x).pow(2).sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        assert_same(model, plain)
    assert replays(model) == {"FORWARD": 3, "BACKWARD": 3}


def test_a_missing_gradient_of_an_output_counts_as_zeros(device):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.two = nn.Linear(WIDTH, 6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.trunk(x).tanh()
            return self.one(hidden), self.two(hidden)

    plain, model = twins(Shared, device)
    for x, used in zip((x for x, _ in batches(7, device)), ("01", "01", "0", "1", "01", "1", "0"), strict=True):
        for each in (plain, model):
            each.zero_grad()
            outs = each(x)
            sum(outs[int(at)].pow(2).sum() for at in used).backward()
        assert_same(model, plain)
    assert replays(model) == {"FORWARD": 6, "BACKWARD": 6}


def test_without_a_backward_nothing_is_captured(device):
    _, model = twins(linear, device)
    for x, _ in batches(7, device):
        model(x)
    assert reasons(model) == {"first_call": 1, "warmup": 3, "grad": 3}
    assert "after the first backward of such a call" in model.graph_stats.explained(sg.Reason.GRAD)
    step(model, x)
    step(model, x)
    assert replays(model) == {"FORWARD": 1, "BACKWARD": 1}


@pytest.mark.proofs
def test_calls_before_the_first_backward_are_the_normal_course(device, caplog):
    _, model = twins(linear, device)
    for x, _ in batches(2, device):
        (model(x) - model(x + 1)).sum().backward()
    costly, normal = model.graph_stats.eager_by_cost()
    assert normal == {sg.Reason.FIRST_CALL: 1, sg.Reason.WARMUP: 1, sg.Reason.PROOF: 1}
    assert costly == {sg.Reason.BACKWARD_PENDING: 1}
    assert "grad mode is on" not in caplog.text


def test_a_failed_capture_in_the_middle_of_training_loses_nothing(device):
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Dropout(0.3))

        def forward(self, x: Tensor) -> Tensor:
            out = self.layers(x)
            if graph_device(device).is_capturing():
                raise ValueError("not now")
            return out

    plain, model = twins(Late, device)
    data = batches(5, device)
    expected = train(plain, torch.optim.Adam(plain.parameters()), data)
    assert torch.equal(train(model, torch.optim.Adam(model.parameters()), data), expected)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "capture_failed": 4}
    _, other = twins(Late, device, on_capture_failure="raise")
    step(other, data[0][0])
    with pytest.raises(sg.CaptureError, match="not now"):
        other(data[0][0])


def test_a_backward_that_cannot_be_captured_leaves_no_forward_graph(device):
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 if grad.sum().item() < 1e9 else grad

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return Reading.apply(self.linear(x))

    plain, model = twins(Module, device)
    for x, _ in batches(3, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert model.graph_stats.graphs == {}
    assert reasons(model) == {"first_call": 1, "capture_failed": 2}


def test_a_wrong_graph_is_found_by_its_proof_and_serves_no_call(device, monkeypatch):
    import simplegraph.training.recording as recording

    monkeypatch.setattr(recording, "_laid_as", lambda leaf, grad: grad * 1.5)
    plain, model = twins(linear, device, verify=1)
    for x, _ in batches(4, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "proof": 1, "capture_failed": 2}
    assert "does not equal eager" in str(model.graph_report())


def test_copies_and_pickles_train_by_themselves(device):
    _, model = captured(linear, device)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for x, _ in batches(3, device):
            step(other, x)
        assert replays(other) == {"FORWARD": 2, "BACKWARD": 2}
    assert model.weight.grad is None


def test_dropped_graphs_are_captured_again(device):
    plain, model = captured(linear, device)
    model.reset_graphs()
    for x, _ in batches(3, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert replays(model) == {"FORWARD": 2, "BACKWARD": 2}


def test_settings_that_do_not_go_together_are_refused(device):
    with pytest.raises(sg.ConfigError, match="training=True does not go with ranks"):
        sg.wrap(linear(), training=True, ranks=sg.RankGroup.__new__(sg.RankGroup))
    with pytest.raises(sg.ConfigError, match="wrap the module with training=True"):
        sg.wrap(linear()).configure_graphs(training=True)


def test_the_class_decorator_takes_the_setting_too(device):
    @sg.cuda_graph(training=True)
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model = Model().to(device)
    for x, _ in batches(3, device):
        step(model, x)
    assert replays(model) == {"FORWARD": 2, "BACKWARD": 2}


def test_every_new_shape_is_bounded(device):
    plain, model = twins(linear, device, max_signatures=2)
    for rows in (1, 2, 3, 1, 2, 3):
        for each in (plain, model):
            step(each, batches(1, device, rows)[0][0])
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 2, "too_many_signatures": 2}


def test_static_gradients_of_outputs_hold_any_layout(device):
    plain, model = captured(lambda: nn.Linear(WIDTH, ROWS), device)
    x = batches(1, device)[0][0]
    grads = [torch.ones(ROWS, ROWS, device=device), torch.arange(16.0, device=device).view(4, 4).t()]
    for grad in (*grads, torch.ones((), device=device).expand(ROWS, ROWS)):
        for each in (plain, model):
            each(x).backward(grad)
        assert_same(model, plain)


class ByLayout(torch.autograd.Function):
    """Doubles; its backward rounds otherwise for a gradient of another layout, as kernels do, or if it is told to."""

    wrong_in_capture = False

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        wrong = ByLayout.wrong_in_capture and graph_device(grad.device).is_capturing()
        return grad * (2 if grad.is_contiguous() and not wrong else 2 + 2**-21)


@pytest.mark.proofs
@pytest.mark.parametrize("layout", ["as captured", "another"])
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong in its last bits"])
def test_a_backward_may_round_otherwise_for_another_layout_alone(device, layout, wrong, monkeypatch):
    """Else graphs of a loss that sums, whose gradients have strides of 0, would be refused, or wrong ones be served."""

    class Doubling(nn.Linear):
        def forward(self, x):
            return ByLayout.apply(super().forward(x))

    monkeypatch.setattr(ByLayout, "wrong_in_capture", wrong)
    plain, model = twins(lambda: Doubling(WIDTH, 3), device)
    ones = torch.ones(ROWS, 3, device=device)
    for x, _ in batches(4, device):
        for each in (plain, model):
            each(x).backward(ones if layout == "as captured" else ones[:1, :1].expand(ROWS, 3))
    refused = wrong and layout == "as captured"
    assert ("capture_failed" in reasons(model)) is refused
    assert replays(model) == ({} if refused else {"FORWARD": 2, "BACKWARD": 2})
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0 if refused else 1e-5, atol=0)


class Overwriting(torch.autograd.Function):
    """Its backward writes over what its forward left, as in-place kernels do."""

    added = staticmethod(lambda grad: 1.0)

    @staticmethod
    def forward(ctx, x):
        ctx.left = x * 2
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.left.add_(Overwriting.added(grad))


@pytest.mark.proofs
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong in its capture"])
def test_a_backward_that_writes_over_what_its_forward_left_is_compared_from_there(device, wrong, monkeypatch):
    """Else its second replay would differ from the first one, and hide that both differ from eager."""

    class Left(nn.Linear):
        def forward(self, x):
            return Overwriting.apply(super().forward(x))

    capturing = graph_device(device).is_capturing
    monkeypatch.setattr(Overwriting, "added", staticmethod(lambda grad: 1.25 if wrong and capturing() else 1.0))
    plain, model = twins(lambda: Left(WIDTH, 3), device)
    for x, _ in batches(4, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert ("capture_failed" in reasons(model)) is wrong
    assert replays(model) == ({} if wrong else {"FORWARD": 2, "BACKWARD": 2})


@pytest.mark.proofs
def test_a_tensor_that_the_eager_run_of_a_proof_adds_to_a_cache_leaves_the_graphs(device):
    armed = unwatched(value=False)  # a flag that is noticed would be another call's

    class Caching(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, 3)
            self.cache = {"scale": torch.ones(3, device=device)}

        def forward(self, x):
            if armed().value and not graph_device(device).is_capturing():
                self.cache.setdefault(f"for {x.shape[1]}", torch.ones(3, device=device))
            return super().forward(x) * self.cache["scale"]

    plain, model = twins(Caching, device)
    for turn, (x, _) in enumerate(batches(5, device)):
        if turn == 1:  # the call that is captured and proven
            armed().value = True
        assert torch.equal(step(model, x), step(plain, x))
    assert_same(model, plain)
    assert f"for {WIDTH}" in model.cache
    assert reasons(model) == {"first_call": 1, "proof": 1}


@pytest.mark.proofs
def test_a_forward_that_does_something_else_in_its_capture_is_found_by_its_proof(device):
    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Dropout(0.2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) * (2 if graph_device(device).is_capturing() else 1)

    plain, model = twins(Sly, device)
    data = batches(5, device)
    expected = train(plain, torch.optim.Adam(plain.parameters()), data)
    assert torch.equal(train(model, torch.optim.Adam(model.parameters()), data), expected)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "proof": 1, "capture_failed": 3}


@pytest.mark.proofs
def test_a_proof_bears_two_backwards_and_hooks_and_a_loss_on_some_outputs(device):
    plain, model = twins(Several, device)
    for each in (plain, model):
        each.seen = []
        each.two.weight.register_hook(lambda grad, each=each: each.seen.append(grad.clone()))
    for x, _ in batches(5, device):
        for each in (plain, model):
            out = each(x)
            out.others["two"][0].sum().backward(retain_graph=True)
            out.others["two"][0].pow(2).sum().backward()
        assert_same(model, plain)
    assert all(map(same, model.seen, plain.seen))
    assert reasons(model) == {"first_call": 1, "proof": 1}
    proofs = {(graph.mode, graph.proof.partition(":")[0]) for graph in model.graph_stats.graphs.values()}
    assert proofs == {("FORWARD", "exact"), ("BACKWARD", "exact"), ("BACKWARD", "unverified")}


def test_calls_inside_eager_leave_graphs_alone_and_may_be_differentiated_twice(device):
    plain, model = captured(linear, device)
    x = batches(1, device)[0][0]
    with sg.eager():
        (grad, _) = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()), create_graph=True)
    assert grad.requires_grad
    step(plain, x)
    step(model, x)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "switched_off": 1}


def test_outputs_may_be_changed_in_place(device):
    plain, model = captured(linear, device)
    x = batches(1, device)[0][0]
    for each in (plain, model):
        out = each(x)
        out.mul_(3).relu_()
        out.pow(2).sum().backward()
    assert_same(model, plain)


def test_a_module_without_parameters_passes_gradients_on(device):
    model = sg.wrap(nn.GELU(), training=True)
    for x, _ in batches(4, device):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        model(ours).pow(2).sum().backward()
        nn.functional.gelu(theirs).pow(2).sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
    assert reasons(model) == {"first_call": 1}


@pytest.mark.proofs
def test_channels_last_weights_have_gradients_of_their_layout(device):
    def images() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    plain, model = twins(images, device)
    for turn in range(4):
        torch.manual_seed(turn)
        x = torch.randn(2, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
        step(plain, x)
        step(model, x)
        assert_same(model, plain)
        assert model[0].weight.grad.stride() == plain[0].weight.grad.stride()
    assert reasons(model) == {"first_call": 1, "proof": 1}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_module_gives_eagers_gradients(device, use_reentrant):
    plain, model = twins(mlp, device)
    for x, _ in batches(6, device):
        for each in (plain, model):
            torch.manual_seed(4)
            own = x.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(each, own, use_reentrant=use_reentrant).pow(2).sum().backward()
        assert_same(model, plain)
    if use_reentrant:  # whose second forward is an ordinary one
        assert replays(model)["BACKWARD"] >= 4
    else:
        assert reasons(model) == {"hooks": 12}


def test_a_wrapped_module_inside_another_is_part_of_its_graphs(device):
    plain, model = twins(lambda: nn.Sequential(sg.wrap(linear(), training=True), nn.ReLU(), nn.Linear(3, 2)), device)
    for x, _ in batches(4, device):
        step(plain, x)
        step(model, x)
    assert_same(model, plain)
    assert replays(model) == {"FORWARD": 3, "BACKWARD": 3}
    assert replays(plain[0]) == {"FORWARD": 3, "BACKWARD": 3}


def test_wrapped_parts_of_a_model_train_as_the_whole(device):
    def parts(wrap):
        return nn.Sequential(wrap(nn.Linear(WIDTH, 6)), nn.Dropout(0.3), wrap(nn.Linear(6, 3)))

    plain = made(lambda: parts(lambda part: part), device)
    model = made(lambda: parts(lambda part: sg.wrap(part, training=True)), device)
    data = batches(10, device)
    expected = train(plain, torch.optim.Adam(plain.parameters()), data)
    assert torch.equal(train(model, torch.optim.Adam(model.parameters()), data), expected)
    assert_same(model, plain)
    assert replays(model[0]) == replays(model[2]) == {"FORWARD": 9, "BACKWARD": 9}


def test_weights_that_move_at_every_step_end_in_eager_calls(device):
    plain, model = captured(linear, device)
    for turn in range(12):
        for each in (plain, model):
            step(each, batches(1, device)[0][0])
            torch.manual_seed(turn)
            each.weight.data = torch.randn(3, WIDTH, device=device)
        assert_same(model, plain)
    assert reasons(model)["stale_too_often"] >= 3
    assert model.graph_stats.graphs == {}


def test_settings_hold_for_training_graphs_too(device):
    _, model = captured(linear, device, capture="upfront")
    assert reasons(model) == {"not_captured_upfront": 2}
    assert "captured by the calls that they serve" in str(model.graph_report())
    plain, model = captured(linear, device, mode="NONE")
    assert reasons(model) == {"switched_off": 2}
    plain, model = captured(linear, device, debug=True)
    step(plain, batches(1, device)[0][0])
    step(model, batches(1, device)[0][0])
    assert_same(model, plain)
    assert str(device.type) in str(model.graph_report())


def test_a_loss_that_passes_no_gradient_on_makes_none(device):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return None

    plain, model = captured(linear, device)
    x = batches(1, device)[0][0]
    for each in (plain, model):
        Stop.apply(each(x)).backward()
    assert_same(model, plain)
    assert model.weight.grad is None


def test_graphs_dropped_between_a_forward_and_its_backward_lose_no_step(device):
    plain, model = captured(mlp, device)
    x = batches(1, device)[0][0]
    for each in (plain, model):
        torch.manual_seed(2)
        out = each(x)
        if each is model:
            model.reset_graphs()
        out.pow(2).sum().backward()
    assert_same(model, plain)


def test_gradients_to_some_leaves_alone_are_eagers(device):
    plain, model = captured(linear, device)
    x = batches(1, device)[0][0]
    for each in (plain, model):
        each(x).pow(2).sum().backward(inputs=[each.weight])
    assert_same(model, plain)
    assert model.bias.grad is None


class Heads(nn.Module):
    """Two layers that share nothing, as an actor and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


@pytest.mark.parametrize("proofs", [False, pytest.param(True, marks=pytest.mark.proofs)])
def test_outputs_that_share_nothing_may_have_backwards_one_by_one(device, proofs):
    plain, model = twins(Heads, device)
    for x, _ in batches(6, device):
        for each in (plain, model):
            each.zero_grad()
            for out in each(x):
                out.square().sum().backward()
        assert_same(model, plain)
    assert model.graph_stats.replays == (12 if proofs else 15)


def test_backwards_that_come_one_by_one_later_are_captured_again(device):
    plain, model = twins(Heads, device)
    for x, _ in batches(3, device):
        sum(out.sum() for out in model(x)).backward()
    one, other = model(x)
    one.sum().backward()
    with pytest.raises(sg.ReplayError, match="Later calls keep it"):
        other.sum().backward()
    del one, other
    for each in (plain, model):
        each.zero_grad()
    for x, _ in batches(4, device):
        for each in (plain, model):
            for out in each(x):
                out.square().sum().backward()
        assert_same(model, plain)
    assert reasons(model) == {"first_call": 1}


def test_flushed_graphs_of_a_forward_that_waits_stay_its_own(device):
    """The next ones get memory of their own, and can be flushed while the first ones live."""
    plain, model = twins(linear, device, max_signatures=1, on_too_many_signatures="flush")
    for x, _ in batches(3, device):
        model(x).pow(2).sum().backward(retain_graph=True)
    waiting = [each(x).sum() for each in (plain, model)]
    for rows, count in ((ROWS + 1, 1), (ROWS, 1), (ROWS, 3), (ROWS + 1, 3)):
        for x, _ in batches(count, device, rows):
            for each in (plain, model):
                each.zero_grad()
                each(x).pow(2).sum().backward()
            assert_same(model, plain)
        for each, loss in zip((plain, model), waiting if count > 1 or rows == ROWS else (), strict=False):
            each.zero_grad()
            loss.backward(retain_graph=True)
        assert_same(model, plain)


@pytest.mark.proofs
@pytest.mark.parametrize("half", ["_run", "_run_backward"])
def test_an_error_in_the_eager_run_of_a_proof_is_the_callers_and_the_next_call_proves(device, monkeypatch, half):
    plain, model = twins(linear, device)
    data = [x for x, _ in batches(5, device)]
    run = getattr(PairProof, half)

    def fails(proof, *args):
        run(proof, *args)
        raise KeyError("mine")

    for x in data[:1] + data[2:]:
        step(plain, x)
    step(model, data[0])
    with monkeypatch.context() as patched:
        patched.setattr(PairProof, half, fails)
        with pytest.raises(KeyError, match="mine"):
            step(model, data[1])
    for x in data[2:]:
        step(model, x)
    assert_same(model, plain)
    graphs = {(graph.mode, graph.proof) for graph in model.graph_stats.graphs.values()}
    assert graphs == {("FORWARD", "exact"), ("BACKWARD", "exact")}


@pytest.mark.proofs
def test_gradients_and_outputs_that_are_no_number_are_proven(device):
    class Ratio(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, 3)

        def forward(self, x):
            return super().forward(x) * 0 / 0, 7

    model = made(Ratio, device)
    model = sg.wrap(model, training=True)
    for x, _ in batches(4, device):
        model.zero_grad(set_to_none=True)
        output, number = model(x)
        output.sum().backward()
        assert output.isnan().all()
        assert model.weight.grad.isnan().all()
        assert number == 7
    assert reasons(model) == {"first_call": 1, "proof": 1}


def test_a_tensor_that_a_forward_keeps_beside_its_result_is_to_be_returned(device: torch.device) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aux = nn.Linear(4, 4), None

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            self.aux = out.square().mean()
            return out

    model = sg.wrap(Keeps().to(device), training=True)
    for _ in range(4):
        (model(torch.randn(2, 4, device=device)).sum() + model.aux).backward()
    assert "the forward changes `aux` whenever it runs" in (report := str(model.graph_report()))
    assert "Return the tensor, with the result" in report


class RunningMean(nn.Module):
    """Keeps a running mean in a buffer, which it replaces, writes to, or returns."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), kept
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out: Tensor = self.layer(x)
        mean = self.mean * 0.5 + out.detach().mean()
        if self.kept == "returned":
            return out + mean, mean
        if self.kept == "in place":
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return out + self.mean


def trained_with_running_mean(module: RunningMean, called: Any, device: torch.device) -> dict[str, Tensor]:
    for seed in range(6):
        module.zero_grad()
        result = called(torch.randn(2, 4, device=device, generator=torch.Generator(device).manual_seed(seed)))
        if module.kept == "returned":
            result, mean = result
            module.mean.copy_(mean)
        result.square().sum().backward()
    return {**module.state_dict(), "gradient": module.layer.weight.grad}


def test_a_buffer_that_a_forward_replaces_is_to_be_written_in_place_or_returned(device: torch.device) -> None:
    for kept in ("replaced", "in place", "returned"):
        torch.manual_seed(0)
        plain = RunningMean(kept).to(device)
        module = copy.deepcopy(plain)
        model: Any = sg.wrap(module, training=True)
        expected = trained_with_running_mean(plain, plain, device)
        torch.testing.assert_close(trained_with_running_mean(module, model, device), expected)
        report = str(model.graph_report())
        is_named = "the forward changes `mean` whenever it runs" in report and "self.mean.copy_(mean)" in report
        assert (is_named, model.graph_stats.replays > 0) == (kept == "replaced", kept != "replaced"), report
