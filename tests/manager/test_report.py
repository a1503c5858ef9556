"""The report says what was captured, replayed and run eagerly, to people and to programs."""

from __future__ import annotations

import enum
import gc
import itertools
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.manager.stats import GraphStats

WIDTH = 6
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}


class Picky(nn.Module):
    """Reads a value back at the size 8, which no capture can record."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if x.shape[0] == 8 and x.sum().item() > 1e9:
            return x
        return self.linear(x)


@pytest.fixture
def served(device):
    """Sizes 2 and 4 captured, 8 failed; 3 padded to 4; 9 too large."""
    model = sg.wrap(Picky().to(device).eval(), capture_sizes=[2, 4, 8], progress=False)
    with torch.no_grad():
        for size in (4, 4, 4, 2, 2, 3, 3, 8, 8, 8, 9):
            model(torch.randn(size, WIDTH, device=device))
    return model


def test_a_report_before_any_call_is_empty_and_prints():
    report = sg.wrap(nn.Linear(2, 2)).graph_report()
    assert report.to_dict()["graphs"] == []
    assert report.to_dict()["replays"] == 0
    assert "0 graphs" in str(report)
    assert json.loads(report.to_json())["captures"] == 0


def test_the_numbers_of_the_report_are_those_of_the_calls(served, device):
    report = served.graph_report().to_dict()
    assert report["name"] == "Picky"
    assert report["device"] == ("cuda:0" if device.type == "cuda" else "cpu")
    assert report["emulated"] is (device.type == "cpu")
    assert report["captures"] == 2
    assert report["replays"] == 5
    assert report["padded_tokens"] == 2
    assert report["recaptures"] == 0
    assert report["eager"] == {"first_call": 1, "warmup": 2, "capture_failed": 2, "batch_too_large": 1}
    assert sum(report["eager"].values()) + report["replays"] == 11
    assert [(g["mode"], g["size"], g["replays"], g["padded_tokens"]) for g in report["graphs"]] == [
        ("FULL", 2, 1, 0),
        ("FULL", 4, 4, 2),
    ]
    assert all(graph["seconds"] > 0 for graph in report["graphs"])
    assert report["capture_seconds"] == pytest.approx(sum(graph["seconds"] for graph in report["graphs"]))
    assert report["graph_bytes"] == sum(graph["bytes"] for graph in report["graphs"])


@pytest.mark.parametrize("upfront", [True, False])
def test_the_longest_call_that_captured_is_in_the_report(upfront, device):
    """Who captures inside requests sees what the slowest of them waited; who captures ahead has none."""
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[2, 4], progress=False)
    with torch.no_grad():
        if upfront:
            model.capture_graphs(torch.randn(4, WIDTH, device=device))
        for rows in (4, 2) * 4:
            model(torch.randn(rows, WIDTH, device=device))
    stall = model.graph_report().to_dict()["longest_stall"]
    assert ("the longest call that had to capture took" in str(model.graph_report())) is not upfront
    assert stall == 0 if upfront else stall > max(graph.seconds for graph in model.graph_stats.graphs.values()) > 0


def test_a_call_whose_capture_fails_counts_as_a_stall(device):
    model = sg.wrap(Picky().to(device).eval(), capture_sizes=[8], progress=False)
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(8, WIDTH, device=device))
    assert model.graph_stats.failures
    assert model.graph_stats.longest_stall > 0


def test_the_failure_in_the_report_names_the_line(served):
    failures = served.graph_report().to_dict()["failures"]
    assert list(failures) == ["batch size 8"]
    assert "test_report.py" in failures["batch size 8"]
    assert "x.sum().item()" in failures["batch size 8"]


def test_the_histogram_of_batches_is_what_plan_sizes_takes(served):
    """Before padding, replayed or not; the batch above every size, too, or no plan would ever cover it."""
    histogram = served.graph_stats.batch_sizes
    assert histogram == {2: 2, 3: 2, 4: 3, 8: 3, 9: 1}
    assert sg.plan_sizes(histogram, num_graphs=8).sizes == (2, 3, 4, 8, 9)
    assert sg.plan_sizes(histogram, num_graphs=8).waste_after == 0
    assert dict(served.graph_report().to_dict()["batch_sizes"]) == histogram
    assert "  batch sizes in rows x calls: 2 x 2, 3 x 2, 4 x 3, 8 x 3, 9 x 1" in str(served.graph_report()).splitlines()


def test_batches_of_graphs_that_were_dropped_stay_in_the_histogram(served, device):
    before = served.graph_stats.batch_sizes
    served.reset_graphs()
    assert served.graph_stats.batch_sizes == before
    with torch.no_grad():
        for _ in range(3):
            served(torch.randn(3, WIDTH, device=device))
    assert served.graph_stats.batch_sizes == before | {3: 5}


def test_replays_of_a_graph_that_is_given_up_stay_in_the_report(served):
    """A later proof may refuse a graph that served calls before."""
    stats = served.graph_stats
    replays, padded, captures = stats.replays, stats.padded_tokens, stats.captures
    key = next(key for key, graph in stats.graphs.items() if graph.replays)
    served.graph_manager.table.forget([types.SimpleNamespace(key=key)])
    assert (stats.replays, stats.padded_tokens, stats.captures) == (replays, padded, captures)
    assert key not in stats.graphs


def test_a_histogram_of_many_sizes_is_cut_in_print_and_whole_in_json(device):
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[1], progress=False)
    with torch.no_grad():
        for size in range(2, 17):
            model(torch.randn(size, WIDTH, device=device))
    assert ", and 3 other sizes" in str(model.graph_report())
    assert len(model.graph_report().to_dict()["batch_sizes"]) == 15


def test_calls_that_raise_count_apart_from_those_that_were_answered(device: torch.device) -> None:
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[4], progress=False)
    rows = torch.randn(3, WIDTH, device=device)
    with torch.inference_mode():
        for arguments, named in (((rows[:, 1:],), {}), ((rows,), {"bad": 1}), ((rows, rows), {})):
            with pytest.raises((RuntimeError, TypeError)):
                model(*arguments, **named)
        model(rows)
    stats = model.graph_stats
    assert (stats.raised, stats.eager, stats.batch_sizes) == (3, {sg.Reason.FIRST_CALL: 1}, {3: 1})
    said = "  calls that raised an error, as in eager, and are not counted above: 3"
    assert said in str(model.graph_report()).splitlines()
    assert model.graph_report().to_dict()["raised"] == 3


def test_a_batch_of_one_dimension_is_said_to_be_one(device: torch.device) -> None:
    """Eager takes one row without a batch dimension, and a size for its features would not help."""
    model = sg.wrap(nn.Linear(16, 16).to(device).eval(), capture_sizes=[4], progress=False)
    with torch.inference_mode():
        model(torch.randn(16, device=device))
        assert "; input has 1 dimension, which is taken as the batch; pass one row with shape (1, 16)" in str(
            model.graph_report()
        )
        model(torch.randn(17, 16, device=device))
    assert "dimension" not in model.graph_stats.details[sg.Reason.BATCH_TOO_LARGE]


def test_calls_that_no_size_could_serve_are_not_in_the_histogram(device):
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).train(), capture_sizes=[4], progress=False)
    model(torch.randn(4, WIDTH, device=device))
    with torch.no_grad(), sg.eager():
        model(torch.randn(4, WIDTH, device=device))
    assert model.graph_stats.batch_sizes == {}
    with pytest.raises(sg.ConfigError, match="no batches"):
        sg.plan_sizes(model.graph_stats.batch_sizes, 2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        return self.linear(x.to(self.linear.weight.dtype)) * scale


def test_rows_of_one_size_are_told_apart_by_what_differs_between_their_inputs(device):
    model = sg.wrap(Scaled().to(device).eval(), capture_sizes=[4], progress=False)
    x = torch.randn(4, WIDTH, device=device)
    with torch.no_grad():
        for _ in range(3):
            model(x)
            model(x.to(torch.float16))
            model(x, scale=2.5)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                model(x)
    lines = str(model.graph_report()).splitlines()
    assert lines[1].endswith("  inputs")
    column = lines[1].index("  inputs")
    told = sorted(line[column:].strip() for line in lines[2:6])
    assert told == [
        "x float16[n, 6]",
        "x float32[n, 6]",
        "x float32[n, 6], autocast bfloat16",
        "x float32[n, 6], scale 2.5",
    ]
    inputs = [graph["inputs"] for graph in model.graph_report().to_dict()["graphs"]]
    assert {"x": "float32[n, 6]", "scale": "2.5"} in inputs


class Sky(enum.Enum):
    CLEAR = 1
    CLOUDY = 2


class Tempered(nn.Module):
    """Reads plain values of several kinds: each value has a graph of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.temperature, self.window, self.options = 0.5, (1, 2), {"scale": 1}
        self.sky, self.label = Sky.CLEAR, "a" * 30

    def forward(self, x):
        y = self.linear(x) / self.temperature * self.options["scale"]
        return y + len(self.label) + self.window[0] + self.sky.value


