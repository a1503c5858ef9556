"""Versions of dicts say where to look: a steady call looks nowhere, and no change is missed, not even without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.guard import guards, versions
from tests.module.answers import close
from tests.module.stateful import captured, rows

pytestmark = pytest.mark.usefixtures("no_grad")

needs_versions = pytest.mark.skipif(versions.dict_version is None, reason="this torch has no versions of dicts")


@pytest.fixture
def looked_at(monkeypatch):
    """Collects the attributes that calls look at."""
    looked, hold = [], guards._Entries.hold
    monkeypatch.setattr(guards._Entries, "hold", lambda self, held: looked.append(held) or hold(self, held))
    return looked


def served(model, module, device):
    before = model.graph_stats.replays
    x = rows(4, device)
    close(model(x), module(x))
    return model.graph_stats.replays - before


@needs_versions
def test_a_steady_call_looks_at_no_attribute(device, looked_at):
    model, module = captured(device)
    served(model, module, device)
    looked_at.clear()
    assert all(served(model, module, device) for _ in range(5))
    assert looked_at == []


# Changes that mean nothing to a graph.
MEANINGLESS = {
    "there and back": lambda m: (m.linear.train(), m.linear.eval()),
    "deleted and stored again": lambda m: setattr(m.linear, "in_features", vars(m.linear).pop("in_features")),
    "an entry of another name": lambda m: (setattr(m.linear, "note", 1), delattr(m.linear, "note")),
}


@needs_versions
@pytest.mark.parametrize("change", MEANINGLESS)
def test_a_change_that_means_nothing_costs_one_look_and_no_capture(device, looked_at, change):
    model, module = captured(device)
    served(model, module, device)
    looked_at.clear()
    MEANINGLESS[change](module)
    assert served(model, module, device)
    assert [held is vars(module.linear) for held in looked_at] == [True]
    assert all(served(model, module, device) for _ in range(3))
    assert len(looked_at) == 1
    assert model.graph_stats.recaptures == 0


@pytest.mark.parametrize("with_versions", [True, False])
def test_a_change_that_another_thread_makes_during_a_comparison_is_seen_by_the_next_call(
    device, monkeypatch, with_versions
):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    module = nn.Sequential(nn.Linear(6, 6, device=device), nn.LeakyReLU(0.5)).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    hold = guards._Entries.hold

    def hold_and_write(entries, attributes):
        held = hold(entries, attributes)
        module[1].negative_slope = 0.1
        return held

    monkeypatch.setattr(guards._Entries, "hold", hold_and_write)
    module[1].train()  # a reason to look
    module[1].eval()
    model(rows(4, device))
    monkeypatch.setattr(guards._Entries, "hold", hold)
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))


def test_a_child_that_a_thread_adds_after_the_survey_reads_as_changed(device):
    """An error of the guards would be an error of the user's call."""
    module = nn.Sequential(nn.Linear(6, 6, device=device))
    surveyed = list(module.modules())
    module.append(nn.ReLU())
    assert not guards.Reading(surveyed, ()).same(vars(module))
    assert guards.Reading(list(module.modules()), ()).same(vars(module))


@pytest.mark.parametrize("with_versions", [True, False])
def test_an_equal_dict_in_place_of_an_objects_own_costs_no_capture(device, monkeypatch, with_versions):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    model, module = captured(device)
    for _ in range(4):
        module.linear.__dict__ = dict(vars(module.linear))
        assert served(model, module, device)
    assert model.graph_stats.recaptures == 0


class Attributes(dict):
    pass


@pytest.mark.parametrize("with_versions", [True, False])
def test_a_dict_of_a_class_of_its_own_is_watched_too(device, monkeypatch, with_versions):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    module = nn.Sequential(nn.Linear(6, 6, device=device), nn.LeakyReLU(0.5)).eval()
    module[1].__dict__ = Attributes(vars(module[1]))
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    for slope in (0.1, 0.9):
        module[1].__dict__["negative_slope"] = slope
        for _ in range(4):
            served(model, module, device)
    assert model.graph_stats.replays > 0


@needs_versions
def test_many_attributes_cost_a_steady_call_nothing(device, looked_at):
    module = nn.Linear(6, 6, device=device).eval()
    vars(module).update((f"note{at}", at) for at in range(100_000))
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    looked_at.clear()
    assert served(model, module, device)
    assert looked_at == []
    module.note5 = "another"
    for _ in range(4):
        served(model, module, device)
    looked_at.clear()
    assert served(model, module, device)
    assert looked_at == []
    module.weight = nn.Parameter(torch.randn(6, 6, device=device), requires_grad=False)
    for _ in range(4):
        served(model, module, device)
    assert model.graph_stats.recaptures == 1


@pytest.mark.parametrize("with_versions", [True, False])
def test_modules_that_share_one_dict_are_served(device, monkeypatch, with_versions):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    first, second = nn.LeakyReLU(0.5), nn.LeakyReLU(0.5)
    second.__dict__ = first.__dict__
    module = nn.Sequential(nn.Linear(6, 6, device=device), first, second).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    first.negative_slope = 0.1
    for _ in range(4):
        served(model, module, device)
    assert served(model, module, device)
