"""The benchmark of fused operators: every operator is measured, and its error is found."""

from __future__ import annotations

import torch

from bench.fused_operators.measure import OperatorsPlan, failures, measure, measure_library, render

CPU = torch.device("cpu")


def test_every_operator_of_torch_has_its_time_and_error() -> None:
    figures = measure_library("torch", (1, 3), CPU)
    assert len(figures["operators"]) == 6
    for name, each in figures["operators"].items():
        assert all(each["us"][rows] > 0 for rows in (1, 3))
        assert name == "rotate_and_write" or each["error"] < 1e-6
    results = [{"library": "torch"} | figures, {"library": "other", "failed": "a traceback", "reason": "not installed"}]
    told = render({"results": results})
    assert "silu_and_mul" in told
    assert "not installed" in told
    assert failures({"results": results}) == []
    assert failures({"results": results[1:]}) == ["other:\na traceback"]


def test_a_library_that_is_missing_is_left_out(here: None) -> None:
    (figures,) = measure(OperatorsPlan(("flashinfer",), (1,)), CPU)["results"]
    assert figures["library"] == "flashinfer"
    assert all("missing" in each for each in figures["operators"].values())
    assert figures["operators"]["group_norm"]["missing"] == "flashinfer has no such operator"
    assert figures["ready_s"] == 0
