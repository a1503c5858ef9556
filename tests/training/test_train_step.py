"""A training step in one graph trains exactly as eager does: losses, weights, gradients, optimizers, random numbers."""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.device.select import graph_device
from tests.training.twins import (
    Training,
    Twins,
    accumulating,
    assert_same,
    batch,
    classifying,
    deterministic,
    scaling,
    small_model,
)

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
}


@pytest.fixture(autouse=True)
def _deterministic():
    with deterministic():
        yield


def making(optimizer="adamw", model=small_model, **more):
    return classifying(OPTIMIZERS[optimizer], model, **more)


@pytest.mark.proofs
def test_the_report_of_a_step_has_no_batch_sizes_and_no_padding(tmp_path):
    training = Training(making(), graphed=True)
    for number in range(5):
        training.step(*batch(number))
    report = training.step.graph_report()
    first, columns, row, *_ = str(report).splitlines()
    assert re.search(r"1 graph for exact shapes, .*; 2 replays, 3 eager calls$", first)
    assert columns.split() == ["mode", "segments", "breaks", "nodes", "capture", "ms", "MiB", "replays", "proven"]
    assert row.split()[0] == "FULL"
    assert "batch size" not in str(report)
    assert "padded" not in str(report)
    report.save(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    assert "padded" not in page
    assert "padding" not in page.partition("</style>")[2]


@pytest.mark.proofs
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_a_graph_trains_as_eager(name):
    twins = Twins(making(name))
    for number in range(8):
        twins.run(*batch(number))
    assert twins.stats.replays == 5
    assert twins.stats.eager == {Reason.FIRST_CALL: 2, Reason.PROOF: 1}
    assert [graph.proof for graph in twins.stats.graphs.values()] == ["exact"]


def test_an_emulated_step_is_served_beside_a_gpu(monkeypatch):
    """There some releases of torch ask optimizers of CPU tensors, too, if they are capturable."""

    def check(optimizer):
        if torch.cuda.is_current_stream_capturing() and not all(each["capturable"] for each in optimizer.param_groups):
            raise RuntimeError("Attempting CUDA graph capture of step(), but param_groups' capturable is False.")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # outside of captures
    for name in vars(torch.optim.Optimizer).keys() & {
        "_cuda_graph_capture_health_check",
        "_accelerator_graph_capture_health_check",
    }:
        monkeypatch.setattr(torch.optim.Optimizer, name, check)
    twins = Twins(making("adam"))
    for number in range(8):
        twins.run(*batch(number))
    assert twins.stats.replays >= 5


def test_a_capture_finds_workspaces_of_libraries_in_the_thread_of_backwards(monkeypatch):
    """Else the graph's are in memory of its pool, and whoever clears them gives it to the next graph."""
    device, found = graph_device(torch.device("cpu")), []
    monkeypatch.setattr(device, "keep_workspaces", lambda: found.append(torch._C._current_graph_task_id() >= 0))
    twins = Twins(making())
    for number in range(8):
        twins.run(*batch(number))
    assert twins.stats.replays == 6
    assert any(found), "asked for inside of a backward"


def test_gradients_that_are_zeroed_stay_at_their_place():
    twins = Twins(making(to_none=False))
    for number in range(6):
        twins.run(*batch(number))
    first = next(twins.graphs.model.parameters()).grad
    twins.run(*batch(7))
    assert next(twins.graphs.model.parameters()).grad is first


def test_every_shape_has_its_own_graph_and_all_share_the_gradients():
    twins = Twins(making())
    for number in range(12):
        twins.run(*batch(number, rows=(8, 5, 3)[number % 3]))
    assert twins.stats.captures == 3
    # The very first call finds no gradients, so 8 rows are known a round later.
    assert twins.stats.replays == 12 - 3 - 1
    assert {signature.args[0].shape[0] for signature, *_ in twins.stats.graphs} == {8, 5, 3}


def test_no_shape_waits_for_a_larger_one_that_does_not_come_again():
    twins = Twins(making())
    for number in range(9):
        twins.run(*batch(number, rows=9 if number == 0 else (8, 5)[number % 2]))
    assert twins.stats.captures == 2
    assert twins.stats.eager[Reason.WARMUP] <= 2


def test_the_last_partial_batch_runs_eagerly_until_it_came_twice():
    twins = Twins(making())
    for epoch in range(3):
        for number in range(4):
            twins.run(*batch(number, rows=3 if number == 3 else 8))
        assert twins.stats.captures == (1, 2, 2)[epoch]


@pytest.mark.proofs
def test_accumulated_gradients_are_the_sum_of_both_batches():
    twins = Twins(accumulating(OPTIMIZERS["adamw"]))
    for number in range(16):
        twins.run(*batch(number), number % 2 == 1)
    assert twins.stats.replays >= 10


@pytest.mark.proofs
def test_accumulation_over_three_batches_never_adds_one_twice():
    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x, y, first, last):
            if first:
                chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y)
            loss.backward()
            if last:
                chosen.step()
            return loss

        return step_fn, trained, chosen

    twins = Twins(make)
    for number in range(24):
        twins.run(*batch(number), number % 3 == 0, number % 3 == 2)
    assert twins.stats.captures == 3
    assert twins.stats.replays >= 14


