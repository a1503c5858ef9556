"""Batch dimensions of arguments, inferred or declared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, check_sizes, graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def rope(m, x, positions):
    return x + positions.sum(0).unsqueeze(-1)


def test_mrope_positions_with_the_batch_in_dimension_one_are_inferred(device):
    model = graphed(device, rope)
    check_sizes(model, lambda size: ((rows(size, device), rows(3, device, size)), {}), replays=8)


def test_mrope_positions_are_padded_in_their_own_dimension_when_declared(device):
    model = graphed(device, rope, batch_dims={"args.1": 1})
    check_sizes(model, lambda size: ((rows(size, device), rows(3, device, size)), {}), replays=8)


def test_a_batch_of_three_with_three_position_rows_is_never_guessed_wrong(device):
    class Rope(nn.Module):
        def forward(self, x, positions):
            return x + positions.sum(0).unsqueeze(-1)

    model = sg.wrap(Rope().eval(), capture_sizes=[4, 8])
    make = lambda size: ((rows(size, device), rows(3, device, size)), {})  # noqa: E731
    check_sizes(model, make, (3, 3, 3))
    assert reasons(model) == {"ambiguous_batch_dim": 3}
    assert check_sizes(model, make, (5, 6, 5, 5, 5, 3, 3, 3, 8, 8, 3)) > 4

    declared = sg.wrap(Rope().eval(), capture_sizes=[4, 8], batch_dims={"positions": -1})
    check_sizes(declared, make, (4, 3, 3, 3, 3), replays=2)
    assert "ambiguous_batch_dim" not in reasons(declared)


def test_positions_as_the_first_argument_work_when_declared(device):
    class First(nn.Module):
        def forward(self, positions, x):
            return x + positions.sum(0).unsqueeze(-1)

    model = sg.wrap(First().eval(), capture_sizes=[4, 8], batch_dims={"positions": 1})
    check_sizes(model, lambda size: ((rows(3, device, size), rows(size, device)), {}), replays=8)


def test_a_batch_of_one_among_dimensions_of_one_is_padded_right(device):
    class Masked(nn.Module):
        def forward(self, x, mask):  # (B, W), (1, B, W)
            return x * mask[0]

    model = sg.wrap(Masked().eval(), capture_sizes=[2, 4])
    check_sizes(
        model, lambda size: ((rows(size, device), rows(1, device, size, WIDTH)), {}), (1, 1, 1, 2, 2, 2, 1, 1, 3, 4)
    )


def test_a_tensor_without_a_batch_dimension_may_change_from_call_to_call(device):
    model = graphed(device, lambda m, x, table: x * table, capture_sizes=[4])
    make = lambda size: ((rows(size, device), rows(WIDTH, device, 1)[:, 0]), {})  # noqa: E731
    check_sizes(model, make, (4, 4, 4, 2, 2, 3, 1, 4), replays=6)


def test_a_declared_argument_without_batch_dimension_is_never_padded(device):
    class Lookup(nn.Module):
        def forward(self, x, memory):
            return torch.softmax(x @ memory.T, -1) @ memory

    model = sg.wrap(Lookup().eval(), capture_sizes=[8], batch_dims={"memory": None})
    memory = rows(4, device)
    check_sizes(model, lambda size: ((rows(size, device), memory), {}), (4, 5, 4, 4, 4, 5, 4), replays=2)


def test_a_scalar_tensor_is_an_input_and_not_a_constant(device):
    model = graphed(device, lambda m, x, scale: x * scale, capture_sizes=[4])
    check_sizes(
        model, lambda size: ((rows(size, device), torch.rand((), device=device)), {}), (4, 4, 4, 4, 2), replays=2
    )


def test_a_declared_dimension_that_is_not_there_is_a_clear_error(device):
    class One(nn.Module):
        def forward(self, x):
            return x * 2

    model = sg.wrap(One().eval(), capture_sizes=[4], batch_dims={"x": 2})
    with pytest.raises(sg.InputError, match=r"batch_dims\['x'\] is 2"):
        model(rows(4, device))


@pytest.mark.parametrize("setting", [{"batch_dims": {"positons": 1}}, {"pad_values": {"positons": 1}}])
def test_a_misspelt_argument_name_is_an_error_and_not_ignored(device, setting):
    class One(nn.Module):
        def forward(self, positions):
            return positions * 2

    with pytest.raises(sg.ConfigError, match=r"positons.* \(did you mean positions\?\)"):
        sg.wrap(One().eval(), **setting)(rows(4, device))


def test_arguments_that_disagree_on_the_batch_run_eagerly_with_a_reason(device):
    model = graphed(device, lambda m, x, y: x.sum(0) + y.sum(0))
    for size in (4, 4, 4, 8, 8, 8):
        x, y = rows(size, device), rows(size, device)
        close(model(x, y), x.sum(0) + y.sum(0))
    x, y = rows(4, device), rows(3, device)
    close(model(x, y), x.sum(0) + y.sum(0))
    assert reasons(model)["batch_mismatch"] == 1


def test_arguments_that_a_forward_cannot_combine_raise_what_eager_raises(device):
    model = graphed(device, lambda m, x, y: x + y)
    for size in (4, 4, 4):
        model(rows(size, device), rows(size, device))
    with pytest.raises(RuntimeError, match="must match"):
        model(rows(4, device), rows(3, device))
    x, y = rows(4, device), rows(4, device)
    close(model(x, y), x + y)


class Mixes(nn.Module):
    def forward(self, x, positions):
        return x + positions.sum(0).unsqueeze(-1)


def test_an_ambiguous_call_has_a_graph_of_its_shapes_unless_sizes_were_chosen(device):
    model = sg.wrap(Mixes().eval())
    make = lambda size: ((rows(size, device), rows(3, device, size)), {})  # noqa: E731
    assert check_sizes(model, make, (3, 3, 3, 3)) >= 2
    assert check_sizes(model, make, (5, 6, 5, 5, 3, 3, 3, 7, 7, 3)) > 4
    assert "ambiguous_batch_dim" not in reasons(model)


def test_capture_graphs_refuses_an_ambiguous_example(device):
    model = sg.wrap(Mixes().eval(), progress=False)
    with pytest.raises(sg.InputError, match="more than one dimension of 3"):
        model.capture_graphs(rows(3, device), rows(3, device, 3))


@pytest.mark.proofs
def test_sizes_that_must_not_be_padded_have_graphs_of_their_own_unless_sizes_were_chosen(device):
    """Up to `max_signatures`, so that traffic of any size does not fill the memory."""

    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    for module in (Noisy(), Centred()):
        model = sg.wrap(module.eval(), max_signatures=2)
        for call in range(24):
            x = rows((3, 5, 6, 4)[call % 4], device)
            torch.manual_seed(call)
            answer = model(x)
            torch.manual_seed(call)
            assert torch.allclose(answer, module(x), atol=1e-5)
        served = {graph.size for graph in model.graph_stats.graphs.values() if graph.replays}
        assert 4 in served
        assert len(served & {3, 5, 6}) == 2
        assert reasons(model).keys() & {"size_not_captured", "padding_shows"}
