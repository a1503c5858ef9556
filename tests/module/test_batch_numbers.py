"""A number that the forward computes from the batch size shows under padding, however little it changes the answer."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import simplegraph as sg
from tests.module.answers import reasons
from tests.module.functions import WIDTH

pytestmark = [pytest.mark.usefixtures("nothing_left_behind", "no_grad"), pytest.mark.proofs]

# What a proof allows between two batch sizes in bfloat16 is more than a summand of this weight makes.
FAINT = 1e-2

SHOWING = {
    "divided by rows": lambda m, x: x / len(x),
    "times a share": lambda m, x: x * (1 / x.shape[0]),
    "mean of a mask": lambda m, x: torch.where(x > 0, x, x.sum() / len(x)),
    "scaled by a root": lambda m, x: F.gelu(x) * math.sqrt(x.shape[0]),
    "faint": lambda m, x: x + FAINT * len(x),
    "faint weight": lambda m, x: torch.add(x, x, alpha=FAINT * len(x)),
    "faint where": lambda m, x: torch.where(x > 0, x, FAINT * len(x)),
    "faint fill": lambda m, x: x.masked_fill(x > 0, FAINT * len(x)),
    "faint tensor": lambda m, x: x + torch.tensor(FAINT * len(x), dtype=x.dtype, device=x.device),
    "faint full": lambda m, x: x + torch.full((), FAINT * len(x), dtype=x.dtype, device=x.device),
    "faint item": lambda m, x: set_column(x.clone(), FAINT * len(x)),
    "faint ramp": lambda m, x: x + FAINT * torch.linspace(0, 1, len(x), device=x.device, dtype=x.dtype)[:, None],
    "faint epsilon": lambda m, x: F.layer_norm(x, (WIDTH,), eps=FAINT * len(x)),
}

HIDDEN = {
    "positions": lambda m, x: x + torch.arange(len(x), device=x.device)[:, None] * 0 + 1,
    "clamped indices": lambda m, x: x + m.table[m.order[: len(x)].clamp(max=len(x) - 1)] * 0,
    "divided indices": lambda m, x: x + (m.order[: len(x)] // len(x))[:, None] * 0,
    "dropout": lambda m, x: F.dropout(x, 0.5, training=False) * 2,
    "attention scale": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], scale=0.3)[:, 0],
    "layer norm": lambda m, x: F.layer_norm(x, (WIDTH,), eps=1e-3),
    "shapes": lambda m, x: (x.reshape(len(x) * WIDTH, 1) * 0.5).view(len(x), WIDTH),
    "made by rows": lambda m, x: x * torch.ones(len(x), 1, device=x.device, dtype=x.dtype),
    "a whole number": lambda m, x: x + (m.order[: len(x)] + torch.full((), len(x), device=x.device))[:, None] * 0,
    "chunks": lambda m, x: torch.cat([part * 0.5 for part in x.split(1)]),
}


def set_column(x, value):
    x[:, 0] = value
    return x


class Computing(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.randn(16, WIDTH))
        self.register_buffer("order", torch.arange(16))

    def forward(self, x):
        return self.function(self, x)


def graphed(device, function, **settings):
    settings = {"capture_sizes": [4, 8], "progress": False, "batch_dims": {"x": 0}} | settings
    return sg.wrap(Computing(function).to(device).eval(), **settings)


def assert_eager(model, sizes, device, dtype):
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    for size in sizes:
        x = torch.rand(size, WIDTH, device=device).to(dtype) + 1
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), **tolerance)


CALLS = (4, 3, 3, 4, 2, 4, 1, 5, 8, 7, 8, 6, 3, 2, 1)


@pytest.mark.parametrize("verify", [1, 0], ids=["proven", "unproven"])
@pytest.mark.parametrize("upfront", [True, False], ids=["upfront", "lazy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", SHOWING.values(), ids=SHOWING)
def test_no_replay_uses_the_number_of_another_batch_size(device, function, dtype, upfront, verify):
    model = graphed(device, function, verify=verify)
    if upfront:
        model.capture_graphs(torch.randn(8, WIDTH, device=device, dtype=dtype))
    assert_eager(model, CALLS, device, dtype)
    assert reasons(model)["padding_shows"] >= 4
    assert model.graph_stats.padded_tokens == 0
    assert model.graph_stats.replays > 0  # exact sizes are graphs all the same


@pytest.mark.parametrize("upfront", [True, False], ids=["upfront", "lazy"])
@pytest.mark.parametrize("function", HIDDEN.values(), ids=HIDDEN)
def test_what_follows_the_batch_size_and_is_no_number_of_the_arithmetic_is_padded(device, function, upfront):
    model = graphed(device, function)
    if upfront:
        model.capture_graphs(torch.randn(8, WIDTH, device=device))
    assert_eager(model, CALLS, device, torch.float32)
    assert "padding_shows" not in reasons(model)
    assert model.graph_stats.padded_tokens > 0


def attended(m, x):
    """Causal attention of three tokens, by a mask for three rows and more."""
    tokens = torch.stack([x, x * 0.5, x * 0.25], 1)[:, None]
    mask = torch.ones(3, 3, dtype=torch.bool, device=x.device).tril() if len(x) > 2 else None
    return F.scaled_dot_product_attention(tokens, tokens, tokens, mask, is_causal=mask is None, scale=0.3)[:, 0, 2]


def test_a_default_that_torch_passes_at_some_sizes_is_no_number_of_the_batch(device, inference_mode):
    """Six families of transformers were not padded: with a mask torch leaves the default out that it passes before."""
    model = graphed(device, attended, capture_sizes=[1, 2, 4, 8])
    assert_eager(model, (1, 2, 3, 1, 3, 2, 5, 7, 8, 6, 3, 5), device, torch.float32)
    assert "padding_shows" not in reasons(model)
    assert model.graph_stats.padded_tokens > 0


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_a_number_that_is_the_default_at_one_size_shows(device, most):
    model = graphed(device, lambda m, x: torch.add(x, x, alpha=most if len(x) > 3 else 1.5))
    assert_eager(model, CALLS, device, torch.float32)
    assert reasons(model)["padding_shows"] >= 4
    assert "for 3 rows" in model.graph_stats.explained(sg.Reason.PADDING_SHOWS)


def test_a_number_that_no_captured_size_shows_is_found_by_the_proof(device):
    model = graphed(device, lambda m, x: x + FAINT * (len(x) % 4))
    model.capture_graphs(torch.randn(8, WIDTH, device=device, dtype=torch.bfloat16))
    assert_eager(model, CALLS, device, torch.bfloat16)
    assert reasons(model)["padding_shows"] >= 4
    assert {graph.proof for graph in model.graph_stats.graphs.values()} == {"exact"}


def test_a_number_that_a_proof_finds_is_raised_where_failures_are(device):
    model = graphed(device, lambda m, x: x + FAINT * (len(x) % 4), on_capture_failure="raise")
    model.capture_graphs(torch.randn(8, WIDTH, device=device, dtype=torch.bfloat16))
    with pytest.raises(sg.VerificationError, match=r"from the batch size goes into aten\.add\.Tensor"):
        model(torch.randn(3, WIDTH, device=device, dtype=torch.bfloat16))


def test_a_number_that_a_later_batch_size_shows_is_raised_where_failures_are(device):
    model = graphed(device, lambda m, x: x + FAINT * (len(x) == 5), on_capture_failure="raise")
    model.capture_graphs(torch.randn(8, WIDTH, device=device, dtype=torch.bfloat16))
    for _ in range(2):
        model(torch.randn(7, WIDTH, device=device, dtype=torch.bfloat16))  # is padded, and so is half of it
    with pytest.raises(sg.VerificationError, match=r"from the batch size goes into aten\.add\.Tensor"):
        model(torch.randn(5, WIDTH, device=device, dtype=torch.bfloat16))


@pytest.mark.parametrize("verify", [1, 0], ids=["proven", "unproven"])
def test_a_number_that_the_capture_is_first_to_show_spoils_no_call(device, verify):
    model = graphed(device, lambda m, x: x + FAINT * (len(x) // 4), verify=verify)
    assert_eager(model, (3, 2, 3, 2, 1, 3, 4, 4), device, torch.bfloat16)
    assert model.graph_stats.padded_tokens == 0
    assert model.graph_stats.replays > 0


def test_the_warning_names_the_operator_the_line_and_what_to_do(device, caplog):
    model = graphed(device, lambda m, x: x / len(x))
    model.capture_graphs(torch.randn(8, WIDTH, device=device))
    assert_eager(model, (3, 3, 5, 4, 3), device, torch.float32)
    said = [record.getMessage() for record in caplog.records if "batch size goes into" in record.getMessage()]
    assert len(said) == 1
    assert "a number that the forward computes from the batch size goes into aten.div.Tensor" in said[0]
    assert "test_batch_numbers.py:" in said[0]
    assert "x / len(x)" in said[0]
    assert "capture_sizes" in said[0]
    assert "aten.div.Tensor" in model.graph_stats.explained(sg.Reason.PADDING_SHOWS)


def test_numbers_of_an_eager_break_may_change_from_call_to_call(device):
    scale = [0.0]

    @sg.eager_break
    def scaled(x):
        scale[0] += 0.5
        return x * scale[0]

    model = graphed(device, lambda m, x: scaled(x * 2) * 0.5, mode="PIECEWISE")
    for size in (2, 3, 4, 3, 1, 3):
        x = torch.randn(size, WIDTH, device=device)
        torch.testing.assert_close(model(x), x * scale[0])
    assert "padding_shows" not in reasons(model)
    assert model.graph_stats.padded_tokens > 0


def test_a_number_that_changes_for_another_reason_is_not_taken_for_one_of_the_batch_size(device):
    scale = [1.0]
    model = graphed(device, lambda m, x: x * scale[0])
    for scale[0] in (1.0, 2.0):
        assert_eager(model, (4,), device, torch.float32)  # the same size, another number
    assert_eager(model, (3, 3, 3, 3, 2), device, torch.float32)
    assert "padding_shows" not in reasons(model)
    assert model.graph_stats.padded_tokens > 0


def test_a_number_of_a_model_that_was_changed_since_is_forgotten(device):
    model = graphed(device, lambda m, x: x * m.table[0] * len(m.table))
    assert_eager(model, (2, 4, 4, 4), device, torch.float32)
    model.table = torch.randn(24, WIDTH, device=device)
    assert_eager(model, (3, 3, 3, 3), device, torch.float32)
    assert "padding_shows" not in reasons(model)
    assert model.graph_stats.padded_tokens > 0


def test_without_padding_nothing_is_said(device, caplog):
    model = graphed(device, lambda m, x: x / len(x), padding=False)
    assert_eager(model, (4, 4, 3, 8, 8, 4), device, torch.float32)
    assert model.graph_stats.replays > 0
    assert not [record for record in caplog.records if "goes into" in record.getMessage()]


@sg.eager_break
def doubled_if_positive(h, x):
    return h * (2 if x[0, 0].item() > 0 else 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_number_that_depends_on_data_is_not_said_to_follow_the_batch_size(device, seed):
    """The advice must be about the read and the mode: no size and no padding would help."""
    torch.manual_seed(seed)
    model = sg.wrap(Computing(lambda m, x: doubled_if_positive(x, x)).to(device).eval(), progress=False)
    for sign, count in ((1, 3), (-1, 4), (1, 3), (-1, 4), (1, 3), (-1, 4)):
        x = sign * torch.rand(count, WIDTH, device=device)
        torch.testing.assert_close(model(x), doubled_if_positive(x, x))
    assert sg.Reason.PADDING_SHOWS not in model.graph_stats.eager
    (said,) = {message.partition("\n")[2] for message in model.graph_stats.failures.values()}
    assert "Python read back the value of a tensor" in said
    assert "set mode='PIECEWISE'" in said


@pytest.mark.parametrize("verify", [0, 1])
def test_a_number_of_the_batch_size_is_found_though_it_is_read_back(device, verify):
    """A graph holds reads of the module's own memory, also if their value is computed from the batch size."""
    model: nn.Module = Computing(lambda m, x: x + FAINT * (m.scale * len(x)).item()).to(device).eval()
    model.register_buffer("scale", torch.tensor(0.5, device=device))
    served = sg.wrap(model, capture_sizes=[4], verify=verify, progress=False)
    for count in (4, 4, 4, 3, 3, 3):
        x = torch.randn(count, WIDTH, device=device)
        torch.testing.assert_close(served(x), model.forward(x))
    assert reasons(served).get("padding_shows"), served.graph_report()
