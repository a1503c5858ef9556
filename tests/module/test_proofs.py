"""The first replay of each batch size, and some later ones, are compared with eager: nothing is wrong in silence."""

from __future__ import annotations

import concurrent.futures
import copy
import ctypes

import pytest
import torch
import torch.nn.functional as F
from run_log import run_log, unwatched
from torch import nn

import simplegraph as sg
from simplegraph.device import saved_state
from simplegraph.device.select import graph_device
from simplegraph.manager import table
from simplegraph.serve import call_proof as proofs_of_calls
from tests.module.answers import reasons

WIDTH = 6

pytestmark = [pytest.mark.usefixtures("nothing_left_behind"), pytest.mark.proofs]


class Function(nn.Module):
    """Runs a function of itself and the arguments, and counts the runs where no capture or proof can see it."""

    def __init__(self, function):
        super().__init__()
        runs = ctypes.c_long()  # Python state that grows would be a reason to run eagerly

        def count():
            runs.value += 1
            return runs.value

        self.count = count
        self.num_runs = lambda: runs.value
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("state", torch.zeros(8, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, *args, **kwargs):
        self.count()
        return self.function(self, *args, **kwargs)


def graphed(device, function, **settings):
    module = function if isinstance(function, nn.Module) else Function(function)
    settings = {"capture_sizes": [4, 8], "progress": False, "batch_dims": {"args": 0}} | settings
    return sg.wrap(module.to(device).eval(), **settings)


def rows(count, device):
    return torch.randn(count, WIDTH, device=device)


def proofs(model):
    return {graph.size: graph.proof for graph in model.graph_stats.graphs.values()}


class Twins:
    """A model with graphs and a copy without; every call of both must return and leave the same."""

    def __init__(self, device, function, **settings):
        self.model = graphed(device, function, **settings)
        self.eager = Function(function).to(device).eval()
        self.eager.load_state_dict(self.model.state_dict())
        self.device = device

    def capture(self, size=8):
        self.model.capture_graphs(rows(size, self.device))
        self.eager.load_state_dict(self.model.state_dict())

    def call(self, *sizes, make=rows):
        for size in sizes:
            x = make(size, self.device)
            y = x.clone()
            torch.manual_seed(size)
            actual = self.model(x)
            drawn = torch.rand(3, device=self.device)
            torch.manual_seed(size)
            torch.testing.assert_close(actual, self.eager(y))
            assert torch.equal(drawn, torch.rand(3, device=self.device))
            assert torch.equal(x, y)
            for name, tensor in self.model.state_dict().items():
                torch.testing.assert_close(tensor, self.eager.state_dict()[name])


def accumulate(m, x):
    m.steps += 1
    m.state[:1].add_(x.sum(1).amax() * 0 + 1)
    return x @ m.weight * m.steps


def test_each_call_runs_the_forward_once_and_state_is_eagers(device):
    twins = Twins(device, accumulate, padding=False)
    for turn in range(1, 7):
        twins.call(4)
        assert twins.eager.num_runs() == turn
    assert twins.model.num_runs() == 3  # the first call, the capture, and the call that proves it
    assert reasons(twins.model) == {"first_call": 1, "proof": 1}
    assert proofs(twins.model) == {4: "exact"}


def test_after_capture_graphs_the_first_call_of_each_batch_size_proves_it(device):
    twins = Twins(device, lambda m, x: (x @ m.weight).relu())
    twins.capture()
    twins.call(4, 4, 3, 2, 8, 7, 5, 8, 2, 5, 3)
    assert proofs(twins.model) == {4: "exact, padded", 8: "exact, padded"}
    assert reasons(twins.model) == {"proof": 6}
    assert twins.model.graph_stats.replays == 5


BY_COUNT = {
    "squeezed": (lambda m, x: (x @ m.weight).squeeze(), (4, 4, 3, 3, 3, 1, 1, 3)),
    "one count": (lambda m, x: x * (2 if len(x) == 6 else 1), (8, 8, 5, 5, 5, 6, 6, 5)),
    "few": (lambda m, x: x * (2 if len(x) <= 2 else 1), (4, 4, 3, 3, 3, 2, 2, 1)),
    "odd": (lambda m, x: x * (2 if len(x) % 2 else 1), (8, 8, 6, 6, 6, 5, 5, 7)),
    "hardly else": (lambda m, x: x + x.tanh() * 2e-3 if len(x) % 2 else x * 1, (8, 8, 6, 6, 6, 5, 5, 7)),
    "structure": (lambda m, x: (x, x * 2) if len(x) == 6 else [x, x * 2], (8, 8, 7, 7, 7, 6, 6, 7)),
    "another output": (lambda m, x: (x, x + 1, x)[: 2 + (len(x) == 6)], (8, 8, 7, 7, 7, 6, 6, 7)),
    "written": (lambda m, x: (m.steps.add_(1 if len(x) == 6 else 0), x * 2)[1], (8, 8, 5, 5, 5, 6, 6, 5)),
}


@pytest.mark.parametrize("name", BY_COUNT)
def test_a_forward_that_does_something_else_for_some_number_of_rows_is_right_at_each(device, name):
    function, sizes = BY_COUNT[name]
    model = graphed(device, function)
    eager = copy.deepcopy(sg.unwrap(model))
    for size in sizes:
        x = rows(size, device)
        actual, expected = model(x), eager(x)
        assert type(actual) is type(expected)
        torch.testing.assert_close(actual, expected)
        assert torch.equal(model.steps, eager.steps)
    assert reasons(model)["padding_shows"] > 0


def test_a_capture_again_proves_its_graph_once_and_goes_on_with_batch_sizes_proven_before(device):
    twins = Twins(device, lambda m, x: (x @ m.weight).relu())
    twins.call(4, 4, 3, 3, 2, 1, 4, 3, 2, 1)
    assert reasons(twins.model)["proof"] == 4
    for module in (twins.model, twins.eager):
        module.weight.data = torch.eye(WIDTH, device=device) * 2
    twins.call(4, 4, 3, 2, 1)
    assert reasons(twins.model)["proof"] == 5
    assert twins.model.graph_stats.recaptures == 1
    twins.model.reset_graphs()
    twins.call(4, 4, 3, 3, 2)
    assert reasons(twins.model)["proof"] == 8  # nothing is known any more


def count_rows(m, x):
    return x / torch.ones_like(x[:, 0]).sum()


def spread(m, x):
    return x + torch.linspace(0, 1, len(x), device=x.device, dtype=x.dtype)[:, None]


def spread_little(m, x):
    """The first row alone has the same position in any batch: half of three rows is two."""
    return x.sigmoid() + 0.3 * torch.linspace(0, 1, len(x), device=x.device, dtype=x.dtype)[:, None]


@pytest.mark.parametrize(
    ("function", "dtype", "few", "many"),
    [
        (count_rows, torch.bfloat16, 60, 64),
        (count_rows, torch.float32, 255, 256),
        (spread, torch.bfloat16, 15, 16),
        (spread_little, torch.bfloat16, 3, 4),
    ],
    ids=["count in bfloat16", "count in float32", "positions in bfloat16", "positions of three rows"],
)
def test_a_count_of_rows_that_rounding_would_hide_is_told_by_half_of_them(device, function, dtype, few, many):
    model = graphed(device, function, capture_sizes=[many])
    for size in (many, many, few, few, few):
        x = torch.randn(size, WIDTH, device=device, dtype=dtype)
        assert torch.equal(model(x), function(None, x))
    assert reasons(model)["padding_shows"] > 0


def test_a_tensor_replaced_in_a_closure_by_less_than_rounding_is_found_by_a_padded_call_alone(device):
    scale = [torch.ones(1, device=device)]
    model = graphed(device, lambda m, x: x * scale[0], capture_sizes=[8])
    model.capture_graphs(rows(8, device))
    scale[0] = torch.full((1,), 1.001, device=device)  # between the capture and the first replay
    for _ in range(2):
        x = rows(7, device)
        assert torch.equal(model(x), x * scale[0])
    assert model.graph_stats.replays == 0


def test_what_the_further_runs_of_a_padded_proof_do_is_taken_back(device):
    log = run_log()  # Python state that grows would be a reason to run eagerly

    def forward(m, x):
        log(len(x))
        m.steps += 1
        m.known[len(x)] = m.named["last"] = None
        m.tensors[len(x)] = m.tensors.get(len(x), x.new_ones(1))
        return x * 2 + m.steps * 0

    model = graphed(device, forward, capture_sizes=[8])
    model.known, model.named, model.tensors = {}, {}, {}
    for size in (8, 8, 7, 6, 7):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
    assert [size for (size,) in log()] == [8, 8, 8, 7, 6, 3, 7]  # the second in a capture, and 3 rows as the half of 6
    assert model.steps == 5
    assert model.known.keys() == model.tensors.keys() == {8, 7, 6}
    assert proofs(model) == {8: "exact, padded"}


def batch_statistics(m, x):
    return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda m, x: x - x.mean(0),
        batch_statistics,
        lambda m, x: x / x.shape[0],
        lambda m, x: (x @ m.weight).softmax(0),
        lambda m, x: x - x.flip(0),
        lambda m, x: x[:, 0].argsort(),
    ],
    ids=["mean", "batch statistics", "divided by rows", "softmax over rows", "flipped", "order"],
)
@pytest.mark.parametrize("upfront", [True, False], ids=["upfront", "lazy"])
def test_a_forward_that_mixes_rows_is_right_at_every_call_and_says_why_it_is_not_padded(device, mixing, upfront):
    twins = Twins(device, mixing)
    if upfront:
        twins.capture()
    twins.call(4, 3, 2, 3, 4, 4, 5, 7, 8, 8, 6, 3, 4)
    assert reasons(twins.model)["padding_shows"] >= 2
    assert twins.model.graph_stats.replays > 0  # exact sizes are graphs all the same