def test_gradients_may_be_dropped_or_changed_between_steps():
    twins = Twins(accumulating(OPTIMIZERS["adamw"]))
    for number in range(6):
        twins.run(*batch(number), False)
    for number in range(8):
        if number % 2:
            twins.both(lambda training: training.optimizers.zero_grad())
        else:
            twins.both(lambda training: [p.grad.mul_(2) for p in training.model.parameters()])
        twins.run(*batch(number), False)


def test_a_shape_that_first_meets_gradients_of_a_graph_finds_them_elsewhere_later():
    twins = Twins(making("plain sgd", lambda: nn.Linear(6, 3), to_none=False))

    def drop(training):
        training.model.weight.grad = None

    for number in range(20):
        if number > 6 and number % 3 == 0:
            twins.both(drop)
        twins.run(*batch(number, rows=8 if number < 5 or number % 2 else 5))
    assert twins.stats.replays >= 9


def test_a_backward_of_eager_between_steps_adds_to_what_the_graph_left():
    twins = Twins(accumulating(OPTIMIZERS["adamw"]))

    def backward(training):
        x, y = batch(99)
        training.own_random()
        F.cross_entropy(training.model(x), y).backward()
        training.keep_random()

    for number in range(10):
        twins.run(*batch(number), number % 3 == 2)
        twins.both(backward)
        assert_same(twins.graphs.everything(), twins.eager.everything())


# What a user changes between steps.


def test_a_scheduler_outside_is_followed_without_another_capture():
    twins = Twins(making())
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each.optimizers, 10) for each in (twins.eager, twins.graphs)
    ]
    for number in range(10):
        twins.run(*batch(number))
        for scheduler in schedulers:
            scheduler.step()
    assert twins.stats.captures == 1
    assert isinstance(twins.graphs.optimizers.param_groups[0]["lr"], float)


@pytest.mark.parametrize(("name", "value"), [("betas", (0.5, 0.9)), ("weight_decay", 0.3), ("eps", 1e-3)])
def test_a_number_that_the_optimizer_fixes_is_captured_anew(name, value):
    twins = Twins(making())
    for number in range(10):
        if number == 5:
            twins.both(lambda training: training.optimizers.param_groups[0].update({name: value}))
        twins.run(*batch(number))
    assert twins.stats.captures == 2


def test_a_cycled_momentum_is_never_stale():
    twins = Twins(making("sgd"))
    both = twins.eager, twins.graphs
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each.optimizers, 0.5, total_steps=40) for each in both]
    for number in range(24):
        twins.run(*batch(number))
        for scheduler in schedulers:
            scheduler.step()
    assert twins.stats.captures <= 1
    told = twins.stats.details[Reason.PYTHON_STATE]
    assert told.startswith("optimizers.0.param_groups.0.momentum takes new values all the time")
    for number in range(20):
        twins.run(*batch(number))
    assert twins.stats.replays >= 10, "once it stays, steps are graphs again"


step = 0


class Looping:
    """A trainer that counts in an attribute called as a method of its optimizer is."""

    def __init__(self):
        self.step = 0
        self.trained = small_model()
        self.chosen = OPTIMIZERS["sgd"](self.trained.parameters())

    def train(self, x, y):
        self.chosen.zero_grad()
        loss = F.cross_entropy(self.trained(x), y)
        loss.backward()
        self.chosen.step()
        return loss


