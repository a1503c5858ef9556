"""Remedies that only a GPU's captures print work there, too; `tests/graph/test_remedies.py` has all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from tests.graph.test_remedies import MARK, WIDTH, Case, as_function, as_module, check_served, check_trained, message_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def draws_on_the_host(x: Tensor) -> Tensor:
    return x + torch.rand(WIDTH).clamp(5, 5).to(x.device)


def draws_on_the_device(x: Tensor) -> Tensor:
    return x + torch.rand(WIDTH, device=x.device).clamp(5, 5)


def compares_on_the_host(x: Tensor) -> Tensor:
    return x * 2 if bool((x.cpu() > 0).any()) else x - 1


def compares_on_the_device(x: Tensor) -> Tensor:
    return torch.where((x > 0).any(), x * 2, x - 1)


def square(x: Tensor) -> Tensor:
    return torch.tanh(x.T @ x) + 9 * torch.eye(WIDTH, device=x.device)


def solves(x: Tensor) -> Tensor:
    return torch.linalg.solve(square(x), x.T).T


def solves_without_a_check(x: Tensor) -> Tensor:
    solved: Tensor = torch.linalg.solve_ex(square(x), x.T).result
    return solved.T


CASES = [
    Case(draws_on_the_host, "Draw them on the device", draws_on_the_device),
    Case(compares_on_the_host, "", compares_on_the_device),
    Case(solves, "torch.linalg.solve_ex", solves_without_a_check),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.part.__name__)
@pytest.mark.parametrize("make", [as_module, as_function])
def test_what_a_capture_says_of_the_users_own_part_works(case: Case, make: Any, device: torch.device) -> None:
    message = message_of(make(case.part, device), device)
    assert case.said in message
    assert f"; or {MARK}" in message
    check_served(make(case.mended, device), device)
    check_served(make(sg.eager_break(case.part), device), device, mode="PIECEWISE")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.part.__name__)
@pytest.mark.parametrize("how", ["step", "training"])
def test_what_a_capture_says_in_training_speaks_of_no_break(case: Case, how: str, device: torch.device) -> None:
    failures = check_trained(case.part, device, how).failures
    assert failures
    assert "eager_break" not in str(failures)
    assert check_trained(case.mended, device, how).replays > 0
