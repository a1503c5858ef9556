"""A graph of a whole step trains as eager does, to the bit, over a pairwise cover of what training is made of.

Torch refuses `capturable` on a CPU. Here it is let through: the steps of these optimizers are the same operators.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from training_cells import (
    CAPTURABLE,
    CELLS,
    FLAGS,
    FUSED,
    MODELS,
    PRECISIONS,
    Cell,
    assert_equal_to_eager,
    assert_pairs_equal_to_eager,
    capturable_on_cpu,
    distance_to_ordinary,
)

CPU = torch.device("cpu")
CALLS = 200
PAIR_CALLS = 40


@pytest.fixture(autouse=True)
def _capturable() -> Iterator[None]:
    with capturable_on_cpu():
        yield


def test_the_cover_has_every_pair() -> None:
    assert len(CELLS) <= 40
    rows = [(cell.model, cell.optimizer, cell.precision, *(getattr(cell, flag) for flag in FLAGS)) for cell in CELLS]
    pairs = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
    levels: list[Any] = [list(MODELS), [*FUSED, *CAPTURABLE], list(PRECISIONS), *[[False, True]] * len(FLAGS)]
    for (one, first), (other, second) in itertools.combinations(enumerate(levels), 2):
        missing = {pair for pair in itertools.product(first, second) if ((one, pair[0]), (other, pair[1])) not in pairs}
        # These take turns in the cells, or need a scaler that reads on the host.
        assert {pair for pair in missing if not set(CAPTURABLE) & set(pair)} == set(), (one, other)
    assert {cell.optimizer for cell in CELLS} == {*FUSED, *CAPTURABLE}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_weights_and_gradients_are_those_of_eager(cell: Cell) -> None:
    # Some CPUs have no LSTM of half precision but the one without oneDNN.
    without = cell.model == "lstm" and cell.precision != "fp32"
    with torch.backends.mkldnn.flags(enabled=False) if without else contextlib.nullcontext():
        assert_equal_to_eager(cell, CPU, CALLS)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_forward_and_backward_in_graphs_train_as_eager(cell: Cell) -> None:
    without = cell.model == "lstm" and cell.precision != "fp32"
    with torch.backends.mkldnn.flags(enabled=False) if without else contextlib.nullcontext():
        assert_pairs_equal_to_eager(cell, CPU, PAIR_CALLS)


@pytest.mark.parametrize("optimizer", [*FUSED, *CAPTURABLE])
def test_the_distance_to_the_optimizer_as_users_make_it(optimizer: str, record_property: Any) -> None:
    cell = Cell("mlp", optimizer, "fp32", False, False, True, False, False)
    distance = distance_to_ordinary(cell, CPU, CALLS)
    record_property("distance", distance)
    print(f"{optimizer}: {distance:.1e}")
    assert distance < 1e-2