def test_a_loops_counter_of_the_name_of_a_method_costs_no_graph(monkeypatch):
    """``for step in ...`` beside ``optimizer.step()``, as a global and as an attribute."""
    trainers = []

    def making():
        trainers.append(Looping())
        return trainers[-1].train, trainers[-1].trained, trainers[-1].chosen

    twins = Twins(making)
    for number in range(12):
        monkeypatch.setitem(globals(), "step", number)
        for each in trainers:
            each.step = number
        twins.run(*batch(number))
    assert twins.stats.replays >= 9


def test_a_loops_counter_that_the_step_reads_is_never_stale(monkeypatch):
    def making():
        trained = small_model()
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y) * (1 + step)
            loss.backward()
            chosen.step()
            return loss

        return step_fn, trained, chosen

    twins = Twins(making)
    for number in range(20):
        monkeypatch.setitem(globals(), "step", number)
        twins.run(*batch(number))
    assert twins.stats.replays == 0
    assert "step took 4 new values within 32 calls" in twins.stats.details[Reason.PYTHON_STATE]


def test_a_step_that_counts_is_told_to_count_outside():
    class Counting(Looping):
        calls, inside = 0, True

        def train(self, x, y):
            self.calls += self.inside
            return super().train(x, y)

    for inside in (True, False):
        trainers = []

        def making(trainers=trainers, inside=inside):
            trainers.append(Counting())
            trainers[-1].inside = inside
            return trainers[-1].train, trainers[-1].trained, trainers[-1].chosen

        twins = Twins(making)
        for number in range(12):
            twins.run(*batch(number))
        assert (twins.stats.replays >= 9) == (not inside)
        if inside:
            (told,) = twins.stats.failures.values()
            assert "the attribute calls of a test_a_step_that_counts" in told
            assert "Keep a number in a buffer that the forward writes in place; do all else outside" in told
            assert "AdamW" not in told, "the number is none of the optimizer's"


def test_a_value_with_three_changes_in_ten_steps_is_served():
    """docs/limits.md: only a value that is new four times within 32 calls makes calls run eagerly."""
    factors = {"loss": 1.0}

    def making():
        trained = small_model()
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y) * factors["loss"]
            loss.backward()
            chosen.step()
            return loss

        return step_fn, trained, chosen

    twins = Twins(making)
    for number in range(17):
        factors["loss"] = {7: 2.0, 10: 3.0, 13: 4.0}.get(number, factors["loss"])
        twins.run(*batch(number))
    assert Reason.PYTHON_STATE not in twins.stats.eager
    assert twins.stats.captures == 4
    assert twins.stats.replays >= 17 - 2 * 4 - 1


def test_numbers_that_change_once_an_epoch_are_captured_in_every_epoch():
    twins = Twins(making("plain sgd"), max_signatures=4)
    for epoch in range(10):
        twins.both(lambda training, rate=0.1 / (1 + epoch): training.optimizers.param_groups[0].update(lr=rate))
        for number in range(12):
            twins.run(*batch(number, rows=3 if number == 11 else 8))
    assert twins.stats.replays >= 10 * 9
    assert Reason.TOO_MANY_SIGNATURES not in twins.stats.eager


def test_a_step_that_is_dropped_gives_its_graphs_back_at_once():
    training = Training(making(), graphed=True)
    for number in range(5):
        training.step(*batch(number))
    graphs = weakref.ref(training.step._wrapped._graph_runner.builder)
    gc.collect()
    gc.disable()
    try:
        del training.step
        assert graphs() is None
    finally:
        gc.enable()


def test_states_that_are_loaded_are_used_by_the_next_step():
    twins = Twins(making())
    saved = []
    for number in range(14):
        if number == 4:
            twins.both(lambda training: saved.append((_state(training.model), _state(training.optimizers))))
        if number in (8, 10):
            for training, (model, optimizer) in zip((twins.eager, twins.graphs), saved, strict=True):
                training.model.load_state_dict(model)
                training.optimizers.load_state_dict(optimizer)
        twins.run(*batch(number))
    assert twins.stats.replays >= 4


def _state(thing):
    return copy.deepcopy(thing.state_dict())


def test_a_frozen_and_a_thawed_layer_train_as_in_eager():
    twins = Twins(making())

    def freeze(training, wanted):
        training.model[0].requires_grad_(wanted)

    twins.both(functools.partial(freeze, wanted=False))
    for number in range(12):
        if number in (5, 9):
            twins.both(functools.partial(freeze, wanted=number == 5))
        twins.run(*batch(number))


