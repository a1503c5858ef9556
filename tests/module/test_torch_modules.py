"""torch's own modules, wrapped as they come: the batch dimension follows from `batch_first`, with no declaration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph import Reason
from simplegraph.base.nested import flatten
from tests.module.answers import reasons

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
LENGTH, WIDTH, LAYERS = 4, 8, 2  # the length is also a batch size, as it often is
HEADS = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 8}


def sequences(rows: int, batch_first: bool, length: int = LENGTH) -> torch.Tensor:
    return torch.randn((rows, length, WIDTH) if batch_first else (length, rows, WIDTH))


def states(rows: int) -> torch.Tensor:
    return torch.randn(LAYERS, rows, WIDTH)


def layer(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(**HEADS, batch_first=batch_first)


def decoder_layer(batch_first: bool) -> nn.Module:
    return nn.TransformerDecoderLayer(**HEADS, batch_first=batch_first)


def padding_mask(rows: int) -> torch.Tensor:
    return torch.arange(LENGTH).expand(rows, LENGTH) >= torch.randint(2, LENGTH + 1, (rows, 1))


MODULES: dict[str, tuple[Callable[[bool], nn.Module], Callable[[int, bool], tuple[Any, ...]]]] = {
    "LSTM": (
        lambda first: nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=first),
        lambda rows, first: (sequences(rows, first), (states(rows), states(rows))),
    ),
    "LSTM without states": (
        lambda first: nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=first, bidirectional=True),
        lambda rows, first: (sequences(rows, first),),
    ),
    "GRU": (
        lambda first: nn.GRU(WIDTH, WIDTH, LAYERS, batch_first=first),
        lambda rows, first: (sequences(rows, first), states(rows)),
    ),
    "RNN": (
        lambda first: nn.RNN(WIDTH, WIDTH, LAYERS, batch_first=first),
        lambda rows, first: (sequences(rows, first), states(rows)),
    ),
    "MultiheadAttention": (
        lambda first: nn.MultiheadAttention(WIDTH, 2, batch_first=first),
        lambda rows, first: (*[sequences(rows, first)] * 3, padding_mask(rows)),
    ),
    "TransformerEncoderLayer": (
        layer,
        lambda rows, first: (sequences(rows, first), torch.zeros(LENGTH, LENGTH), padding_mask(rows).float()),
    ),
    "TransformerEncoder": (
        lambda first: nn.TransformerEncoder(layer(first), 2, enable_nested_tensor=False),
        lambda rows, first: (sequences(rows, first),),
    ),
    "TransformerDecoderLayer": (
        decoder_layer,
        lambda rows, first: (sequences(rows, first), sequences(rows, first)),
    ),
    "TransformerDecoder": (
        lambda first: nn.TransformerDecoder(decoder_layer(first), 2),
        lambda rows, first: (sequences(rows, first), sequences(rows, first)),
    ),
    "Transformer": (
        lambda first: nn.Transformer(WIDTH, 2, 1, 1, 8, batch_first=first),
        lambda rows, first: (sequences(rows, first), sequences(rows, first)),
    ),
}


def assert_serves(model: Any, call: Callable[[int], tuple[Any, ...]], sizes: tuple[int, ...]) -> None:
    """Right at every call; the last ones replays, padded and not."""
    device = next(model.parameters()).device
    for rows in sizes:
        args = torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), call(rows))
        found, expected = flatten(model(*args))[0], flatten(sg.unwrap(model)(*args))[0]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch_first", [False, True], ids=["sequence first", "batch first"])
@pytest.mark.parametrize("name", MODULES)
def test_the_batch_is_found_and_padded(name: str, batch_first: bool, device: torch.device) -> None:
    make, call = MODULES[name]
    model = sg.wrap(make(batch_first).to(device).eval(), capture_sizes=[2, 4], progress=False)
    assert_serves(model, lambda rows: call(rows, batch_first), (4, 2, 3, 4, 2, 3, 3, 4))
    assert set(model.graph_stats.batch_sizes) == {2, 3, 4}
    assert model.graph_stats.padded_tokens >= 1
    assert set(model.graph_stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF, Reason.OUTPUT_SHAPE_UNKNOWN}


def test_one_tensor_for_query_and_key_takes_the_way_that_eager_takes(device: torch.device) -> None:
    """torch compares them by identity, and rounds otherwise where they are several."""
    model = sg.wrap(nn.MultiheadAttention(WIDTH, 2).to(device).eval(), capture_sizes=[4], progress=False)
    for several in (False, True) * 4:
        x = sequences(4, False).to(device)
        args = [x.clone(), x.clone(), x.clone()] if several else [x, x, x]
        found, expected = model(*args), sg.unwrap(model)(*args)
        assert torch.equal(found[0], expected[0])
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 2


def test_a_sequence_alone_has_no_batch_to_pad(device: torch.device) -> None:
    """Its first dimension is time: another one is another answer."""
    model = sg.wrap(nn.LSTM(WIDTH, WIDTH).to(device).eval(), capture_sizes=[2, 4], progress=False)
    assert_serves(model, lambda rows: (torch.randn(rows, WIDTH),), (4, 2, 3, 4, 3, 3))
    assert model.graph_stats.padded_tokens == 0


class Reversed(nn.LSTM):
    """Takes the batch first and turns it round itself: what torch's own arguments mean does not count."""

    def forward(self, input):  # type: ignore[override]
        return super().forward(input.transpose(0, 1))[0].transpose(0, 1)


