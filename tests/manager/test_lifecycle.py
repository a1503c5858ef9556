"""The lifecycle of calls: each size goes through its stages once, and every change of them is in one file."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from docs.tools.lifecycle import VERDICT_EDGES
from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import CaptureError
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.manager.lifecycle import (
    EDGES,
    LASTING,
    CapturedGraph,
    Event,
    ModuleRecord,
    RowVerdict,
    SignatureRecord,
    SizeRecord,
    Stage,
)
from simplegraph.manager.stats import GraphCounters
from tests.test_house import PACKAGE, ROOT

HOME = Path("simplegraph", "manager", "lifecycle.py")


def records(model: Any) -> list[SizeRecord]:
    """The lifecycles of a wrapped module's sizes."""
    bindings = model._graph_runner._calls.bindings.values()
    return [record for binding in bindings for record in binding.sizes.values()]


def linear(device: torch.device, **settings: Any) -> Any:
    return sg.wrap(nn.Linear(4, 4, device=device).eval(), batch_dims={"input": 0}, progress=False, **settings)


@torch.inference_mode()
def test_a_size_is_learnt_warmed_up_captured_and_begins_again_when_a_weight_moves(device: torch.device) -> None:
    model, x = linear(device, capture_sizes=[4], num_warmups=2, verify=1), torch.randn(4, 4, device=device)
    stages = []
    for _ in range(5):
        model(x)
        (record,) = records(model)
        stages.append(record.stage)
    # The next call brings a stage up to date: after two warmups it captures.
    assert stages == [Stage.LEARNT, Stage.LEARNT, Stage.CAPTURED, Stage.CAPTURED, Stage.CAPTURED]
    assert record.rows == {4: RowVerdict.PROVEN}
    model.weight.data = model.weight.data.clone()
    model(x)
    assert (record.stage, records(model)) == (Stage.LEARNT, [record])
    assert record.rows == {4: RowVerdict.PROVEN}  # one comparison of the new graph proves all row counts again
    model.reset_graphs()
    assert (record.stage, records(model)) == (Stage.UNSEEN, [])


@torch.inference_mode()
def test_sizes_that_are_captured_up_front_are_captured_before_any_call(device: torch.device) -> None:
    model = linear(device, capture_sizes=[1, 2, 4])
    model.capture_graphs(torch.randn(4, 4, device=device))
    assert [record.stage for record in records(model)] == [Stage.CAPTURED] * 3
    assert [record.rows for record in records(model)] == [{}] * 3


