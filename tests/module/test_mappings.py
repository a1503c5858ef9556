"""Arguments and outputs in mappings of other classes than dict: served as dicts are, and of their own class."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import Reason
from simplegraph.base.nested import flatten
from tests.module.answers import reasons

pytestmark = pytest.mark.usefixtures("no_grad")
WIDTH = 4


class Record(Mapping):  # type: ignore[type-arg]
    """A mapping of a user's own, which converts what it is made from."""

    def __init__(self, **items: Any) -> None:
        self._items = {name: item.clone() for name, item in items.items()}

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class AttributeDict(dict):  # type: ignore[type-arg]
    """A dict with attributes beside its items, that refuses to be written."""

    def __setitem__(self, name: str, item: Any) -> None:
        raise TypeError("read-only")


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """A tokenizer's result: beside the items it holds an object for each row."""

    def __init__(self, items: dict[str, Any], rows: list[Any] | None = None, sequences: int = 1) -> None:
        super().__init__(items)
        self._encodings = rows
        self.sequences = sequences


class Sum(nn.Module):
    """Takes a mapping and returns one of the same class."""

    def forward(self, batch: Any) -> Any:
        total = batch["a"] * 2 + batch["b"].sum(-1, keepdim=True)
        items = {"total": total, "mean": total.mean(-1)}
        return type(batch)(**items) if isinstance(batch, (Record, AttributeDict)) else type(batch)(items)


MAPPINGS: dict[str, Any] = {
    "UserDict": collections.UserDict,
    "of a user's own class": lambda items: Record(**items),
    "derived from dict": lambda items: AttributeDict(**items),
    "a tokenizer's": lambda items: Encoding(items, [object() for _ in items["a"]]),
}


def batch_of(rows: int, device: torch.device) -> dict[str, Tensor]:
    return {"a": torch.randn(rows, WIDTH, device=device), "b": torch.randn(rows, 3, device=device)}


@pytest.mark.proofs
@pytest.mark.parametrize("kind", MAPPINGS)
def test_a_mapping_is_served_padded_and_comes_back_as_its_class(kind: str, device: torch.device) -> None:
    model = sg.wrap(Sum().to(device).eval(), capture_sizes=[2, 4], progress=False)
    for rows in (2, 4, 3, 2, 4, 3, 2, 3):
        batch = MAPPINGS[kind](batch_of(rows, device))
        answer, expected = model(batch), sg.unwrap(model)(batch)
        assert type(answer) is type(expected)
        assert list(answer) == ["total", "mean"]
        for name in answer:
            torch.testing.assert_close(answer[name], expected[name])
    assert model.graph_stats.replays >= 3
    assert set(model.graph_stats.eager) <= {Reason.FIRST_CALL, Reason.PROOF, Reason.WARMUP}


def test_leaves_are_named_after_the_items(device: torch.device) -> None:
    model = sg.wrap(Sum().to(device).eval(), capture_sizes=[2], batch_dims={"batch.a": 0, "batch.b": 0}, progress=False)
    for kind in MAPPINGS:
        model(MAPPINGS[kind](batch_of(2, device)))
        model(MAPPINGS[kind](batch_of(2, device)))
    assert model.graph_stats.captures == len(MAPPINGS)
    assert {"batch.a", "batch.b"} <= set(model.static_inputs())


class Shifted(nn.Module):
    def forward(self, x: Tensor, batch: Any) -> Any:
        return x + batch["a"]


def test_a_read_only_view_runs_eagerly_and_says_so(device: torch.device) -> None:
    model = sg.wrap(Shifted().to(device).eval(), capture_sizes=[2], progress=False)
    for _ in range(3):
        x, batch = torch.randn(2, WIDTH, device=device), types.MappingProxyType(batch_of(2, device))
        assert torch.equal(model(x, batch), x + batch["a"])
    assert model.graph_stats.replays == 0
    assert reasons(model) == {Reason.OPAQUE_ARGUMENT: 3}