def told_apart(model):
    """The last column of the report: its title, and its rows in order."""
    lines = str(model.graph_report()).splitlines()
    start = lines[1].index("proven") + len("proven")
    rows = itertools.takewhile(lambda line: line.startswith("  FULL"), lines[2:])
    return lines[1][start:].strip(), sorted(row[start:].strip() for row in rows)


def test_rows_of_one_size_are_told_apart_by_python_values(device):
    model = sg.wrap(Tempered().to(device).eval(), capture_sizes=[2, 4], progress=False)
    x = torch.randn(4, WIDTH, device=device)
    with torch.no_grad():
        model.capture_graphs(x)
        assert told_apart(model) == ("", ["", ""])
        model.temperature = 1.0
        model.capture_graphs(x)
        assert told_apart(model) == ("values", ["temperature 0.5"] * 2 + ["temperature 1.0"] * 2)
        model.options["scale"] = 3
        model.sky = Sky.CLOUDY
        model.capture_graphs(x)
        assert told_apart(model)[1][::2] == [
            "options.scale 1, sky CLEAR, temperature 0.5",
            "options.scale 1, sky CLEAR, temperature 1.0",
            "options.scale 3, sky CLOUDY, temperature 1.0",
        ]
        model.reset_graphs()
        model.capture_graphs(x)
        model.window = (1, ("a", 7.5))
        model.capture_graphs(x)
    assert told_apart(model)[1][::2] == ["window (1, ('a', 7.5))", "window (1, 2)"]