class ReadsBack(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * int(x.sum())


@torch.inference_mode()
def test_a_size_whose_capture_fails_is_refused_until_graphs_are_reset(device: torch.device) -> None:
    model = sg.wrap(ReadsBack().to(device).eval(), capture_sizes=[2], padding=False, progress=False)
    x = torch.ones(2, 2, device=device)
    for _ in range(3):
        model(x)
    (record,) = records(model)
    assert record.refusal is not None
    assert record.refusal.reason is Reason.CAPTURE_FAILED
    assert list(model.graph_manager.failures.values()) == [record.failure]
    model.reset_graphs()
    assert (record.refusal, record.failure, model.graph_manager.failures) == (None, None, {})


class ReturnsAnObject(nn.Module):
    """Returns what no replay can with three rows."""

    def forward(self, x: torch.Tensor) -> Any:
        return x * 2 if len(x) != 3 else (x * 2, object())


@torch.inference_mode()
def test_what_one_size_shows_of_all_calls_ends_the_replays_of_another(device: torch.device) -> None:
    settings: Any = {"batch_dims": {"x": 0}, "capture_sizes": [2, 3], "padding": False, "progress": False}
    model = sg.wrap(ReturnsAnObject().to(device).eval(), **settings)
    two, three = torch.ones(2, 2, device=device), torch.ones(3, 2, device=device)
    for _ in range(3):
        model(two)
    replays = model.graph_stats.replays
    model(three)
    assert torch.equal(model(two), two * 2)
    assert model.graph_stats.replays == replays > 0
    assert model.graph_stats.eager[Reason.UNSUPPORTED_OUTPUT] == 1


@torch.inference_mode()
def test_a_row_count_that_teaches_nothing_more_is_refused_until_another_one_comes(device: torch.device) -> None:
    model = linear(device, capture_sizes=[4, 8], verify=1)
    model.capture_graphs(torch.randn(8, 4, device=device))
    binding = next(iter(model._graph_runner._calls.bindings.values()))
    record = SizeRecord()
    record.refuse_row_count(3)
    binding.sizes["another"] = record
    model(torch.randn(8, 4, device=device))  # a proof teaches nothing of batch sizes
    assert record.rows == {3: RowVerdict.REFUSED}
    binding.note_eager_run()
    assert record.rows == {}


def test_every_edge_leads_from_a_stage_to_another() -> None:
    assert {event for _, event in EDGES} == set(Event)
    assert all(before is not after for (before, _), after in EDGES.items())
    assert {*EDGES.values()} == set(Stage)
    steps = {(before, after) for (before, _), after in EDGES.items()}
    assert set(itertools.pairwise(Stage)) <= steps


def graph() -> CapturedGraph:
    """A graph that was captured and is compared, without a program."""
    record = SizeRecord()
    record.note_captured(compare=True)
    counters = GraphCounters("batch size 4", "FULL", 4, 0.0, 0)
    program: Any = nn.Module()
    program.drop = lambda: None
    return CapturedGraph(CudaGraphMode.FULL, BatchDescriptor(4), program, counters, record)


def test_the_verdicts_of_row_counts_change_as_they_are_drawn() -> None:
    """Every change that the methods make is an edge of the table, and every edge of it is made by one."""
    captured = graph()
    record = captured.record
    verdicts = [captured.verdict(3)]
    record.refuse_row_count(3)
    verdicts.append(captured.verdict(3))
    record.apply(Event.CALLED)
    verdicts.append(captured.verdict(3))
    captured.note_proven(3, 2, per_row_count=True)
    verdicts.append(captured.verdict(3))
    assert (captured.verdict(3), captured.verdict(4)) == (RowVerdict.PROVEN, RowVerdict.DUE)
    captured.replays_until_proof -= 2
    verdicts.append(captured.verdict(3))
    captured.leave_unverified("too large")
    verdicts.append(captured.verdict(3))
    captured.drop(Event.MOVED)
    record.note_captured(compare=True)
    verdicts.append(captured.verdict(3))
    assert set(itertools.pairwise(verdicts)) == VERDICT_EDGES.keys()


def test_one_comparison_stands_for_all_row_counts_where_ranks_may_differ_in_theirs() -> None:
    captured = graph()
    captured.note_proven(3, 2)
    assert [captured.verdict(rows) for rows in (1, 3, 4)] == [RowVerdict.PROVEN] * 3


def test_distances_between_comparisons_double() -> None:
    captured = graph()
    distances = []
    for _ in range(3):
        captured.note_proven(4, 5, per_row_count=True)
        distances.append(captured.replays_until_proof)
        captured.replays_until_proof = 0
    assert distances == [5, 10, 20]


def test_a_refusal_of_a_signature_or_of_its_padding_ends_its_plans() -> None:
    """A plan that was made before would go on replaying what is refused."""
    signature = SignatureRecord()
    for refuse in (signature.refuse, signature.refuse_padding):
        plans: dict[int, object] = {4: object()}
        signature.plans = {None: plans}  # type: ignore[dict-item]
        refuse(CannotBind(Reason.UNSUPPORTED_OUTPUT, ""))
        assert plans == {}


@pytest.mark.parametrize("reason", [Reason.ALIASED, Reason.GRAD, Reason.BUSY, Reason.TRAINING, Reason.BACKWARD_PENDING])
def test_reasons_about_one_call_are_not_remembered(reason: Reason) -> None:
    assert reason not in LASTING


def test_graphs_that_go_stale_before_they_serve_are_given_up() -> None:
    module = ModuleRecord()
    for _ in range(3):
        module.check()
        module.note_captured(1)
        module.note_stale(1)
    with pytest.raises(CannotBind) as refused:
        module.check()
    assert refused.value.reason is Reason.STALE_TOO_OFTEN
    module.reset()
    module.check()


def test_a_failure_is_kept_for_the_report_when_a_pair_is_refused_again() -> None:
    record, error = SizeRecord(), CaptureError("capturing batch size 4 failed")
    record.refuse(CannotBind(Reason.CAPTURE_FAILED, "first"), error)
    record.refuse(CannotBind(Reason.CAPTURE_FAILED, "second"))
    assert record.failure is error
    with pytest.raises(CannotBind, match="second"):
        record.check()


def set_attributes(node: ast.AST) -> list[str]:
    """The attributes that a statement sets, or sets items of."""
    found = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
    found = [part for each in found for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
    found = [each.value if isinstance(each, ast.Subscript) else each for each in found]
    return [each.attr for each in found if isinstance(each, ast.Attribute)]


def test_every_change_of_the_lifecycle_is_in_one_file() -> None:
    own = {"stage", "others", "refusal", "padding_refusal", "called", "ran", "warm", "sizes", "disabled"}
    own |= {"replays_until_proof", "proof_distance", "uncompared_runs"}
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
    rooms = [path for path in PACKAGE if path.parts[1] in ("manager", "call", "serve", "training") and path != HOME]
    changed = {
        (path.name, name)
        for path in rooms
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, kinds)
        for name in set_attributes(node)
        if name in own
    }
    # A replay counts itself, for a call would cost each one its time. Optimizers and gradients have refusals of their
    # own.
    own_refusals = {("optimizers.py", "refusal"), ("gradients.py", "refusal")}
    assert changed == {("table.py", "replays_until_proof"), *own_refusals}