def test_a_layer_that_is_replaced_is_never_trained_stale():
    twins = Twins(making())

    def replace(training):
        torch.manual_seed(7)
        training.model[0] = nn.Linear(6, 8)
        training.optimizers.add_param_group({"params": training.model[0].parameters(), "lr": 0.05})

    for number in range(14):
        if number == 6:
            twins.both(replace)
        twins.run(*batch(number))
    assert twins.stats.replays >= 7


def test_a_model_that_is_converted_accumulates_in_its_new_precision():
    twins = Twins(making("plain sgd", lambda: nn.Linear(6, 3), to_none=False))
    for number in range(12):
        if number == 6:
            twins.both(lambda training: training.model.double())
        x, y = batch(number)
        twins.run(x.double() if number >= 6 else x, y)
    assert twins.stats.replays >= 7
    assert next(twins.graphs.model.parameters()).grad.dtype is torch.float64


def test_an_optimizer_state_that_is_replaced_is_used():
    twins = Twins(making())

    def replace(training):
        for state in training.optimizers.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    for number in range(12):
        if number == 6:
            twins.both(replace)
        twins.run(*batch(number))


def test_training_and_evaluation_mode_are_followed():
    twins = Twins(making())
    for number in range(15):
        if number in (5, 10):
            mode = number == 10
            twins.both(lambda training, mode=mode: training.model.train(mode))
        twins.run(*batch(number))


def test_a_number_in_the_closure_is_part_of_the_key():
    def make():
        trained = small_model()
        chosen = OPTIMIZERS["sgd"](trained.parameters())
        weight = 1.0

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y) * weight
            loss.backward()
            chosen.step()
            return loss

        def set_weight(value):
            nonlocal weight
            weight = value

        step_fn.set_weight = set_weight
        return step_fn, trained, chosen

    twins = Twins(make)
    for number in range(10):
        if number == 5:
            twins.both(lambda training: training.function.set_weight(0.25))
        twins.run(*batch(number))
    assert twins.stats.captures == 2


# More than one optimizer, scalers, autocast.


def test_two_optimizers_of_a_gan_step_in_turn():
    def make():
        generator, critic = nn.Linear(6, 6), nn.Linear(6, 1)
        both = nn.ModuleList([generator, critic])
        first = OPTIMIZERS["adamw"](generator.parameters())
        second = OPTIMIZERS["sgd"](critic.parameters())

        def step_fn(x, which):
            if which == "critic":
                second.zero_grad()
                loss = critic(x).mean() - critic(generator(x).detach()).mean()
                loss.backward()
                second.step()
            else:
                first.zero_grad()
                loss = -critic(generator(x)).mean()
                loss.backward(inputs=list(generator.parameters()))
                first.step()
            return loss

        return step_fn, both, [first, second]

    twins = Twins(make)
    for number in range(20):
        twins.run(batch(number)[0], "critic" if number % 3 else "generator")
    assert twins.stats.captures >= 2


@pytest.mark.proofs
@pytest.mark.parametrize("unscale", [True, False])
def test_a_gradient_scaler_grows_and_skips_as_in_eager(unscale):
    twins = Twins(scaling(OPTIMIZERS["adamw"], unscale=unscale))
    for number in range(14):
        x, y = batch(number)
        if number in (6, 10):
            x[0, 0] = torch.inf
        twins.run(x, y)
    assert twins.stats.replays >= 10


def test_autocast_around_the_step_casts_the_weights_of_every_step():
    def make():
        shared = nn.Linear(6, 6)
        head = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"]([*shared.parameters(), *head.parameters()])

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(head(shared(shared(x))), y)
            loss.backward()
            chosen.step()
            return loss

        return step_fn, nn.ModuleList([shared, head]), chosen

    twins = Twins(make)
    for number in range(8):
        for each in (twins.eager, twins.graphs):
            with torch.autocast("cpu", torch.bfloat16):
                each.last = each.run(*batch(number))
        assert_same(twins.graphs.last, twins.eager.last)
    assert twins.stats.replays >= 5
    twins.run(*batch(9))  # without: another graph


# What cannot be captured runs eagerly, says so, and trains on right.


def refused(twins, *, reason=Reason.CAPTURE_FAILED, steps=6):
    for number in range(steps):
        twins.run(*batch(number))
    assert twins.stats.replays == 0
    assert twins.stats.eager[reason] >= 1
    return " ".join([*twins.stats.failures.values(), *twins.stats.details.values()])