def test_python_values_in_the_report_are_short_and_stand_after_the_inputs(device):
    model = sg.wrap(Tempered().to(device).eval(), capture_sizes=[4], progress=False)
    x = torch.randn(4, WIDTH, device=device)
    with torch.no_grad():
        model.capture_graphs(x)
        model.label, model.window, model.temperature = "b" * 30, (1, 7), 0.25
        model.capture_graphs(x)
        model.capture_graphs(x.T.contiguous().T)
    title, rows = told_apart(model)
    assert title == "inputs and values"
    values = [row.partition("label")[2] for row in rows]
    assert set(map(len, values)) == {60 - len("label")}
    assert all(row.endswith("...") for row in rows)


def test_failures_of_one_size_for_different_inputs_are_all_reported_until_they_are_gone(device):
    faulty = torch.ones(2000).numpy()  # of so large an array no value is part of the key

    class Faulty(nn.Module):
        def forward(self, x):
            if faulty[0]:
                if x.dtype is torch.float16:
                    x.amax().item()
                else:
                    x.sum().item()
            return x * 2

    model = sg.wrap(Faulty().eval(), capture_sizes=[4], progress=False)
    x = torch.randn(4, WIDTH, device=device)
    model.capture_graphs(x)
    model.capture_graphs(x.half())
    failures = model.graph_report().to_dict()["failures"]
    assert list(failures) == ["batch size 4", "batch size 4 of x float16[n, 6]"]
    assert "x.sum().item()" in failures["batch size 4"]
    assert "x.amax().item()" in failures["batch size 4 of x float16[n, 6]"]
    assert sum(line.startswith("  failed: ") for line in str(model.graph_report()).splitlines()) == 2
    faulty[0] = False
    assert model.capture_graphs(x.half()).captured == 1
    assert list(model.graph_report().to_dict()["failures"]) == ["batch size 4"]
    assert model.capture_graphs(x).captured == 1