def test_a_forward_of_ones_own_is_read_as_any_other(device: torch.device) -> None:
    model = sg.wrap(Reversed(WIDTH, WIDTH).to(device).eval(), capture_sizes=[2, 4], progress=False)
    assert_serves(model, lambda rows: (torch.randn(rows, 7, WIDTH),), (4, 2, 3, 4, 2, 3, 3, 4))
    assert set(model.graph_stats.batch_sizes) == {2, 3, 4}


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_bags_are_served_and_padded_only_where_that_adds_nothing(padding_idx: int | None, device: torch.device) -> None:
    bags = nn.EmbeddingBag(10, WIDTH, mode="sum", padding_idx=padding_idx).to(device).eval()
    model = sg.wrap(bags, capture_sizes=[4, 8], progress=False)

    def call(rows: int) -> tuple[Any, ...]:
        return torch.randint(2, 10, (rows,)), torch.tensor([0, 1, 1, 3])

    assert_serves(model, call, (4, 8, 6, 4, 8, 6, 6, 4, 8))  # as many offsets as indices, among others
    assert model.graph_stats.replays >= 2
    assert (model.graph_stats.padded_tokens > 0) == (padding_idx is not None)
    assert ("padding_shows" in reasons(model)) == (padding_idx is None)


class Tagged(nn.Module):
    """Has bags of other numbers of tags inside: indices and offsets, whose sizes are not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(10, WIDTH, mode="sum"), nn.Linear(WIDTH, 3)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.head(self.bags(indices, offsets))  # type: ignore[no-any-return]


def test_inputs_of_sizes_of_their_own_are_served_by_the_option_that_the_reason_names(device: torch.device) -> None:
    calls = [
        (torch.randint(10, (tags,), device=device), torch.arange(0, rows, device=device))
        for _ in range(4)
        for tags, rows in ((7, 4), (5, 2), (9, 4))
    ]
    plain = Tagged().to(device).eval()
    model, exact = (sg.wrap(copy.deepcopy(plain), progress=False, exact_shapes=exact) for exact in (False, True))
    for call in calls:
        expected = plain(*call)
        assert torch.equal(model(*call), expected)
        assert torch.equal(exact(*call), expected)
    assert model.graph_stats.eager[Reason.BATCH_MISMATCH] == 4
    assert "exact_shapes=True" in str(model.graph_report())
    assert exact.graph_stats.replays + exact.graph_stats.eager[Reason.PROOF] == 9  # all but the first of each kind


@pytest.mark.proofs
def test_a_maximum_over_bags_never_sees_padding_when_the_weights_change(device: torch.device) -> None:
    """While row 0 has the smallest weights, padding with index 0 changes nothing, and a proof would pass."""
    bags = nn.EmbeddingBag(10, WIDTH, mode="max").to(device).eval()
    model = sg.wrap(bags, capture_sizes=[4], progress=False)
    offsets = torch.tensor([0], device=device)
    with torch.no_grad():
        for weight in (-5.0, 5.0):
            bags.weight[0] = weight
            for rows in (4, 4, 4, 3, 3, 3):
                given = torch.randint(1, 10, (rows,), device=device)
                assert torch.equal(model(given, offsets), bags(given, offsets))