def test_one_warning_tells_what_differed_and_what_to_do(device, caplog):
    twins = Twins(device, lambda m, x: x - x.mean(0))
    twins.capture()
    twins.call(3, 2, 5, 3, 7, 6)
    said = [record.getMessage() for record in caplog.records if "padding" in record.getMessage()]
    assert "output 0 differs by up to" in said[0]
    assert "padding=False" in said[0]
    assert sum("changes the answer" in text for text in said) == 1


def test_an_lstm_over_the_batch_and_a_pooled_embedding_are_right(device):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, 5)  # dimension 0 is time

        def forward(self, x):
            return self.lstm(x)[0][-1:]

    model = graphed(device, Sequence(), batch_dims={"x": 0})
    model.capture_graphs(rows(8, device))
    for size in (3, 5, 8, 8, 2, 4):
        x = rows(size, device)
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-4, atol=1e-5)
    assert reasons(model)


def test_padding_that_writes_memory_of_the_module_is_refused(device):
    def slots(m, x, slot):
        m.state.index_copy_(0, slot, x)  # padding writes slot 0
        return x * 2

    model = graphed(device, slots)
    eager = Function(slots).to(device)
    model.capture_graphs(rows(8, device), torch.arange(8, device=device))
    model.state.zero_()
    eager.load_state_dict(model.state_dict())
    for step in range(6):
        x, slot = rows(3, device), torch.tensor([4, 5, 0 if step % 2 else 7], device=device)
        assert torch.equal(model(x, slot), eager(x, slot))
        assert torch.equal(model.state, eager.state)
    assert reasons(model)["padding_shows"] >= 1


def test_a_proof_fills_no_memory_with_values_that_it_never_had(device, monkeypatch):
    """Another thread, or a hook, may read it meanwhile."""

    def slots(m, x, slot):
        m.state.index_copy_(0, slot, x)
        m.scale.mul_(2)
        return x * m.scale[0]

    seen, allowed = [], []
    replay = table.ProgramTable.replay

    def watched(self, graph):
        seen.extend((model.state.clone(), model.scale.clone()))
        replay(self, graph)

    model = graphed(device, slots)
    model.scale = torch.ones(2, device=device)
    model.capture_graphs(rows(8, device), torch.arange(8, device=device))
    monkeypatch.setattr(table.ProgramTable, "replay", watched)
    model.state.zero_()
    for slot in ([4, 5, 7], [4, 5, 0], [1, 2, 3, 4], [4, 5, 6]):
        allowed += [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *model.state.flatten().tolist()]
        model(rows(len(slot), device), torch.tensor(slot, device=device))
        allowed += model.state.flatten().tolist()
    assert {value for tensor in seen for value in tensor.flatten().tolist()} <= {*allowed}