class Scaled(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch["a"] * batch.sequences


def test_a_number_beside_the_items_is_part_of_the_key(device: torch.device) -> None:
    model = sg.wrap(Scaled().to(device).eval(), capture_sizes=[2], progress=False)
    for sequences in (1, 2, 1, 2, 1, 2):
        batch = Encoding(batch_of(2, device), sequences=sequences)
        assert torch.equal(model(batch), batch["a"] * sequences)
    assert model.graph_stats.captures == 2


class CountsRows(nn.Module):
    """Reads what lies beside the items, which changes from call to call."""

    def forward(self, batch: Any) -> Any:
        return batch["a"] * batch._encodings[0]


def test_what_a_graph_cannot_watch_beside_the_items_is_never_replayed_stale(device: torch.device) -> None:
    model = sg.wrap(CountsRows().to(device).eval(), capture_sizes=[2], progress=False)
    for factor in (1, 2, 3, 4):
        batch = Encoding(batch_of(2, device), [Factor(factor), object()])
        assert torch.equal(model(batch), batch["a"] * factor)
    assert model.graph_stats.replays == 0
    assert "holds beside its items" in str(model.graph_report())
    assert reasons(model)[Reason.CAPTURE_FAILED] >= 2


class Factor:
    """An object that a tensor can be multiplied by."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __rmul__(self, other: Any) -> Any:
        return other * self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] * args[1].value


class ReturnsEncoding(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Encoding({"a": x * 2}, [object()])


def test_an_output_that_holds_other_objects_is_never_rebuilt_without_them(device: torch.device) -> None:
    model = sg.wrap(ReturnsEncoding().eval(), capture_sizes=[2], progress=False)
    for _ in range(3):
        assert isinstance(model(torch.ones(2, device=device))._encodings[0], object)
    assert model.graph_stats.replays == 0
    assert reasons(model)[Reason.UNSUPPORTED_OUTPUT]


class AddsAnItem(nn.Module):
    def forward(self, batch: Any) -> Any:
        batch["total"] = batch["a"].sum(-1)
        return batch["total"] * 2


def test_an_item_that_the_forward_adds_arrives_at_every_call(device: torch.device) -> None:
    model = sg.wrap(AddsAnItem().eval(), capture_sizes=[2], progress=False)
    for _ in range(3):
        batch = collections.UserDict(batch_of(2, device))
        model(batch)
        assert torch.equal(batch["total"], batch["a"].sum(-1))
    assert reasons(model)[Reason.CHANGED_ARGUMENTS]


class Slotted(dict):  # type: ignore[type-arg]
    __slots__ = ("hidden",)


def test_a_class_with_hidden_state_stays_whole() -> None:
    hidden = Slotted(a=torch.ones(1))
    assert flatten(hidden)[0] == [hidden]
    chained = flatten(collections.ChainMap({"a": torch.ones(1)}, {"b": torch.ones(2)}))
    rebuilt = chained[1].unflatten(chained[0])
    assert [len(part) for part in rebuilt.maps] == [1, 1]


def test_a_mapping_that_refers_to_itself_ends() -> None:
    looped = collections.UserDict({"a": torch.ones(1)})
    looped.parent = looped  # type: ignore[attr-defined]
    leaves, _ = flatten(looped)
    assert repr(leaves[1]) == "a UserDict beside the items of a mapping"


def test_an_upfront_capture_refuses_it_and_says_so(device: torch.device) -> None:
    """Without raising: eager calls of the model read it as ever."""
    model = sg.wrap(CountsRows().to(device).eval(), capture_sizes=[2], progress=False)
    batch = Encoding(batch_of(2, device), [Factor(3), object()])
    summary = model.capture_graphs(batch)
    assert summary.captured == 0
    assert "Read the items alone" in str(next(iter(summary.failed.values())))
    assert torch.equal(model(batch), batch["a"] * 3)
