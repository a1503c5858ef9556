"""What a failed capture advises, done: the same forward is captured, and answers as it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("inference_mode")
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, enable_nested_tensor=False)
MASK = nn.Transformer.generate_square_subsequent_mask(4)


def encoded(x: Tensor, **options: bool) -> Tensor:
    return ENCODER.to(x.device).eval()(x[:, None].expand(-1, 4, -1), mask=MASK.to(x.device), **options)


def matrix(x: Tensor) -> Tensor:
    return torch.eye(4, device=x.device) * 2


ADVICE: dict[str, tuple[Callable[[Tensor], Tensor], str, Callable[[Tensor], Tensor]]] = {
    "where": (
        lambda x: x[torch.where(x[:, 0] > -9)[0]],
        "torch.where(mask, x, y)",
        lambda x: torch.where(x[:, :1] > -9, x, x),
    ),
    "solve": (
        lambda x: torch.linalg.solve(matrix(x), x.T).T,
        "torch.linalg.solve_ex",
        lambda x: torch.linalg.solve_ex(matrix(x), x.T).result.T,
    ),
    "inverse": (
        lambda x: x @ torch.linalg.inv(matrix(x)),
        "torch.linalg.inv_ex",
        lambda x: x @ torch.linalg.inv_ex(matrix(x)).inverse,
    ),
    "inverse of a tensor": (
        lambda x: x @ matrix(x).inverse(),
        "torch.linalg.inv_ex",
        lambda x: x @ torch.linalg.inv_ex(matrix(x)).inverse,
    ),
    "cholesky_solve": (
        lambda x: torch.cholesky_solve(x[..., None], matrix(x).expand(len(x), 4, 4))[..., 0],
        "torch.linalg.solve_triangular",
        lambda x: torch.linalg.solve_triangular(
            matrix(x), torch.linalg.solve_triangular(matrix(x), x[..., None], upper=False), upper=True
        )[..., 0],
    ),
    "distribution": (
        # The default is False once torch.compile has run in the process.
        lambda x: torch.distributions.Normal(x, x.abs() + 1, validate_args=True).variance,
        "validate_args=False",
        lambda x: torch.distributions.Normal(x, x.abs() + 1, validate_args=False).variance,
    ),
    "encoder": (encoded, "is_causal=True", lambda x: encoded(x, is_causal=True)),
}


class Net(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_advised_is_captured(name: str, device: torch.device) -> None:
    run, said, better = ADVICE[name]
    bad, good = (sg.wrap(Net(each).eval(), capture_sizes=[2], progress=False) for each in (run, better))
    for _ in range(4):
        x = torch.rand(2, 4, device=device)
        torch.testing.assert_close(good(x), bad(x))
    (failure,) = bad.graph_stats.failures.values()
    assert said in failure.rpartition("\n")[2]
    assert good.graph_stats.replays >= 2


def test_a_users_own_solve_is_not_taken_for_torchs(device: torch.device) -> None:
    def solve(x: Tensor) -> float:
        return float(x.sum())

    model = sg.wrap(Net(lambda x: x * solve(x)).eval(), capture_sizes=[2], progress=False)
    for _ in range(3):
        model(torch.rand(2, 4, device=device))
    assert "solve_ex" not in next(iter(model.graph_stats.failures.values()))


def test_one_cycle_of_the_momentum_is_named_with_the_argument_that_leaves_it(device: torch.device) -> None:
    with torch.inference_mode(False):
        replays = {}
        for cycle in (True, False):
            net = nn.Linear(4, 4, device=device)
            optimizer = torch.optim.AdamW(net.parameters(), fused=True)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100, cycle_momentum=cycle)

            def step(x: Tensor, net: nn.Linear = net, optimizer: torch.optim.AdamW = optimizer) -> Tensor:
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            graphed = sg.train_step(step, optimizers=optimizer, progress=False)
            for _ in range(20):
                graphed(torch.rand(2, 4, device=device))
                schedule.step()
            replays[cycle] = graphed.graph_stats.replays
            assert ("cycle_momentum=False" in str(graphed.graph_report())) == cycle
    assert replays[True] == 0
    assert replays[False] > 10


def test_a_cache_of_a_transformers_model_leads_to_graph_generation(device: torch.device) -> None:
    class Decoder(nn.Module):
        def forward(self, x: Tensor, past_key_values: object = None) -> Tensor:
            return x * 2

    model = sg.wrap(Decoder().eval(), capture_sizes=[2], progress=False)
    for _ in range(3):
        model(torch.ones(2, 4, device=device), past_key_values=object())
    assert "graph_generation" in str(model.graph_report())