def failing(x):
    return x if x.sum().item() > 1e9 else x * 2


def mixing(x):
    return x / x.abs().amax()


def changing(x):
    return x.unsqueeze_(1) * 1


@pytest.mark.proofs
@pytest.mark.parametrize(
    ("fault", "reason"),
    [(failing, "capture_failed"), (mixing, "padding_shows"), (changing, "changed_arguments")],
)
def test_a_refusal_outlives_its_cause_until_graphs_are_reset_as_the_report_says(device, fault, reason):
    faulty = torch.ones(2000).numpy()  # of so large an array no value is part of the key

    class Faulty(nn.Module):
        def forward(self, x):
            return fault(x) if faulty[0] else x * 2

    model = sg.wrap(Faulty().eval(), capture_sizes=[4], progress=False)
    refusals = model.graph_stats.eager

    def call(times):
        with torch.no_grad():
            for number in range(times):
                x = torch.randn(2 + number % 2, WIDTH, device=device)
                torch.testing.assert_close(model(x.clone()), model.forward(x.clone()))

    call(10)
    refused = refusals[sg.Reason(reason)]
    assert refused
    assert model.graph_stats.replays == 0
    faulty[0] = False
    call(3)
    assert refusals[sg.Reason(reason)] == refused + 3
    said = "  such calls are not tried again by themselves: call reset_graphs() once the cause is removed"
    assert said in str(model.graph_report()).splitlines()
    model.reset_graphs()
    call(10)
    assert refusals[sg.Reason(reason)] == refused + 3
    assert model.graph_stats.replays


def test_what_all_rows_have_alike_is_left_out_of_the_table(served):
    assert "float32" not in str(served.graph_report())
    assert all(graph["inputs"] == {"x": "float32[n, 6]"} for graph in served.graph_report().to_dict()["graphs"])


def test_an_engines_report_counts_tokens(device):
    manager = sg.CudaGraphManager(device=device, capture_sizes=[4], progress=False)
    buffer = torch.zeros(8, WIDTH, device=device)

    def forward(mode, descriptor):
        return buffer[: descriptor.num_tokens] * 2

    with torch.no_grad():
        manager.capture(forward)
        for size in (3, 3, 6):
            manager.run(manager.dispatch(size), forward)
    report = manager.report()
    assert "2 replays, 2 padded tokens" in str(report)
    assert "batch sizes in tokens x calls: 3 x 2, 6 x 1" in str(report)
    assert "batch size 6, the largest is 4: add 6 to capture_sizes" in str(report)
    assert report.to_dict()["unit"] == "tokens"


def test_json_says_what_the_dict_says(served):
    report = served.graph_report()
    assert json.loads(report.to_json()) == report.to_dict()


def test_the_table_has_a_row_for_every_graph_and_a_line_for_every_reason(served, device):
    text = str(served.graph_report())
    lines = text.splitlines()
    assert lines[0].startswith("Picky (")
    assert "2 graphs" in lines[0]
    assert "5 replays, 2 padded rows, 6 eager calls" in lines[0]
    assert ("emulated: no speed" in lines[0]) is (device.type == "cpu")
    assert lines[1].split() == [
        "mode",
        "size",
        "segments",
        "breaks",
        "nodes",
        "capture",
        "ms",
        "MiB",
        "replays",
        "padded",
        "proven",
    ]
    cells = [line.split() for line in lines[2:4]]
    assert [(row[0], row[1], *row[7:]) for row in cells] == [("FULL", "2", "1", "0", "-"), ("FULL", "4", "4", "2", "-")]
    assert len({len(line) for line in lines[1:4]}) == 1
    for reason in (sg.Reason.CAPTURE_FAILED, sg.Reason.BATCH_TOO_LARGE, sg.Reason.WARMUP):
        assert any(reason.value in line and reason.text in line for line in lines)
    assert any(line.strip().startswith("failed: capturing batch size 8") for line in lines)
    assert repr(served.graph_report()) == text


