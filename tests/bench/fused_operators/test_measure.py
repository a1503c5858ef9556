"""The benchmark of fused operators: every operator is measured, and its error is found."""

from __future__ import annotations

import torch

from bench.fused_operators.measure import THREADED, measure_here, render


def test_every_operator_of_torch_has_its_time_and_error() -> None:
    figures = measure_here("torch", (1, 3), torch.device("cpu"))
    assert len(figures["operators"]) == 6
    for name, each in figures["operators"].items():
        assert all(each["us"][rows] > 0 for rows in (1, 3))
        assert name == "rotate_and_write" or each["error"] < 1e-6
    assert "silu_and_mul" in render([figures, {"library": "other", "failed": "not installed"}])


def test_a_library_that_is_missing_is_left_out() -> None:
    figures = measure_here("liger", (1,), torch.device("cpu"))
    assert all("missing" in each for each in figures["operators"].values())
    assert figures["operators"]["group_norm"]["missing"] == "liger has no such operator"
    assert figures["ready_s"] == 0
    assert measure_here(THREADED, (1,), torch.device("cpu"))["ready_s"] >= 0
