"""Each call of a wrapped module runs eagerly, is captured or is replayed, whichever is right for its batch."""

from __future__ import annotations

import collections
import gc
import threading
import weakref

import pytest
import torch

import simplegraph as sg
from simplegraph.serve.builder import _warn_of_emulation
from tests.module.answers import close, reasons
from tests.module.models import WIDTH, Counting, rows, wrapped_mlp

pytestmark = pytest.mark.usefixtures("no_grad")


# The order in a call.


def test_the_order_is_first_call_capture_replay(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    states = []
    for _ in range(5):
        model(x)
        states.append((reasons(model), model.graph_stats.captures, model.graph_stats.replays))
    assert states == [
        ({"first_call": 1}, 0, 0),
        ({"first_call": 1}, 1, 1),
        ({"first_call": 1}, 1, 2),
        ({"first_call": 1}, 1, 3),
        ({"first_call": 1}, 1, 4),
    ]


def test_every_size_is_warmed_up_and_captured_for_itself(device):
    model = wrapped_mlp(device)
    for size in (2, 4, 7, 2, 4, 7, 2, 4, 7):
        model(rows(size, device))
    assert reasons(model) == {"first_call": 1, "warmup": 2}
    assert model.graph_stats.captures == 3
    assert model.graph_stats.replays == 6


def test_sizes_in_between_share_the_next_larger_graph(device):
    model = wrapped_mlp(device)
    for size in (4, 2, 4, 3, 3, 4, 3):
        model(rows(size, device))
    graphs = {graph.size: graph for graph in model.graph_stats.graphs.values()}
    assert graphs[4].replays == 5
    assert graphs[4].padded_tokens == 3
    assert model.graph_stats.padded_tokens == 3


def test_without_padding_only_exact_sizes_replay(device):
    model = wrapped_mlp(device, padding=False)
    for size in (4, 3, 4, 3, 4, 2, 2):
        close(model(x := rows(size, device)), sg.unwrap(model)(x))
    assert reasons(model) == {"first_call": 1, "size_not_captured": 2, "warmup": 1}
    assert model.graph_stats.padded_tokens == 0


def test_a_batch_above_every_size_runs_eagerly_and_is_counted(device):
    model = wrapped_mlp(device)
    x = rows(8, device)
    close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {"batch_too_large": 1}


def test_an_empty_batch_runs_eagerly_and_the_next_is_right(device):
    model = wrapped_mlp(device)
    assert model(rows(0, device)).shape == (0, WIDTH)
    x = rows(4, device)
    for _ in range(3):
        close(model(x), sg.unwrap(model)(x))
    assert model(rows(0, device)).shape == (0, WIDTH)
    assert reasons(model) == {"empty_batch": 2, "first_call": 1}


@pytest.mark.parametrize("sizes", [[4], [4, 6]])
def test_every_call_runs_the_forward_exactly_once(device, sizes):
    module = Counting().to(device).eval()
    model = sg.wrap(module, capture_sizes=sizes)
    for call, size in enumerate((4, 4, 4, 3, 3, 3, 4, 2, 5, 5, 5, 5, 9, 1, 4), start=1):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
        assert module.count.item() == call
    assert model.graph_stats.replays > 5


def test_python_counts_eager_calls_but_neither_captures_nor_replays(device):
    module = Counting().to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    counts = []
    for _ in range(5):
        model(x)
        counts.append(module.python_count)
    assert counts == [1, 1, 1, 1, 1], "replays run no Python"
    assert module.runs() == [(False,), (True,)], "nor does a capture run twice"
    assert module.count.item() == 5


def test_upfront_configuration_never_captures_in_a_call(device):
    model = wrapped_mlp(device, capture="upfront")
    x = rows(4, device)
    for _ in range(4):
        model(x)
    assert reasons(model) == {"not_captured_upfront": 4}
    model.capture_graphs(x)
    close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 1


# Around the call.


def test_inside_eager_nothing_is_captured_or_replayed(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with sg.eager():
        close(model(x), sg.unwrap(model)(x))
        with sg.eager():
            model(x)
        model(x)
    model(x)
    assert reasons(model) == {"first_call": 1, "switched_off": 3}
    assert model.graph_stats.replays == 3


def test_eager_holds_in_its_own_thread_only(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)

    def call():
        with torch.no_grad():
            model(x)

    with sg.eager():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert model.graph_stats.replays == 3
    assert reasons(model) == {"first_call": 1}


def test_eager_ends_when_the_block_raises(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    with pytest.raises(KeyError), sg.eager():
        raise KeyError
    for _ in range(3):
        model(x)
    assert model.graph_stats.replays == 2


def test_decode_only_graphs_serve_batches_described_as_uniform_decode(device):
    model = wrapped_mlp(device, mode="FULL_DECODE_ONLY")
    x = rows(4, device)
    for _ in range(3):
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {"mixed_batch": 3}
    for _ in range(3):
        with sg.describe(num_reqs=4, uniform_query_len=1):
            close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 2
    model(x)
    assert reasons(model) == {"mixed_batch": 4, "first_call": 1}


def test_a_described_decode_batch_is_padded_to_whole_requests(device):
    model = wrapped_mlp(device, mode="FULL_DECODE_ONLY", uniform_query_len=3, capture_sizes=[6, 12])
    for requests in (4, 4, 2, 2, 3, 3, 3):
        x = rows(3 * requests, device)
        with sg.describe(num_reqs=requests, uniform_query_len=3):
            close(model(x), sg.unwrap(model)(x))
    assert {graph.size for graph in model.graph_stats.graphs.values()} == {6, 12}
    assert model.graph_stats.padded_tokens == 9


def test_a_description_that_does_not_fit_the_batch_is_an_error(device):
    model = wrapped_mlp(device)
    with sg.describe(num_reqs=3, uniform_query_len=2), pytest.raises(sg.InputError, match="num_tokens"):
        model(rows(4, device))
    x = rows(4, device)
    close(model(x), sg.unwrap(model)(x))


def test_more_loras_than_any_graph_holds_run_eagerly(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with sg.describe(num_active_loras=2):
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model)["batch_too_large"] == 1


def test_a_wrapper_is_collected_with_its_graphs(device):
    model = wrapped_mlp(device)
    for _ in range(3):
        model(rows(4, device))
    gone = weakref.ref(model._graph_runner)
    del model
    gc.collect()
    assert gone() is None


def test_counters_of_reasons_add_up_to_the_calls(device):
    model = wrapped_mlp(device)
    calls = collections.Counter()
    for size in (4, 4, 4, 9, 0, 3, 2, 3):
        model(rows(size, device))
        calls["all"] += 1
    assert model.graph_stats.replays + sum(reasons(model).values()) == calls["all"]


def test_emulation_is_said_once_and_how_to_switch_it_off(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_emulation.cache_clear()
    for settings in ({"mode": "NONE"}, {}, {}):
        model = sg.wrap(torch.nn.Linear(4, 4).eval(), capture_sizes=[1], progress=False, **settings)
        for _ in range(5):
            model(torch.randn(1, 4))
    said = [record.getMessage() for record in caplog.records if "emulated" in record.getMessage()]
    assert len(said) == 1
    assert "gives no speed" in said[0]
    assert "mode='NONE' or SIMPLEGRAPH_MODE=off" in said[0]