def test_totals_survive_a_recapture_and_graphs_are_counted_anew(served, device):
    with torch.no_grad():
        served.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        for _ in range(3):
            served(torch.randn(4, WIDTH, device=device))
    report = served.graph_report().to_dict()
    assert report["recaptures"] == 1
    assert report["captures"] == 3
    assert report["replays"] == 7
    assert report["padded_tokens"] == 2
    assert [graph["size"] for graph in report["graphs"]] == [4]


def test_two_wrappers_count_for_themselves(device):
    one = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[4])
    two = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[4])
    with torch.no_grad():
        for _ in range(4):
            one(torch.randn(4, WIDTH, device=device))
        two(torch.randn(4, WIDTH, device=device))
    assert one.graph_stats.replays == 3
    assert two.graph_stats.replays == 0


def test_each_reason_is_logged_once_and_costly_ones_as_warnings(device, caplog):
    caplog.set_level(logging.DEBUG, logger="simplegraph")
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[4])
    with torch.no_grad():
        for size in (9, 9, 9, 4, 4):
            model(torch.randn(size, WIDTH, device=device))
    too_large = [record for record in caplog.records if "larger than any captured size" in record.message]
    assert [record.levelno for record in too_large] == [logging.WARNING]
    first = [record for record in caplog.records if sg.Reason.FIRST_CALL.text in record.message]
    assert all(record.levelno == logging.DEBUG for record in first)
    assert all(record.name.startswith("simplegraph") for record in caplog.records)


def test_each_cause_of_a_reason_is_logged_once_whatever_its_numbers(caplog):
    stats = GraphStats()
    for detail in ("x is a Bag", "y is a Box", "x is a Bag", "9 rows, the largest is 8", "10 rows, the largest is 8"):
        stats.ran_eagerly(sg.Reason.OPAQUE_ARGUMENT, detail)
    assert [
        record.message.count(f"({detail})")
        for record, detail in zip(caplog.records, ("x is a Bag", "y is a Box", "9 rows, the largest is 8"), strict=True)
    ] == [1, 1, 1]


def test_a_call_that_shows_how_outputs_follow_the_batch_is_no_cause_for_a_warning(device, caplog):
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[4], progress=False)
    with torch.no_grad():
        for size in (4, 4, 4, 3, 3):
            model(torch.randn(size, WIDTH, device=device))
    assert model.graph_stats.eager[sg.Reason.OUTPUT_SHAPE_UNKNOWN] == 1
    assert model.graph_stats.replays == 3
    assert not [record for record in caplog.records if "runs eagerly" in record.message]


def test_an_output_that_does_not_follow_the_batch_is_one(device, caplog):
    class Counting(nn.Module):
        def forward(self, x):
            return x * 2, x.shape[0]

    model = sg.wrap(Counting().eval(), capture_sizes=[4], progress=False)
    with torch.no_grad():
        for size in (4, 4, 4, 3, 3):
            model(torch.randn(size, WIDTH, device=device))
    (message,) = [record.message for record in caplog.records if "runs eagerly" in record.message]
    assert sg.Reason.OUTPUT_SHAPE_UNKNOWN.text in message
    assert "the output holds" in message


def test_nothing_is_printed_by_a_program_that_configured_no_logging(device, capfd):
    model = sg.wrap(Picky().to(device).eval(), capture_sizes=[4], progress=False)
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, WIDTH, device=device))
    assert capfd.readouterr().out == ""


SCRIPT = """
import torch
from torch import nn
import simplegraph as sg

class Picky(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

model = sg.wrap(Picky().eval(), capture_sizes=[2, 4], progress=False)
with torch.no_grad():
    for size in (4, 4, 4, 2, 2, 2, 5):
        model(torch.randn(size, 6))
"""