@pytest.mark.parametrize(
    "write",
    {
        "zeros": lambda m, x, slot: m.state.index_copy_(0, slot, x * 0),
        "ones over ones": lambda m, x, slot: m.state.index_fill_(0, slot, 1.0),
        "a part": lambda m, x, slot: m.state[: len(x)].fill_(1.0),
        "counts": lambda m, x, slot: m.steps.view(1).index_add_(0, slot * 0, torch.ones_like(slot) * 0),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_padding_may_write_unseen_is_not_padded_and_is_named(device, write, caplog):
    def forward(m, x, slot):
        write[1](m, x, slot)
        return x * 2

    model = graphed(device, forward)
    model.capture_graphs(rows(8, device), torch.arange(8, device=device))
    model.state.fill_(float(write[0] != "zeros"))
    for size in (3, 3, 4, 4):
        slot = torch.arange(8 - size, 8, device=device)
        before = model.state.clone()
        x = rows(size, device)
        assert torch.equal(model(x, slot), x * 2)
        assert torch.equal(model.state[0], before[0])
    assert reasons(model)["padding_shows"] == 1
    assert model.graph_stats.replays == 1  # of the exact size
    name = "steps" if write[0] == "counts" else "state"
    assert f"padding 3 rows to 4 may change the answer: {name} is written in part" in caplog.text


@pytest.mark.parametrize("remedy", [{"padding": False}, {"pad_values": {"args.0": 0}}], ids=str)
def test_the_remedies_for_memory_that_is_written_in_part_work(device, remedy):
    def forward(m, x):
        m.state[1] = x[0]
        return x * 2

    assert sg.check(Function(forward).to(device).eval(), rows(5, device)).rows_independent
    model = graphed(device, forward, **remedy)
    for size in (4, 4, 3, 3, 3, 4, 8, 8, 8):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
        assert torch.equal(model.state[1], x[0])
    assert "padding_shows" not in reasons(model)
    assert ("padded" in proofs(model)[4]) is ("pad_values" in remedy)


def test_memory_that_is_written_as_a_whole_is_padded_although_some_of_it_stays_the_same(device):
    free = torch.zeros(2, WIDTH, device=device)

    def shift(m, x):
        m.state.copy_(m.state.roll(1, 0))
        free.mul_(2)
        m.steps.add_(0)
        return x * 2

    model = graphed(device, shift)
    model.state[0] = 1.0
    for size in (4, 3, 3, 3, 3, 4, 4):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
    assert model.state.argmax(0)[0] == 7
    assert proofs(model)[4] == "padded, exact"


def test_a_declared_pad_rule_may_write_memory_of_the_module(device):
    def slots(m, x, slot):
        m.state.index_copy_(0, slot, x)
        return x * 2

    model = graphed(device, slots, pad_values={"args.1": 7})  # slot 7 is for padding
    model.capture_graphs(rows(8, device), torch.arange(8, device=device))
    for _ in range(4):
        x, slot = rows(3, device), torch.tensor([4, 5, 0], device=device)
        assert torch.equal(model(x, slot), x * 2)
        assert torch.equal(model.state[slot], x)
    assert proofs(model)[4] == "padded"
    assert model.graph_stats.replays == 3


def test_frozen_python_state_is_found_and_the_size_runs_eagerly(device, caplog):
    scale = unwatched(value=1.0)
    twins = Twins(device, lambda m, x: x * scale().value)
    twins.call(4, 4)
    twins.call(8)
    scale().value = 3.0
    twins.model.reset_graphs()
    twins.model.capture_graphs(rows(8, device))
    scale().value = 5.0  # between the capture and the first replay
    twins.call(8, 8, 4, 4)
    assert twins.model.graph_stats.replays == 0
    assert reasons(twins.model)["capture_failed"] == 2
    assert "does not equal eager" in caplog.text


@pytest.mark.parametrize("written", ["first", "second", "spread", "foreign"])
def test_a_wrong_write_to_any_part_of_one_buffer_is_found(device, written):
    step = unwatched(value=1.0)

    flat, other = torch.zeros(3 * WIDTH, device=device), torch.zeros(2 * WIDTH, device=device)
    parts = {"first": flat[:WIDTH], "second": flat[WIDTH:-WIDTH], "spread": flat[-WIDTH:].expand(2, WIDTH)}
    read, parts["foreign"] = other.chunk(2)  # in a closure, which nothing watches

    def count(m, x):
        y = x * 2 + read
        parts[written][0] += step().value
        return y

    model = graphed(device, count)
    model.first, model.second, model.spread = list(parts.values())[:3]
    model.capture_graphs(rows(4, device))
    flat.zero_()
    other.zero_()
    step().value = 2.0  # between the capture and the first replay
    for _ in range(3):
        model(rows(4, device))
    assert parts[written].max() == 6
    assert model.graph_stats.replays == 0


def test_memory_that_is_viewed_in_several_dtypes_is_padded(device):
    def count(m, x):
        m.part += 1
        return x * 2 + m.part[0]

    model = graphed(device, count)
    model.flat = torch.zeros(16, device=device)
    model.half, model.part, model.whole = model.flat.view(torch.bfloat16), model.flat[4:8], model.flat.view(4, 4).t()
    for step in range(6):
        x = rows(3 if step > 1 else 4, device)
        assert torch.equal(model(x), x * 2 + (step + 1))
    assert proofs(model)[4] == "exact, padded"


def test_configured_to_raise_a_difference_is_an_error(device):
    model = graphed(device, lambda m, x: x - x.mean(0), on_capture_failure="raise")
    model.capture_graphs(rows(8, device))
    with pytest.raises(sg.VerificationError, match="padding 3 rows to 4 changes the answer"):
        model(rows(3, device).abs() + 1)
    x = rows(3, device)
    torch.testing.assert_close(model(x), x - x.mean(0))


def test_random_numbers_are_eagers_and_nothing_that_draws_is_padded(device):
    twins = Twins(device, lambda m, x: x + torch.rand_like(x))
    twins.call(4, 4, 4, 3, 3, 2, 8, 8, 8, 4)
    assert reasons(twins.model)["size_not_captured"] == 3
    assert twins.model.graph_stats.replays > 1


def test_an_input_that_is_written_is_written_once(device):
    def step(m, x, state):
        state.add_(x)
        return state * 2

    model = graphed(device, step)
    state, expected = torch.zeros(4, WIDTH, device=device), torch.zeros(4, WIDTH, device=device)
    for _ in range(6):
        x = rows(4, device)
        expected += x
        assert torch.equal(model(x, state), expected * 2)
        assert torch.equal(state, expected)
    assert proofs(model) == {4: "exact"}


def test_static_outputs_and_inputs_in_place_are_proven_too(device):
    twins = Twins(device, lambda m, x: x @ m.weight, outputs="static")
    twins.capture()
    static = twins.model.static_inputs(3)["args.0"]
    addresses = set()
    for _ in range(4):
        x = rows(3, device)
        static.copy_(x)
        result = twins.model(static)
        torch.testing.assert_close(result, x @ twins.model.weight)
        addresses.add(result.data_ptr())
    assert len(addresses) == 1
    assert proofs(twins.model)[4] == "padded"


def test_breaks_run_once_a_call_and_their_results_are_played_back(device):
    seen = []

    @sg.eager_break
    def attend(x, cache):
        seen.append(x.shape[0])
        cache[: x.shape[0]] += x
        return x * 2, cache[: x.shape[0]].clone()

    def forward(m, x):
        one, other = attend(x @ m.weight, m.state)
        return (one + other).relu()

    twins = Twins(device, forward, mode="PIECEWISE")
    twins.capture()
    runs = len(seen)
    twins.call(4, 4, 3, 8, 8, 6, 5)
    assert len(seen) == runs + 2 * 7  # the twin's calls, too
    assert proofs(twins.model) == {4: "exact, padded", 8: "exact, padded"}


def test_an_error_in_the_call_that_proves_is_the_callers_and_the_next_call_proves(device):
    trouble = []

    def forward(m, x):
        if trouble:
            raise trouble.pop()
        return x * 2

    twins = Twins(device, forward)
    twins.capture()
    trouble.append(KeyError("mine"))
    with pytest.raises(KeyError, match="mine"):
        twins.model(rows(4, device))
    twins.call(4, 4)
    assert proofs(twins.model)[4] == "exact"
    assert twins.model.graph_stats.replays == 1


def test_an_interrupt_in_a_replay_of_a_proof_leaves_eagers_state(device, monkeypatch):
    twins = Twins(device, accumulate, padding=False)
    twins.call(4)
    table_replay = table.ProgramTable.replay

    def interrupted(*args, **kwargs):
        table_replay(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(table.ProgramTable, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            twins.model(rows(4, device))
    twins.eager(rows(4, device))
    twins.call(4, 4, 4)
    assert proofs(twins.model) == {4: "exact"}


def test_a_replay_that_fails_is_a_difference(device, monkeypatch):
    twins = Twins(device, lambda m, x: x * 2)
    twins.call(4)

    def failing(*args, **kwargs):
        raise RuntimeError("the device said no")

    with monkeypatch.context() as patched:
        patched.setattr(table.ProgramTable, "replay", failing)
        twins.call(4)
    assert "the device said no" in next(iter(twins.model.graph_stats.failures.values()))
    twins.call(4, 4, 8, 8, 8)
    assert proofs(twins.model) == {8: "exact"}


def test_more_memory_than_may_be_copied_is_reported_as_unverified(device, monkeypatch):
    monkeypatch.setattr(saved_state, "_LIMIT_BYTES", 16)
    twins = Twins(device, accumulate, padding=False)
    twins.call(4, 4, 4)
    assert proofs(twins.model)[4].startswith("unverified")
    assert twins.model.graph_stats.replays == 2
    assert "unverified" in str(twins.model.graph_report())


def test_zero_proves_nothing(device):
    none = graphed(device, lambda m, x: x * 2, verify=0)
    for _ in range(5):
        none(rows(4, device))
    assert reasons(none) == {"first_call": 1}


@pytest.fixture
def compared_after_four(monkeypatch):
    """Let calls be compared again after 4 replays, then after 8 more, 16 more and so on, however long they take."""
    monkeypatch.setattr(proofs_of_calls, "first_distance", lambda cost, verify: 4 // verify)


@pytest.mark.usefixtures("compared_after_four")
def test_calls_are_compared_again_at_distances_that_double(device):
    twins = Twins(device, lambda m, x: (x @ m.weight).relu())
    twins.call(4)
    compared = []
    for turn in range(40):
        before = reasons(twins.model).get("proof", 0)
        twins.call(4)
        if reasons(twins.model).get("proof", 0) > before:
            compared.append(turn)
    assert compared == [0, 5, 14, 31]  # after 4, 8 and 16 replays more


@pytest.mark.usefixtures("compared_after_four")
def test_a_larger_verify_compares_more_often(device):
    twins = Twins(device, lambda m, x: (x @ m.weight).relu(), verify=2)
    twins.call(*[4] * 20)
    assert reasons(twins.model)["proof"] == 4  # at first, after 2, 4 and 8 replays more


def clipped(m, x):
    h = torch.nn.functional.linear(x, m.weight, m.weight[0])
    return h * (5 / h.norm()).clamp(max=1)


def capacity(m, x):
    expert = (x @ m.weight).argmax(-1)
    load = F.one_hot(expert, WIDTH).sum(0)
    return x * (load[expert] <= 3)[:, None]


@pytest.mark.usefixtures("compared_after_four")
@pytest.mark.parametrize(("function", "mixing"), [(clipped, 90.0), (capacity, None)], ids=["clipped", "capacity"])
def test_rows_that_meet_only_for_some_data_stop_padding_when_that_is_seen(device, caplog, function, mixing):
    model = graphed(device, function, capture_sizes=[8])
    eager = sg.unwrap(model)
    first = torch.eye(WIDTH, device=device) * 0.1
    model.weight.data = torch.eye(WIDTH, device=device)
    harmless = first.repeat(2, 1)
    turns = {"harmless": 10, "mixing": 40}
    for size in (8, 8):
        model(harmless[:size])
    for _ in range(turns["harmless"]):
        torch.testing.assert_close(model(harmless[:6]), eager(harmless[:6]))
    x = harmless[:6] * mixing if mixing else first[[0, 0, 0, 1, 2, 3]]
    wrong = 0
    for _ in range(turns["mixing"]):
        wrong += not torch.allclose(model(x), eager(x), atol=1e-5)
    assert 0 < wrong < 20
    torch.testing.assert_close(model(x), eager(x))
    assert reasons(model)["padding_shows"] > 0
    said = next(text for text in caplog.messages if "changes the answer" in text)
    assert "the graph equalled eager after 4 replays, and now, after 12, it does not" in said


@pytest.mark.usefixtures("compared_after_four")
def test_a_graph_that_no_longer_equals_eager_is_given_up_at_a_later_comparison(device, caplog):
    scale = unwatched(value=1.0)
    model = graphed(device, lambda m, x: x * scale().value)
    for _ in range(4):
        model(rows(4, device))
    scale().value = 2.0  # behind a weak reference, which nothing follows
    for _ in range(10):
        x = rows(4, device)
        model(x)
    assert torch.equal(model(x), x * 2)
    assert reasons(model)["capture_failed"] > 0
    assert "after 0 replays, and now, after 4, it does not: answers since then may be wrong" in caplog.text


def test_the_environment_switches_proofs_off(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_VERIFY", "0")
    model = graphed(device, lambda m, x: x - x.mean(0))
    model.capture_graphs(rows(8, device))
    model(rows(3, device))
    assert reasons(model) == {}


# No guess is padded.


def test_a_batch_dimension_seen_once_serves_exact_sizes_only(device):
    model = graphed(device, lambda m, x: x * 2, batch_dims={})
    for _ in range(3):
        model(rows(3, device))
    assert reasons(model) == {"first_call": 1, "proof": 1}
    for size in (4, 4, 3, 3, 2, 3):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
    assert "batch_dim_unconfirmed" not in reasons(model)
    assert proofs(model) == {3: "exact", 4: "exact, padded"}


def test_positions_of_one_row_are_not_taken_for_a_batch(device):
    model = graphed(device, lambda m, x, position: x + position.float(), batch_dims={}, capture_sizes=[1, 2, 4])
    position = torch.tensor([3], device=device)
    for size in (1, 1, 2, 2, 4, 3, 3, 1, 4, 3):
        x = rows(size, device)
        assert torch.equal(model(x, position), x + 3)
    assert model.graph_stats.replays > 0


def test_keys_as_many_as_rows_are_not_padded_as_rows(device):
    def attend(m, x, keys):
        return torch.softmax(x @ keys.T, -1) @ keys

    model = graphed(device, attend, batch_dims={})
    keys = rows(5, device)
    for size in (5, 5, 5, 3, 5, 2, 5, 4, 8, 6, 5):
        x = rows(size, device)
        torch.testing.assert_close(model(x, keys), attend(None, x, keys))


def test_channels_of_an_image_are_not_taken_for_rows(device):
    def detect(m, images):
        return [image.mean((1, 2)) for image in images]

    model = graphed(device, detect, batch_dims={})
    for count in (1, 1, 1, 2, 2, 3, 1):
        images = [torch.randn(3, 5, 5, device=device) for _ in range(count)]
        for actual, image in zip(model(images), images, strict=True):
            torch.testing.assert_close(actual, image.mean((1, 2)))


def test_a_forward_that_cannot_run_padded_rows_still_serves_the_callers(device):
    def fixed(m, x):
        if x.shape[0] == 4:
            raise ValueError("four is not for me")
        return x * 2

    model = graphed(device, fixed)
    for size in (3, 2, 3, 3, 8, 8, 8, 3):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
    assert reasons(model)["capture_failed"] >= 1
    assert proofs(model)[8].startswith("exact")


def test_what_a_last_break_is_passed_is_proven_too(device: torch.device) -> None:
    halved = sg.eager_break(lambda h: torch.tanh(h) * 0.5)

    class ByCount(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return halved(x * (2 if len(x) > 3 else 1))

    model = sg.wrap(ByCount().eval(), capture_sizes=[16], mode="PIECEWISE", progress=False)
    with torch.no_grad():
        for rows in (1, 7, 1, 1, 2, 1):
            x = torch.randn(rows, 4, device=device)
            torch.testing.assert_close(model(x), (x * (2 if rows > 3 else 1)).tanh() * 0.5)
    assert reasons(model)["padding_shows"] >= 2


MIXED = {
    "a mean": lambda h: h - h.mean(0),
    "a norm": lambda h: h / h.norm(),
    "a load": lambda h: h / (h > 0).sum(0).clamp(min=1),
    "a sum": lambda h: h * h.sum(0).abs(),
}


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("into", [False, True], ids=["returned", "filled"])
@pytest.mark.parametrize("padded", [False, True], ids=["real rows", "padded rows"])
def test_rows_that_are_mixed_after_a_break_are_not_padded(device, mixed, into, padded):
    @sg.eager_break(padded=padded)
    def attend(x, out):
        out.copy_(x.tanh())

    returned = sg.eager_break(torch.tanh, padded=padded)

    def forward(m, x):
        h = x @ m.weight
        if into:
            out = torch.empty_like(h)
            attend(h, out)
        else:
            out = returned(h)
        return MIXED[mixed](out)

    twins = Twins(device, forward, mode="PIECEWISE", capture_sizes=[8])
    twins.call(8, 8, 8, 5, 5, 6, 8, 5, 3, 1)
    assert reasons(twins.model)["padding_shows"] >= 1
    assert twins.model.graph_stats.replays >= 1


def test_rows_that_are_added_up_after_a_break_are_not_padded_although_the_last_one_adds_nothing(device):
    def ending_in_zeros(count, device):
        x = rows(count, device)
        x[-1] = 0
        return x

    halved = sg.eager_break(lambda h: h * 0.5)
    twins = Twins(device, lambda m, x: x + halved(x).sum(0), mode="PIECEWISE", capture_sizes=[8])
    twins.call(8, 8, 8)
    twins.call(5, 5, 5, make=ending_in_zeros)
    twins.call(5, 5)
    assert reasons(twins.model)["padding_shows"] >= 1


def test_a_break_that_writes_what_was_in_its_memory_by_chance_still_fills_it(device):
    if device.type != "cpu":
        pytest.skip("sets memory behind torch's back")

    @sg.eager_break
    def fill(out):
        out.zero_()

    def forward(m, x):
        out = torch.empty_like(x)
        ctypes.memset(out.data_ptr(), 0, out.nbytes)  # as if memory of an earlier run came again
        fill(out)
        return out + x

    twins = Twins(device, forward, mode="PIECEWISE", capture_sizes=[8])
    twins.call(8, 8, 8, 5, 5, 8)
    assert "capture_failed" not in reasons(twins.model)
    assert twins.model.graph_stats.replays >= 1


def test_an_input_that_lies_otherwise_may_round_otherwise_but_no_more(device):
    def by_alignment(much):
        return lambda m, x: x * (1.0 + much if x.data_ptr() % 64 else 1.0)  # as kernels are chosen

    for much, proof in ((1e-6, {4: "exact"}), (0.1, {})):
        model = graphed(device, by_alignment(much))
        for _ in range(4):
            memory = torch.randn(4 * WIDTH + 1, device=device)
            x = memory[1:].view(4, WIDTH)
            torch.testing.assert_close(model(x), x * (1 + much), rtol=1e-5, atol=1e-5)
        assert proofs(model) == proof
    model = graphed(device, lambda m, x: x * (1.0 + 1e-6 * torch.is_inference_mode_enabled()))
    model.capture_graphs(rows(8, device))
    with torch.inference_mode():
        model(rows(4, device))
    assert 4 not in proofs(model)  # where it lies alike, every bit counts


@pytest.mark.parametrize(("dtype", "proof"), [(torch.bfloat16, {4: "exact"}), (torch.float32, {})])
def test_results_stored_wider_than_computed_may_round_as_they_were_computed(device, dtype, proof):
    """An input that lies otherwise gets other kernels; those of bfloat16 differ by more than float32's rounding."""

    def stored_wide(_, x):
        y = x.to(dtype).float()
        return y * (1.0 + 2.0**-7 if x.data_ptr() % 64 else 1.0)

    model = graphed(device, stored_wide)
    for _ in range(4):
        x = torch.randn(4 * WIDTH + 1, device=device)[1:].view(4, WIDTH)
        torch.testing.assert_close(model(x), x, rtol=2e-2, atol=1e-5)
    assert proofs(model) == proof


def test_rows_that_only_repeated_padding_shows_to_be_mixed_are_not_padded(device):
    class Sums(nn.Module):
        def forward(self, x):
            return x + x.sum(0, keepdim=True)  # zeros add nothing

    model = sg.wrap(Sums().eval(), capture_sizes=[2, 4], progress=False)
    with torch.no_grad():
        model.capture_graphs(torch.randn(4, 8, device=device))
        for _ in range(3):
            x = torch.randn(3, 8, device=device)
            torch.testing.assert_close(model(x), x + x.sum(0, keepdim=True))
    assert model.graph_stats.eager[sg.Reason.PADDING_SHOWS] == 2
    assert model.graph_stats.padded_tokens == 0


def test_a_replay_that_passes_other_tensors_to_a_break_than_eager_is_found(device):
    added = unwatched(tensor=torch.ones(8, device=device))

    @sg.eager_break
    def doubled(x):
        return x * 2

    class Broken(nn.Module):
        def forward(self, x):
            return doubled(x + added().tensor)

    model = sg.wrap(Broken().eval(), capture_sizes=[4], mode="PIECEWISE", progress=False)
    with torch.no_grad():
        model.capture_graphs(torch.randn(4, 8, device=device))
        before = added().tensor  # else its counts would tell that nothing holds it any more
        added().tensor = torch.zeros(8, device=device)  # behind a weak reference, which nothing follows
        for _ in range(3):
            x = torch.randn(4, 8, device=device)
            torch.testing.assert_close(model(x), x * 2)
    assert model.graph_stats.replays == 0
    del before


SHARED_BY_ROWS = {
    "max": lambda m, x: (x * 2, (x * 2).max(0).values),
    "amin": lambda m, x: (x * 2, x.amin(0)),
    "any": lambda m, x: (x * 2, (x > 2.5).any()),
    "argmax": lambda m, x: (x * 2, x.argmax(0)),
    "written": lambda m, x: (x * 2, torch.zeros(WIDTH, device=x.device).copy_(x.amax(0))),
    "quantile": lambda m, x: (x * 2, x.quantile(0.5, dim=0)),
    "pool over all": lambda m, x: (x * 2, nn.functional.max_pool1d(x.T[None], len(x))),
}


@pytest.mark.parametrize("upfront", [False, True], ids=["lazy", "upfront"])
@pytest.mark.parametrize("name", SHARED_BY_ROWS)
def test_what_all_rows_share_is_not_padded_although_the_first_padding_changes_nothing(device, name, upfront):
    model = graphed(device, SHARED_BY_ROWS[name])
    eager = copy.deepcopy(sg.unwrap(model))
    if upfront:
        model.capture_graphs(rows(4, device))
    for turn, count in enumerate((2, 2, 2, 3, 3, 3, 4, 1, 3, 4, 4, 4)):
        # High values first: rows of padding are no maximum and no minimum yet.
        x = rows(count, device).abs() + 1 if turn < 4 else -rows(count, device).abs() - 1
        if name == "amin":
            x = -x
        torch.testing.assert_close(model(x), eager(x.clone()), rtol=0, atol=0)
    assert model.graph_stats.padded_tokens == 0
    assert model.graph_stats.replays > 0


SORTED_BY_ROWS = {
    "order": lambda m, x: x[x[:, 0].argsort(descending=True)] * 2,
    "stable": lambda m, x: x[x[:, 0].argsort(stable=True, descending=True)] * 2,
    "values": lambda m, x: x.sort(dim=0, descending=True).values * 2,
    "msort": lambda m, x: -(-x).msort() * 2,
    "topk of all": lambda m, x: x.topk(len(x), dim=0).values * 2,
    "all elements": lambda m, x: x.flatten().sort(descending=True).values.view_as(x) * 2,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", SORTED_BY_ROWS)
def test_one_row_is_not_padded_where_rows_are_sorted(device, name, inference):
    model = sg.wrap(Function(SORTED_BY_ROWS[name]).to(device).eval(), capture_sizes=[2], progress=False)
    with torch.inference_mode(inference), torch.no_grad():
        for turn, count in enumerate((2, 1, 1, 1, 1, 1, 1)):
            x = torch.arange(8.0, 8.0 - WIDTH, -1, device=device).repeat(count, 1)
            x = x if turn < 4 else x - 100  # padding comes last, and later first
            assert torch.equal(model(x), SORTED_BY_ROWS[name](None, x))
    assert model.graph_stats.padded_tokens == 0
    assert "sorts all rows" in str(model.graph_report())


def test_what_follows_from_no_row_is_padded_as_before(device):
    def answers(m, x):
        chosen = x.sort().values, x.topk(3).values, m.bias.msort() * 2
        return *chosen, torch.ones(4, 4, device=x.device).tril(), x.new_zeros(3) + 1

    model = graphed(device, answers)
    model.bias = torch.randn(WIDTH, device=device)
    for count in (2, 3, 3, 3, 1, 3):
        x = rows(count, device)
        torch.testing.assert_close(model(x), answers(model, x), rtol=0, atol=0)
    assert model.graph_stats.padded_tokens > 0


def test_a_choice_among_rows_that_python_alone_reads_is_padded_as_before(device):
    def checked(m, x):
        if not graph_device(device).is_capturing():
            assert bool((x < 100).all())
            assert float(x.flatten().sort().values[-1]) < 100
        return x * 2

    model = graphed(device, checked)
    for count in (2, 3, 3, 3, 1, 3):
        x = rows(count, device)
        torch.testing.assert_close(model(x), x * 2, rtol=0, atol=0)
    assert model.graph_stats.padded_tokens > 0


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="needs torch's grouped products")
def test_experts_are_padded_although_the_rows_beside_them_decide_how_they_round(device):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 64, 64))

        def forward(self, x):
            expert = (x[:, :2] > 0).sum(1)
            order = expert.argsort(stable=True)
            ends = (torch.arange(3, device=x.device)[:, None] >= expert).sum(1, dtype=torch.int32)
            return torch.empty_like(x).index_copy(0, order, F.grouped_mm(x[order], self.weight, offs=ends))

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # a GPU reads the ends back for others
    eager = Experts().to(device, dtype).eval()
    model = sg.wrap(copy.deepcopy(eager), capture_sizes=[16], batch_dims={"x": 0}, progress=False)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 64, device=device, dtype=dtype)
            torch.testing.assert_close(model(x), eager(x), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)
    assert model.graph_stats.replays > 0
    assert model.graph_stats.padded_tokens > 0


@sg.eager_break
def attend(x, out):
    torch.mul(x, 2, out=out)


EMPTY = {
    "empty_like": torch.empty_like,
    "empty": lambda x: torch.empty(x.shape, device=x.device),
    "new_empty": lambda x: x.new_empty(x.shape),
    "a view": lambda x: x.new_empty(len(x), 2, x.shape[1])[:, 0],
}


@pytest.mark.parametrize("upfront", [False, True], ids=["lazy", "upfront"])
@pytest.mark.parametrize("name", EMPTY)
def test_memory_that_a_break_fills_is_not_compared_before_it(device, name, upfront):
    class Attention(nn.Module):
        def forward(self, x):
            for _ in range(2):
                out = EMPTY[name](x)
                attend(x + 1, out)
                x = out
            return x

    model = sg.wrap(Attention().eval(), capture_sizes=[2, 4], mode="PIECEWISE", progress=False)
    with torch.no_grad():
        if upfront:
            model.capture_graphs(torch.randn(4, 8, device=device))
        for rows in (2, 4, 2, 3, 3, 4, 2):
            x = torch.randn(rows, 8, device=device)
            torch.testing.assert_close(model(x), ((x + 1) * 2 + 1) * 2)
    assert not {sg.Reason.CAPTURE_FAILED, sg.Reason.PADDING_SHOWS} & set(model.graph_stats.eager)
    assert model.graph_stats.replays >= 2


@sg.eager_break
def total(x):
    return x.sum(0)


@sg.eager_break
def doubled(x):
    return x * 2


@sg.eager_break
def refuse_negative(x):
    if x.sum() < 0:
        raise LookupError("negative")
    return x * 2


def once_for_each_row(x):
    for _ in range(len(x)):
        x = doubled(x)
    return x


def caught(x):
    try:
        return refuse_negative(x + 0)
    except LookupError:
        return x * 3


@pytest.mark.parametrize(
    "function", [lambda x: x * 2 + total(x + 1), lambda x: x + total(x.exp())[:1], once_for_each_row, caught]
)
def test_breaks_that_padding_rows_change_in_number_or_result_stop_padding(device, function):
    class Broken(nn.Module):
        def forward(self, x):
            return function(x)

    model = sg.wrap(Broken().eval(), capture_sizes=[4], mode="PIECEWISE", progress=False)
    with torch.no_grad():
        for rows, sign in [(4, 1), (4, 1), (4, 1), (3, -1), (3, 1), (2, -1), (2, 1), (3, -1), (3, 1)]:
            x = torch.rand(rows, 8, device=device) * sign
            torch.testing.assert_close(model(x), function(x))


def test_a_number_that_a_forward_reads_past_torch_is_never_an_earlier_calls(no_grad):
    """As code of an extension may, on the emulator; the recording sees other rows than the call that proves it."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x):
            return self.l(x) * ctypes.c_float.from_address(x.data_ptr()).value

    net = Reads().eval()
    model = sg.wrap(net, capture_sizes=[3], progress=False)
    for _ in range(6):
        x = torch.randn(3, 8)
        torch.testing.assert_close(model(x), net.l(x) * x[0, 0])
    assert model.graph_stats.eager[sg.Reason.CAPTURE_FAILED] >= 3


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 4), (4, 4)])
def test_what_a_forward_computes_in_another_thread_is_never_an_earlier_calls(device, rows, size):
    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.in_a_thread = nn.Linear(8, 8), True

        def forward(self, x):
            if not self.in_a_thread:
                return self.l(x) * 2
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(torch.no_grad()(self.l), x).result() * 2

    net = Threaded().to(device).eval()
    model = sg.wrap(net, capture_sizes=[size], progress=False)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(rows, 8, device=device)
            torch.testing.assert_close(model(x), net.l(x) * 2)
    assert model.graph_stats.replays == 0
    report = str(model.graph_report())
    assert "what another thread computed" in report
    assert "Compute it in the thread that calls the module" in report
    net.in_a_thread = False
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(rows, 8, device=device)
            torch.testing.assert_close(model(x), net.l(x) * 2)
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_each_eager_call_runs_on_the_callers_stream(device, mode):
    """Other threads start work on their own stream, which has waited for the caller's at most."""

    class Noting(nn.Module):
        def forward(self, x):
            streams(graph_device(x.device).current_stream())
            return x * 2

    streams, eager_runs = run_log(), 0
    model = sg.wrap(Noting().eval(), capture_sizes=[4], mode=mode, progress=False)
    own = graph_device(device).current_stream()
    with torch.no_grad():
        for rows in (4, 4, 4, 4, 3, 3, 2):
            del streams()[:]
            captured = model.graph_stats.captures
            model(torch.randn(rows, 8, device=device))
            if model.graph_stats.captures == captured:
                eager_runs += len(streams())
                assert {stream for (stream,) in streams()} <= {own}
    assert model.graph_stats.replays
    assert eager_runs >= 2


def test_memory_that_was_written_before_a_break_is_compared_although_it_was_empty_once(device):
    added = unwatched(tensor=torch.ones(8, device=device))

    @sg.eager_break
    def double(x):
        x *= 2

    class Broken(nn.Module):
        def forward(self, x):
            out = torch.empty_like(x)
            torch.add(x, added().tensor, out=out)
            double(out)
            return out

    model = sg.wrap(Broken().eval(), capture_sizes=[4], mode="PIECEWISE", progress=False)
    with torch.no_grad():
        model.capture_graphs(torch.randn(4, 8, device=device))
        before = added().tensor  # else its counts would tell that nothing holds it any more
        added().tensor = torch.zeros(8, device=device)  # behind a weak reference, which nothing follows
        for _ in range(3):
            x = torch.randn(4, 8, device=device)
            torch.testing.assert_close(model(x), x * 2)
    assert model.graph_stats.replays == 0
    del before


def test_outputs_that_are_no_number_are_equal_to_themselves_alone(device):
    twins = Twins(device, lambda m, x: x * torch.where(m.state[:1] == 0, float("nan"), m.state[:1]))
    model = twins.model
    for _ in range(3):
        assert model(rows(4, device)).isnan().all()
    assert proofs(model) == {4: "exact"}
    assert model.graph_stats.replays == 1
    scale = torch.full((), float("nan"), device=device)
    frozen = graphed(device, lambda m, x: x * float(scale.isnan().any().item()) if not is_capturing(x) else x * scale)
    for _ in range(3):
        x = rows(4, device)
        assert torch.equal(frozen(x), x)
    assert frozen.graph_stats.replays == 0
    assert "output 0 differs by up to inf" in str(frozen.graph_stats.failures)


def is_capturing(x):
    return graph_device(x.device).is_capturing()


def test_an_output_that_is_a_number_is_returned_where_it_is_the_captures_and_else_eagers(device):
    model = graphed(device, lambda m, x: (x * 2, 7, None, "text"), batch_dims={"args": 0})
    for _ in range(4):
        x = rows(4, device)
        doubled, *others = model(x)
        assert torch.equal(doubled, x * 2)
        assert others == [7, None, "text"]
    assert model.graph_stats.replays == 2
    other = graphed(device, lambda m, x: (x * 2, 8 if is_capturing(x) else 7), batch_dims={"args": 0})
    assert [other(rows(4, device))[1] for _ in range(4)] == [7] * 4
    assert "output 1 is 8, eager gives 7" in str(other.graph_stats.failures)


ADDING = {
    "index_add": lambda x, index: x.new_zeros(1, WIDTH).index_add(0, index, x),
    "scatter_add_": lambda x, index: x.new_zeros(1, WIDTH).scatter_add_(0, index[:, None].expand_as(x), x),
    "scatter_reduce": lambda x, index: x.new_zeros(1, WIDTH).scatter_reduce(0, index[:, None].expand_as(x), x, "sum"),
}


@pytest.mark.parametrize("add", ADDING)
def test_a_replay_may_add_in_another_order_than_a_call_where_a_gpu_keeps_none(add, device):
    """Replays of atomics may all keep to one order, and calls outside of graphs to another."""

    def replays(factor=1.0):
        def sums(m, x):
            x = x.flip(0) * factor if is_capturing(x) else x
            return ADDING[add](x, m.steps.expand(len(x)))

        model = graphed(device, sums, capture_sizes=None, exact_shapes=True)
        x = torch.full((4, WIDTH), 2.0**-24, device=device)
        x[0] = 1
        for _ in range(4):
            torch.testing.assert_close(model(x), model(x))
        return model.graph_stats.replays

    assert replays() > 0
    assert replays(factor=1 + 1e-5) == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert device.type == "cuda" or replays() == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_proofs_and_calls_of_several_threads_are_each_their_callers(device):
    twins = Twins(device, lambda m, x: x @ m.weight + 1)
    twins.capture()

    def calls(thread):
        generator = torch.Generator().manual_seed(thread)
        for number in range(12):
            size = (1, 3, 4, 6, 8)[(thread + number) % 5]
            x = torch.randn(size, WIDTH, generator=generator).to(device)
            with torch.no_grad():
                torch.testing.assert_close(twins.model(x), twins.eager(x))

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(calls, range(3)))
    assert {size: set(proof.split(", ")) for size, proof in proofs(twins.model).items()} == {
        4: {"exact", "padded"},
        8: {"exact", "padded"},
    }
    assert not twins.model.graph_stats.failures


def test_padded_rows_that_eager_cannot_run_are_named_as_eagers(device, caplog):
    def fixed(m, x):
        if x.shape[0] == 4 and not is_capturing(x) and m.training_done:
            raise ValueError("four is not for me")
        return x * 2

    module = Function(fixed)
    module.training_done = False
    model = graphed(device, module)
    model.capture_graphs(rows(8, device))
    model.training_done = True
    for _ in range(3):
        x = rows(3, device)
        assert torch.equal(model(x), x * 2)
    assert model.graph_stats.replays == 0
    assert "eager raises ValueError with 4 rows: four is not for me" in caplog.text


@pytest.mark.parametrize(
    ("size", "runs", "replays"), [(8, 1, [1, 2]), (5, 3, [2, 3, 4])], ids=["an exact size", "a padded one"]
)
def test_a_proof_runs_and_replays_as_often_as_the_docs_say(device, monkeypatch, size, runs, replays):
    """The table in docs/how_it_works.md."""
    twins, made = Twins(device, lambda m, x: x @ m.weight), []
    twins.capture()
    replay = table.ProgramTable.replay
    monkeypatch.setattr(table.ProgramTable, "replay", lambda *args: (made.append(args), replay(*args))[1])
    before = twins.model.num_runs()
    for number in (runs, 0):
        twins.call(size)
        assert twins.model.num_runs() == before + number
        before += number
    assert len(made) - 1 in replays  # the last one served the second call