def altered(change, optimizer="adamw"):
    def make():
        trained = small_model()
        chosen = OPTIMIZERS[optimizer](trained.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(chosen, 2)
        things = {"model": trained, "optimizer": chosen, "scheduler": scheduler, "count": 0}

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y)
            loss.backward()
            chosen.step()
            change(things, loss)
            return loss

        return step_fn, trained, chosen

    return make


def test_a_step_that_reads_its_loss_back_names_the_line():
    said = refused(Twins(altered(lambda things, loss: loss.item())))
    assert "item" in said
    assert "test_train_step.py" in said


def test_a_step_that_keeps_its_loss_as_a_number_names_the_place():
    said = refused(Twins(altered(lambda things, loss: things.update(last=loss.item()))))
    assert "things" in said


def test_a_step_that_counts_in_python_is_refused_by_name():
    change = altered(lambda things, loss: things.update(count=things["count"] + 1))
    assert "`things.count` whenever it runs" in refused(Twins(change))


def test_a_method_of_a_trainer_is_a_step_and_what_it_counts_is_named():
    class Trainer:
        def __init__(self, *, counts):
            self.model = small_model()
            self.optimizer = OPTIMIZERS["adamw"](self.model.parameters())
            self.counts, self.count = counts, 0

        def loss(self, x, y):
            return F.cross_entropy(self.model(x), y)

        def step(self, x, y):
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            self.optimizer.step()
            if self.counts:
                self.count += 1
            return loss

    for counts in (False, True):

        def make(counts=counts):
            trainer = Trainer(counts=counts)
            return trainer.step, trainer.model, trainer.optimizer

        twins = Twins(make)
        for number in range(8):
            twins.run(*batch(number))
        assert twins.stats.replays == (0 if counts else 6)
        assert twins.graphs.function.__self__.count == (8 if counts else 0)
        if counts:
            (failure,) = twins.stats.failures.values()
            assert re.search(r"the attribute count of a .*Trainer whenever it runs", failure)


def test_a_scheduler_inside_the_step_is_refused_by_name():
    def make():
        step_fn, trained, chosen = making()()
        scheduler = torch.optim.lr_scheduler.StepLR(chosen, 2)

        def scheduled(x, y):
            loss = step_fn(x, y)
            scheduler.step()
            return loss

        return scheduled, trained, chosen

    assert "StepLR" in refused(Twins(make), reason=Reason.UNTRAINABLE)


def test_a_scheduler_that_the_code_does_not_name_is_found_when_it_steps():
    said = refused(Twins(altered(lambda things, loss: things["scheduler"].step())), reason=Reason.UNTRAINABLE)
    assert "scheduler.step() outside" in said


def test_a_hook_that_reads_back_is_refused():
    def make():
        step_fn, trained, chosen = making()()
        next(trained.parameters()).register_hook(lambda gradient: gradient * float(gradient.sum() > 0))
        return step_fn, trained, chosen

    refused(Twins(make))


def test_a_capture_that_fails_in_the_middle_loses_no_step():
    twins = Twins(altered(lambda things, loss: loss.item() if things["model"].training else None))
    twins.both(lambda training: training.model.eval())
    for number in range(12):
        if number == 6:
            twins.both(lambda training: training.model.train())
        twins.run(*batch(number))
    assert twins.stats.failures


def test_a_step_under_no_grad_is_eagers():
    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x):
            return trained(x).sum()

        return step_fn, trained, chosen

    twins = Twins(make)
    with torch.no_grad():
        for number in range(4):
            twins.run(batch(number)[0])
    assert twins.stats.eager == {Reason.UNTRAINABLE: 4}


def test_the_loss_is_detached():
    training = Training(making(), graphed=True)
    for number in range(4):
        loss = training.step(*batch(number))
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()


def test_new_shapes_at_every_step_are_bounded_and_said():
    twins = Twins(making(), max_signatures=4)
    for number in range(10):
        twins.run(*batch(number, rows=4 + number))
    assert twins.stats.captures == 0
    assert twins.stats.eager[Reason.TOO_MANY_SIGNATURES] >= 5


# Proofs.