def test_a_program_that_configured_no_logging_sees_each_warning_once_on_stderr(tmp_path):
    (tmp_path / "model.py").write_text(SCRIPT)
    ran = subprocess.run([sys.executable, "model.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")
    warnings = [line for line in ran.stderr.splitlines() if line.startswith("simplegraph: ")]
    assert len(warnings) == 2  # no graph was captured that could be emulated
    assert warnings[0] == (
        "simplegraph: Picky: capturing batch size 4 failed at model.py:8 `return x * 2 if x.sum() > 0 else x`"
    )
    assert warnings[1].startswith("simplegraph: Picky runs eagerly: the batch is larger than any captured size")


def test_every_reason_has_a_text_for_people_and_a_value_for_machines():
    assert len({reason.value for reason in sg.Reason}) == len(sg.Reason)
    for reason in sg.Reason:
        assert reason.text
        assert reason.value == str(reason)
        assert json.loads(json.dumps({reason.value: 1})) == {str(reason): 1}


def test_replays_and_captures_show_in_a_profile(device):
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[4])
    x = torch.randn(4, WIDTH, device=device)
    with torch.no_grad(), torch.profiler.profile() as profile:
        for _ in range(4):
            model(x)
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    assert sum(name.startswith("simplegraph.capture") for name in names) == 1
    assert sum(name.startswith("simplegraph.replay") for name in names) == 3


def test_the_counters_show_as_one_line(served):
    """In a debugger or a log they were pages, with the tensors that keys hold."""
    assert repr(served.graph_stats) == "<GraphStats of Picky: 2 graphs, 5 replays, 6 eager calls>"
    assert "costs" not in repr(next(iter(served.graph_stats.graphs.values())))


def test_rows_that_replays_served_are_counted_without_padding_also_after_graphs_are_dropped(served):
    counted = served.graph_stats.replayed_tokens, served.graph_stats.padded_tokens
    assert counted == (16, 2)
    served.reset_graphs()
    assert (served.graph_stats.replayed_tokens, served.graph_stats.padded_tokens) == counted


def test_wrappers_lists_those_that_live_and_keeps_none_alive(device):
    before = set(map(id, sg.wrappers()))
    model = sg.wrap(Picky().to(device).eval())
    manager = sg.CudaGraphManager(device=device, name="engine", capture_sizes=[1])
    found = [wrapper for wrapper in sg.wrappers() if id(wrapper) not in before]
    assert [wrapper.stats for wrapper in found] == [model.graph_stats, manager.stats]
    assert "engine" in str(found[1].report())
    numbers = {wrapper.stats.number for wrapper in found}
    del model, manager, found
    gc.collect()
    assert not numbers & {each.stats.number for each in sg.wrappers()}


def test_a_callback_hears_of_each_eager_call_until_it_is_ended(device):
    heard = []
    end = sg.on_eager(lambda name, reason, detail: heard.append((name, reason.value, detail)))
    model = sg.wrap(Picky().to(device).eval(), capture_sizes=[2], progress=False)
    with torch.no_grad(), sg.eager():
        model(torch.zeros(2, WIDTH, device=device))
    end()
    with torch.no_grad():
        model(torch.zeros(2, WIDTH, device=device))
    assert heard == [("Picky", "switched_off", "")]
    assert model.graph_stats.eager.total() == 2


def test_replays_of_backwards_stay_counted_once_their_graphs_are_dropped(device: torch.device) -> None:
    model = sg.wrap(nn.Linear(4, 4).to(device), training=True, progress=False)
    for _ in range(8):
        model(torch.randn(4, 4, device=device)).sum().backward()
    before = model.graph_stats.replays, model.graph_stats.batch_sizes
    assert before[0] > model.graph_stats.batch_sizes[4] - model.graph_stats.eager.total()
    model.reset_graphs()
    assert (model.graph_stats.replays, model.graph_stats.batch_sizes) == before


def test_the_largest_batch_that_no_size_holds_is_named(device: torch.device) -> None:
    """What is added for it serves the others, too."""
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[2, 4], progress=False)
    for rows in (64, 9, 65, 33):
        with torch.no_grad():
            model(torch.zeros(rows, 4, device=device))
    assert "4 x batch_too_large" in str(model.graph_report())
    assert "add 65 to capture_sizes" in str(model.graph_report())


def test_no_method_is_advised_that_a_step_has_not(device: torch.device) -> None:
    net = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @sg.train_step(optimizers=optimizer)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(4):
        step(torch.ones(8, 4, device=device))
    said = str(step.graph_report())
    assert "the longest call that had to capture took" in said
    assert "capture_graphs" not in said


def test_what_cannot_be_called_is_refused_as_a_callback() -> None:
    with pytest.raises(sg.ConfigError, match=r"on_eager was given None; expected a function"):
        sg.on_eager(None)
