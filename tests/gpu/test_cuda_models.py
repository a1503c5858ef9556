"""Unmodified models that make tensors on the CPU in their forward: captured, replayed, and equal to eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import Reason
from tests.support import host_models as models

pytestmark = pytest.mark.usefixtures("device_left_alone")

CAPTURED = [
    models.falcon,
    models.falcon_alibi,
    models.videomae,
    models.sam,
    models.rt_detr,
]
# Scripted functions, experts that are looked up by value, draws on the CPU, tensors left in an attribute: they may be
# refused, with the reason.
MAY_BE_REFUSED = [models.deberta_v2, models.gpt_oss, models.wavlm, models.raft]


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], autouse=True)
def _grad_mode(request: pytest.FixtureRequest) -> Any:
    with request.param():
        yield


def served(make: Callable[[], Any], calls: int = 8, **settings: Any) -> Any:
    """Serve calls of a model, each equal to eager: to the bit, or to what eager runs differ by among each other."""
    pytest.importorskip("torchvision" if make is models.raft else "transformers")
    with torch.inference_mode(False):
        module, inputs = make()
        module = module.eval().cuda()
    model: Any = sg.wrap(module, capture_sizes=[5], padding=False, **settings)
    for _ in range(calls):
        given = inputs(5, "cuda")
        found = flatten(model(**given))[0]
        with sg.eager():
            runs = [flatten(model(**given))[0] for _ in range(2)]
        for one, *others in zip(found, *runs, strict=True):
            if isinstance(one, Tensor):
                check(one, others)
    return model


def check(found: Tensor, eager: list[Tensor]) -> None:
    first = eager[0]
    assert (found.dtype, found.device, found.shape) == (first.dtype, first.device, first.shape)
    if torch.equal(found.nan_to_num(), first.nan_to_num()):
        assert torch.equal(found.isnan(), first.isnan())
        return
    noise = max((one.double() - other.double()).abs().max().item() for one, other in itertools.combinations(eager, 2))
    assert (found.double() - first.double()).abs().max().item() <= noise


@pytest.mark.parametrize("make", CAPTURED, ids=lambda make: make.__name__)
def test_a_model_that_makes_tensors_on_the_cpu_replays_and_equals_eager(make: Callable[[], Any]) -> None:
    model = served(make)
    assert model.graph_stats.failures == {}
    assert model.graph_stats.replays >= 3
    report = model.graph_report().to_dict()
    assert [(graph["mode"], graph["size"]) for graph in report["graphs"]] == [("FULL", 5)]
    assert set(report["eager"]) <= {"first_call", "warmup", "switched_off"}


@pytest.mark.parametrize("make", MAY_BE_REFUSED, ids=lambda make: make.__name__)
def test_a_model_that_may_be_refused_is_right_and_says_why(make: Callable[[], Any]) -> None:
    stats = served(make).graph_stats
    if stats.captures:
        assert (stats.failures, stats.replays >= 3) == ({}, True)
    else:
        (message,) = stats.failures.values()
        assert "\n" in message  # where, why, and what to do
        assert stats.eager[Reason.CAPTURE_FAILED] >= 3


@pytest.mark.proofs
@pytest.mark.parametrize("make", CAPTURED, ids=lambda make: make.__name__)
def test_a_models_graph_is_proven_by_its_first_replay(make: Callable[[], Any]) -> None:
    (graph,) = served(make).graph_report().to_dict()["graphs"]
    assert graph["proof"] == "exact"


def test_a_watched_table_that_is_written_is_captured_anew() -> None:
    """VideoMAE keeps its position embeddings on the CPU, RT-DETR its anchors."""
    pytest.importorskip("transformers")
    with torch.inference_mode(False):
        made, inputs = models.videomae()
        module: Any = made.eval().cuda()
        model: Any = sg.wrap(module, capture_sizes=[2], padding=False)
    table = module.embeddings.position_embeddings
    for _ in range(2):
        for _ in range(4):
            given = inputs(2, "cuda")
            found = model(**given).last_hidden_state
            with sg.eager():
                assert torch.equal(found, model(**given).last_hidden_state)
        with torch.inference_mode(False), torch.no_grad():
            table.mul_(2)
    assert (model.graph_stats.recaptures, model.graph_stats.failures) == (1, {})