@pytest.mark.proofs
def test_a_number_that_changes_at_every_step_is_eagers_and_never_trained_twice():
    def make():
        trained = small_model()
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x, y, weight):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y) * weight
            loss.backward()
            chosen.step()
            return loss

        return step_fn, trained, chosen

    twins = Twins(make, max_signatures=5)
    for number in range(10):
        twins.run(*batch(number), 1.0 + number / 10)
    assert twins.stats.eager == {Reason.FIRST_CALL: 5, Reason.TOO_MANY_SIGNATURES: 5}
    twins = Twins(make)
    for number in range(10):
        twins.run(*batch(number), torch.tensor(1.0 + number / 10))
    assert twins.stats.replays == 7


@pytest.mark.proofs
def test_what_is_no_optimizer_or_step_is_refused_at_once():
    with pytest.raises(sg.ConfigError, match="optimizers has"):
        sg.train_step(lambda x: x, optimizers=nn.Linear(1, 1))
    with pytest.raises(sg.ConfigError, match="train_step got"):
        sg.train_step(3, optimizers=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


class WrappingOptimizer(torch.optim.Optimizer):
    """As accelerate's: it has no state and no hooks of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_an_optimizer_that_wraps_another_is_refused_with_what_to_pass():
    wrapping = WrappingOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(sg.ConfigError, match=r"a WrappingOptimizer, .* Expected the optimizer that it wraps"):
        sg.train_step(lambda x: x, optimizers=wrapping)


def test_the_decorator_is_the_same():
    model = nn.Linear(6, 3)
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    @sg.train_step(optimizers=optimizer, verify=0)
    def step(x, y):
        """Train."""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [float(step(*batch(0))) for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    assert step.graph_stats.replays == 6
    assert step.__doc__ == "Train."


def test_a_parameter_that_nothing_leads_to_is_found_by_its_gradient():
    hidden = {}

    class Holder:
        __slots__ = ("model",)

    def make():
        holder = Holder()
        holder.model = nn.Linear(6, 6)
        hidden[len(hidden)] = holder
        key = len(hidden) - 1
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(hidden[key].model(x)), y)
            loss.backward()
            chosen.step()
            return loss

        return step_fn, nn.ModuleList([trained, holder.model]), chosen

    twins = Twins(make)
    for number in range(9):
        twins.run(*batch(number, rows=8 if number % 2 else 4))


def test_capturing_from_an_example_would_train_on_it_and_is_refused():
    step = Training(making(), graphed=True).step
    with pytest.raises(sg.ConfigError, match="first calls are real steps"):
        step.capture_graphs(*batch(0))


def averaged(update):
    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())
        average = torch.optim.swa_utils.AveragedModel(trained, avg_fn=None)
        shadow = [parameter.detach().clone() for parameter in trained.parameters()]

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y)
            loss.backward()
            chosen.step()
            update(trained, average, shadow)
            return loss

        model = nn.ModuleList([trained, average])
        for index, tensor in enumerate(shadow):
            model.register_buffer(f"shadow{index}", tensor)
        return step_fn, model, chosen

    return make


def test_moving_averages_of_weights_move_once_a_step():
    def update(trained, average, shadow):
        with torch.no_grad():
            torch._foreach_lerp_(shadow, list(trained.parameters()), 0.1)

    twins = Twins(averaged(update))
    for number in range(8):
        twins.run(*batch(number))
    assert twins.stats.replays == 6


def test_the_host_test_of_an_averaged_model_is_refused_by_name():
    said = refused(Twins(averaged(lambda trained, average, shadow: average.update_parameters(trained))))
    assert "read back" in said


@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointed_activations_train_as_in_eager(preserve):
    def make():
        first, second = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3 if preserve else 0.0)), nn.Linear(8, 3)
        chosen = OPTIMIZERS["adamw"]([*first.parameters(), *second.parameters()])

        def step_fn(x, y):
            chosen.zero_grad()
            hidden = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False, preserve_rng_state=preserve)
            loss = F.cross_entropy(second(hidden), y)
            loss.backward()
            chosen.step()
            return loss

        return step_fn, nn.ModuleList([first, second]), chosen

    twins = Twins(make)
    for number in range(8):
        twins.run(*batch(number))
    assert bool(twins.stats.replays) is not preserve


def test_tensors_and_dicts_that_a_step_returns_come_back():
    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x, y, *, weight):
            chosen.zero_grad()
            logits = trained(x)
            loss = F.cross_entropy(logits, y) * weight
            loss.backward()
            chosen.step()
            return {"loss": loss, "logits": logits}

        return step_fn, trained, chosen

    twins = Twins(make)
    for number in range(8):
        x, y = batch(number)
        results = [each.step(x, y, weight=torch.tensor(0.5)) for each in (twins.eager, twins.graphs)]
        assert torch.equal(results[0]["loss"], results[1]["loss"])
        assert torch.equal(results[0]["logits"], results[1]["logits"])
        assert not results[1]["logits"].requires_grad
        assert_same(twins.graphs.everything(), twins.eager.everything())
    assert twins.stats.replays == 6


def test_a_step_without_arguments_reads_the_buffers_that_it_reaches():
    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())
        x, y = (tensor.clone() for tensor in batch(0))

        def step_fn():
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y)
            loss.backward()
            chosen.step()
            return loss

        step_fn.buffers = x, y
        return step_fn, trained, chosen

    twins = Twins(make)
    for number in range(8):
        new = batch(number)
        twins.both(lambda training, new=new: [a.copy_(b) for a, b in zip(training.function.buffers, new, strict=True)])
        twins.run()
    assert twins.stats.replays == 6


def test_sparse_gradients_run_eagerly():
    def make():
        table = nn.Embedding(10, 3, sparse=True)
        chosen = OPTIMIZERS["plain sgd"](table.parameters())

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(table(y), y)
            loss.backward()
            chosen.step()
            return loss

        return step_fn, table, chosen

    training = Training(make, graphed=True)
    before = training.model.weight.detach().clone()
    for number in range(5):
        training.step(*batch(number))
    assert training.step.graph_stats.replays == 0
    assert not torch.equal(training.model.weight, before)


def test_an_argument_that_wants_a_gradient_gets_it_from_eager():
    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x):
            chosen.zero_grad()
            loss = trained(x).square().sum()
            loss.backward()
            chosen.step()
            return loss

        return step_fn, trained, chosen

    training = Training(make, graphed=True)
    for number in range(5):
        x = batch(number)[0].requires_grad_()
        training.step(x)
        assert x.grad is not None
    assert training.step.graph_stats.eager == {Reason.GRAD: 5}


@pytest.mark.parametrize("name", ["LBFGS", "Adagrad", "RAdam", "Adam"])
def test_an_optimizer_that_no_graph_can_hold_is_named_with_what_would_do(name):
    def make():
        trained = nn.Linear(6, 3)
        chosen = getattr(torch.optim, name)(trained.parameters(), lr=0.01)

        def step_fn(x, y):
            def closure():
                chosen.zero_grad()
                loss = F.cross_entropy(trained(x), y)
                loss.backward()
                return loss

            return chosen.step(closure)

        return step_fn, trained, chosen

    if torch.cuda.is_available():
        pytest.skip("these have capturable=True on a GPU")
    trainings = [Training(make, graphed=graphed) for graphed in (False, True)]
    for number in range(4):
        losses = [each.step(*batch(number)) for each in trainings]
        assert torch.equal(losses[0].detach(), losses[1])
    assert trainings[1].step.graph_stats.eager == {Reason.UNTRAINABLE: 4}
    assert name in trainings[1].step.graph_stats.details[Reason.UNTRAINABLE]


def test_a_step_that_leaves_backward_to_the_caller_says_so():
    model = nn.Linear(6, 3)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = sg.train_step(lambda x, y: F.cross_entropy(model(x), y), optimizers=optimizer)
    with pytest.raises(sg.InputError, match=r"neither backward.*inside of the step"):
        step(*batch(0))


def test_a_scaler_with_an_optimizer_that_is_not_fused_is_refused_by_name():
    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["plain sgd"](trained.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def step_fn(x, y):
            chosen.zero_grad()
            scaler.scale(F.cross_entropy(trained(x), y)).backward()
            scaler.step(chosen)
            scaler.update()

        return step_fn, trained, chosen, scaler

    assert "fused=True" in refused(Twins(make), reason=Reason.UNTRAINABLE)


def test_a_capture_that_fails_between_a_scalers_calls_puts_the_scaler_back():
    def read_first(scaler, loss):
        loss.item()
        scaler.update()

    said = refused(Twins(scaling(OPTIMIZERS["adamw"], growth=2, end=read_first)))
    assert "loss.item()" in said


def test_a_scaler_that_is_updated_outside_is_refused():
    twins = Twins(scaling(OPTIMIZERS["adamw"], unscale=False, growth=2, end=lambda scaler, loss: None))
    for number in range(6):
        twins.run(*batch(number))
        twins.both(lambda training: training.scaler.update())
    assert twins.stats.replays == 0
    assert "update()" in " ".join(twins.stats.failures.values())


def test_parameters_on_two_devices_run_eagerly():
    def make():
        step_fn, trained, chosen = making("sgd", lambda: nn.Linear(6, 3))()
        chosen.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
        return step_fn, trained, chosen

    training = Training(make, graphed=True)
    for number in range(4):
        training.step(*batch(number))
    assert training.step.graph_stats.eager == {Reason.WRONG_DEVICE: 4}


@pytest.mark.proofs
@pytest.mark.parametrize("settings", [{}, {"verify": 1}])
def test_more_state_than_a_proof_copies_is_unverified_unless_asked_for(monkeypatch, settings):
    for module in ("call.external_memory", "call.rehearsals", "serve.builder"):
        monkeypatch.setattr(f"simplegraph.{module}.copy_limit", lambda free: 64)
    twins = Twins(making(), **settings)
    for number in range(6):
        twins.run(*batch(number))
    proof = next(iter(twins.stats.graphs.values())).proof
    assert proof == "exact" if settings else proof.startswith("unverified")


def test_a_learning_rate_that_is_a_tensor_on_the_cpu_is_followed():
    def make():
        trained = nn.Linear(6, 3)
        rate = torch.tensor(0.1)
        chosen = torch.optim.SGD(trained.parameters(), lr=rate, fused=True)

        def step_fn(x, y):
            chosen.zero_grad()
            loss = F.cross_entropy(trained(x), y)
            loss.backward()
            chosen.step()
            return loss

        return step_fn, trained, chosen

    twins = Twins(make)
    for number in range(12):
        twins.both(lambda training: training.optimizers.param_groups[0]["lr"].mul_(0.9))
        twins.run(*batch(number))
    assert twins.stats.captures == 1
    assert twins.stats.replays == 10


@pytest.mark.parametrize("settings", [{"debug": True}, {"outputs": "static"}])
def test_settings_of_modules_hold_for_steps(settings):
    twins = Twins(making(), **settings)
    for number in range(8):
        twins.run(*batch(number, rows=8 if number % 3 else 5))
    assert twins.stats.replays >= 4


def test_a_step_shares_its_pool_with_no_other():
    """Gradients lie there from one step to the next."""
    with pytest.raises(sg.ConfigError, match="pool of its own"):
        Training(making(), graphed=True).step.use_graph_pool(sg.graph_pool("cpu"))


def test_a_step_that_makes_a_leaf_of_its_own_is_captured_and_keeps_none_of_them():
    """Forces and penalties on input gradients do; the loss comes back attached to that leaf."""

    def make():
        trained = nn.Linear(6, 3)
        chosen = OPTIMIZERS["sgd"](trained.parameters())

        def step_fn(x):
            chosen.zero_grad()
            leaf = x.clone().requires_grad_()
            energy = trained(leaf).square().mean() * 0.1
            (force,) = torch.autograd.grad(energy, leaf, create_graph=True)
            loss = force.square().mean() + energy
            loss.backward()
            chosen.step()
            return loss

        return step_fn, trained, chosen

    twins = Twins(make)
    for number in range(8):
        x, _ = batch(number)
        results = [each.step(x) for each in (twins.eager, twins.graphs)]
        assert torch.equal(results[0].detach(), results[1].detach())
        assert_same(twins.graphs.everything(), twins.eager.everything())
    assert twins.stats.replays >= 5
    assert twins.graphs.step._wrapped.step.discovered_parameters == []


def reading_python_data(*, read_weights=False):
    """Make training steps that read back a number of Python's from a tensor of it, or one of a weight."""

    def make():
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

        def step_fn(x, y):
            limit = torch.as_tensor(2.0, device=x.device)
            scale = 3.0 if (limit > 1.0).any() else 1.0
            if read_weights and bool(model[0].weight.sum() > 1e3):
                scale = 0.0
            optimizer.zero_grad()
            loss = scale * F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step_fn, model, optimizer

    return make


def test_a_step_reads_back_python_data_but_no_weight():
    twins = Twins(reading_python_data())
    for number in range(6):
        twins.run(*batch(number))
    assert twins.stats.replays >= 3
    twins = Twins(reading_python_data(read_weights=True))
    for number in range(4):
        twins.run(*batch(number))
    assert twins.stats.replays == 0
