"""Metrics agree with the counters, cost nothing per call, and are what the dashboard shows."""

from __future__ import annotations

import itertools
import random
import re
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg

prometheus_client = pytest.importorskip("prometheus_client")
from docs.tools import dashboard  # noqa: E402
from simplegraph.integrations import prometheus  # noqa: E402
from simplegraph.manager.stats import GraphCounters  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_grad")


class Served(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.fixture
def registry() -> Any:
    """A registry with nothing but our metrics."""
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(registry)
    return registry


def values(registry: Any, stats: sg.GraphHolder | Any) -> dict[str, Any]:
    """The scraped values of one wrapper; with a reason, by that."""
    found: dict[str, Any] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.labels.get("number") == str(stats.number):
                assert sample.labels["wrapper"] == stats.name
                name = sample.name.removeprefix("simplegraph_")
                reason = sample.labels.get("reason")
                if reason is None:
                    found[name] = sample.value
                else:
                    found.setdefault(name, {})[reason] = sample.value
    return found


def test_metrics_agree_with_the_counters_after_a_thousand_mixed_calls(device: torch.device, registry: Any) -> None:
    model = sg.wrap(Served().to(device).eval(), capture_sizes=[2, 4, 8], progress=False)
    twin = sg.wrap(Served().to(device).eval(), capture_sizes=[2], progress=False)  # of the same name
    chance = random.Random(0)
    for call in range(1000):
        x = torch.zeros(chance.randint(1, 9), 4, device=device)
        if call % 100 == 99:
            model.linear.weight = nn.Parameter(model.linear.weight.clone())  # stale: captured again
        with sg.eager() if chance.random() < 0.1 else sg.describe():
            model(x)
    twin(torch.zeros(3, 4, device=device))
    stats = model.graph_stats
    found = values(registry, stats)
    assert stats.replays > 500
    assert stats.recaptures >= 5
    assert found.pop("eager_calls_total") == {reason.value: count for reason, count in stats.eager.items()}
    assert sum(stats.eager.values()) + found["replays_total"] == 1000
    sizes = sum(size * count for size, count in stats.batch_sizes.items())
    assert 0 < found["rows_total"] <= sizes
    assert found == {
        "captures_total": stats.captures,
        "replays_total": stats.replays,
        "rows_total": stats.replayed_tokens,
        "longest_stall_seconds": stats.longest_stall,
        "padding_rows_total": stats.padded_tokens,
        "recaptures_total": stats.recaptures,
        "flushes_total": 0,
        "graphs": len(stats.graphs),
        "graph_memory_bytes": stats.graph_bytes,
        "capture_seconds": stats.capture_seconds,
        "proof_seconds": sum(graph.proof_seconds for graph in stats.graphs.values()),
        "unverified_graphs": 0,
        "refused_sizes": 0,
    }
    assert values(registry, twin.graph_stats)["eager_calls_total"] == {"batch_too_large": 1}


def test_a_wrapper_that_is_gone_is_scraped_no_more_and_an_unused_one_not_yet(
    device: torch.device, registry: Any
) -> None:
    model = sg.wrap(Served().to(device).eval(), capture_sizes=[2], progress=False)
    stats = model.graph_stats
    assert values(registry, stats) == {}
    model.capture_graphs(torch.zeros(2, 4, device=device))
    assert values(registry, stats)["captures_total"] == 1
    model.reset_graphs()
    assert values(registry, stats)["graphs"] == 0
    del model
    assert values(registry, stats) == {}


def test_a_counter_never_falls_while_graphs_are_dropped_by_another_thread(device: torch.device, registry: Any) -> None:
    """Prometheus takes a counter that falls for a restart, and adds all of it once more."""
    model = sg.wrap(Served().to(device).eval(), capture_sizes=[2], progress=False, verify=0)
    x = torch.zeros(2, 4, device=device)

    def drop() -> None:
        with torch.no_grad():
            for _ in range(4):
                for _ in range(4):
                    model(x)
                model.reset_graphs()

    thread = threading.Thread(target=drop)
    thread.start()
    seen = [0.0]
    while thread.is_alive():
        seen.append(values(registry, model.graph_stats).get("replays_total", 0.0))
    thread.join()
    assert seen == sorted(seen)
    assert values(registry, model.graph_stats)["replays_total"] > 0


def test_a_scrape_between_the_moves_of_a_total_sees_no_counter_fall(device: torch.device, registry: Any) -> None:
    """A dropped graph's total is its wrapper's a moment later: each of the two moments is scraped here."""
    model = sg.wrap(Served().to(device).eval(), capture_sizes=[2], progress=False, verify=0)
    for _ in range(5):
        model(torch.zeros(2, 4, device=device))
    stats = model.graph_stats
    before = values(registry, stats)
    graphs = dict(stats.graphs)
    stats.graphs.clear()
    assert stats.replays < before["replays_total"], "the moment that this is about"
    between = values(registry, stats)
    assert {name: between[name] for name in between if name.endswith("_total")} == {
        name: before[name] for name in before if name.endswith("_total")
    }
    assert (before["graphs"], between["graphs"]) == (1, 0), "what is no counter is as it is"
    stats.graphs.update(graphs)
    for _ in range(3):
        model(torch.zeros(2, 4, device=device))
    assert values(registry, stats)["replays_total"] == before["replays_total"] + 3


def test_replays_know_nothing_of_scrapes(device: torch.device, registry: Any) -> None:
    model = sg.wrap(Served().to(device).eval(), capture_sizes=[2, 4, 8], progress=False)
    model.capture_graphs(torch.zeros(8, 4, device=device))
    (own,) = [wrapper for wrapper in sg.wrappers() if wrapper.stats is model.graph_stats]
    prometheus_client.generate_latest(registry)
    assert "prometheus" not in str(vars(own)).lower()


def calls_of_a_scrape(registry: Any) -> int:
    """Count the Python functions that a scrape calls."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        prometheus_client.generate_latest(registry)
    finally:
        sys.setprofile(None)
    return calls


def test_a_scrape_of_many_graphs_is_quick(registry: Any) -> None:
    """It calls a few functions for each graph, however many rows were padded."""
    chance, sizes = random.Random(0), sg.default_sizes(512)
    managers = [sg.CudaGraphManager(device="cpu", progress=False) for _ in range(5)]
    without = calls_of_a_scrape(registry)
    for manager in managers:
        for before, size in itertools.pairwise([0, *sizes]):
            counters = GraphCounters(f"size {size}", "FULL", size, 0.1, 2**20)
            counters.paddings += [chance.randrange(100) for _ in range(size - before)]
            manager.stats.graphs[size] = counters
        manager.stats.captures = len(sizes)
    assert calls_of_a_scrape(registry) - without <= 26 * len(managers) * len(sizes)
    assert values(registry, managers[0].stats)["graphs"] == len(sizes) == 51


def test_the_dashboard_shows_every_metric_and_no_other(registry: Any) -> None:
    assert dashboard.DASHBOARD.read_text(encoding="utf-8") == dashboard.text(), "python -m docs.tools writes it again"
    queries = [target["expr"] for panel in dashboard.dashboard()["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"simplegraph_\w+", query)}
    counters = {name for name, kind in prometheus.METRICS.items() if "Counter" in kind.kind.__name__}
    assert named == {f"{name}_total" if name in counters else name for name in prometheus.METRICS}
    labels = {label for query in queries for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
    assert labels <= {"wrapper", "number", "reason"}


def test_a_second_registration_is_refused_and_the_first_serves_on(registry: Any) -> None:
    with pytest.raises(sg.ConfigError, match="call register once for each registry"):
        prometheus.register(registry)
    assert list(registry.collect())
