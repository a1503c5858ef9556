"""Forwards that leave tensors in containers or objects: such calls run eagerly, with the place in the reason.

Those that leave one in an attribute of a module are served: see `test_left_attributes`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason

pytestmark = pytest.mark.usefixtures("no_grad")


def _list(m: Any, y: Tensor) -> None:
    m.seen[:] = [y]


def _item_of_a_dict(m: Any, y: Tensor) -> None:
    m.table["last"] = y


def _object(m: Any, y: Tensor) -> None:
    m.space.last = y


LEAVES: dict[str, tuple[Callable[[Any, Tensor], None], str, Callable[[Any], Any]]] = {
    "list": (_list, "seen", lambda m: m.seen[0]),
    "item of a dict": (_item_of_a_dict, "table.last", lambda m: m.table["last"]),
    "attribute of an object": (_object, "space.last", lambda m: m.space.last),
}


class Leaves(nn.Module):
    def __init__(self, leave: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.leave = (leave,)
        self.seen, self.table, self.space = [], {}, types.SimpleNamespace(last=None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.leave[0](self, y)
        return y * 2


@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize("case", LEAVES)
def test_every_call_leaves_what_eager_leaves_and_the_place_is_named(
    case: str, upfront: bool, device: torch.device
) -> None:
    leave, place, held = LEAVES[case]
    torch.manual_seed(0)
    module, twin = Leaves(leave).to(device).eval(), Leaves(leave).to(device).eval()
    twin.load_state_dict(module.state_dict())
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    containers = module.seen, module.table, module.space
    if upfront:
        model.capture_graphs(torch.zeros(2, 4, device=device))
        module.space.last = None
    for _ in range(6):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        torch.testing.assert_close(held(module), held(twin))
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 3
    assert place in "".join(model.graph_stats.failures.values())
    assert (module.seen, module.table, module.space) == containers
    assert type(module) is Leaves
    assert "last" not in vars(Leaves)


def test_a_tensor_that_is_left_is_named_with_its_remedy(device: torch.device) -> None:
    model = sg.wrap(Leaves(_list).to(device).eval(), capture_sizes=[2], progress=False)
    for _ in range(3):
        model(torch.randn(2, 4, device=device))
    (why,) = model.graph_stats.failures.values()
    assert "`seen` would keep a tensor that exists only inside the graph" in why
    assert "Return it instead" in why
