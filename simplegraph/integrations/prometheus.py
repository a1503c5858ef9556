"""Metrics of every wrapper in the process for Prometheus, read from the counters at each scrape and at no call.

from simplegraph.integrations import prometheus

prometheus.register()                    # once, beside the program's other metrics
prometheus_client.start_http_server(9090)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from simplegraph.base.errors import ConfigError, install_command
from simplegraph.doctor.audit import FOUND, KINDS
from simplegraph.manager.stats import GraphStats, wrappers

try:
    from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ModuleNotFoundError as error:
    raise ConfigError(
        f"simplegraph.integrations.prometheus needs prometheus_client: {install_command('prometheus')}"
    ) from error

__all__ = ["METRICS", "GraphCollector", "register"]

_LABELS = ("wrapper", "number")  # names of classes repeat, numbers do not


class MetricKind(NamedTuple):
    """A metric of each wrapper.

    Attributes:
        kind: of metric; help: its line of explanation; label: one more label, or "".
        read: counters -> the value by that label's value; by "" if there is none.
    """

    kind: type[Metric]
    help: str
    read: Callable[[GraphStats], Mapping[str, float]]
    label: str = ""


def _one(read: Callable[[GraphStats], float]) -> Callable[[GraphStats], Mapping[str, float]]:
    return lambda stats: {"": read(stats)}


_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
# By name; those of counters end in _total when they are scraped.
METRICS = {
    "simplegraph_captures": MetricKind(_COUNTER, "Captures that succeeded.", _one(lambda stats: stats.captures)),
    "simplegraph_replays": MetricKind(_COUNTER, "Replays of graphs.", _one(lambda stats: stats.replays)),
    "simplegraph_eager_calls": MetricKind(
        _COUNTER,
        "Calls that ran eagerly.",
        lambda stats: {why.value: n for why, n in stats.eager.copy().items()},
        "reason",
    ),
    "simplegraph_slower_calls": MetricKind(
        _COUNTER,
        "Calls that graphs served in a slower way than asked for.",
        lambda stats: {why.value: n for why, n in stats.slower.copy().items()},
        "reason",
    ),
    "simplegraph_rows": MetricKind(
        _COUNTER, "Real rows or tokens in replays.", _one(lambda stats: stats.replayed_tokens)
    ),
    "simplegraph_padding_rows": MetricKind(
        _COUNTER, "Padding rows or tokens in replays.", _one(lambda stats: stats.padded_tokens)
    ),
    "simplegraph_recaptures": MetricKind(
        _COUNTER, "Times all graphs were dropped, since what they read had moved.", _one(lambda stats: stats.recaptures)
    ),
    "simplegraph_flushes": MetricKind(
        _COUNTER, "Times all graphs were dropped for new signatures.", _one(lambda stats: stats.flushes)
    ),
    "simplegraph_graphs": MetricKind(_GAUGE, "Graphs that can be replayed.", _one(lambda stats: len(stats.graphs))),
    "simplegraph_graph_memory_bytes": MetricKind(
        _GAUGE, "Device memory that capturing the present graphs took.", _one(lambda stats: stats.graph_bytes)
    ),
    "simplegraph_capture_seconds": MetricKind(
        _GAUGE, "Time that capturing the present graphs took.", _one(lambda stats: stats.capture_seconds)
    ),
    "simplegraph_proof_seconds": MetricKind(
        _GAUGE,
        "Time of comparisons with eager runs.",
        _one(lambda stats: sum(graph.proof_seconds for graph in list(stats.graphs.values()))),
    ),
    "simplegraph_longest_stall_seconds": MetricKind(
        _GAUGE, "Time of the longest call that captured a size.", _one(lambda stats: stats.longest_stall)
    ),
    "simplegraph_unverified_graphs": MetricKind(
        _GAUGE,
        "Graphs that cannot be compared with eager.",
        _one(lambda stats: sum("unverified" in graph.proof for graph in list(stats.graphs.values()))),
    ),
    "simplegraph_refused_sizes": MetricKind(
        _GAUGE, "Sizes whose capture or comparison failed: they run eagerly.", _one(lambda stats: len(stats.failures))
    ),
}


class GraphCollector(Collector):
    """Collects `METRICS` of `simplegraph.wrappers()` when it is scraped."""

    def __init__(self) -> None:
        # When a graph is dropped, its totals move to its wrapper: a scrape in between must not see them fall.
        self._seen: weakref.WeakKeyDictionary[GraphStats, dict[Any, float]] = weakref.WeakKeyDictionary()

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that registering does not collect any."""
        return [*(_family(name, kind) for name, kind in METRICS.items()), _audit_family()]

    def collect(self) -> Iterator[Metric]:
        """Read the counters of each wrapper that was called or captured."""
        used = [wrapper.stats for wrapper in wrappers() if wrapper.stats.captures or wrapper.stats.eager]
        seen = [self._seen.setdefault(stats, {}) for stats in used]
        for name, kind in METRICS.items():
            family: Any = _family(name, kind)
            for stats, highest in zip(used, seen, strict=True):
                labels = [stats.name, str(stats.number)]
                for label, value in kind.read(stats).items():
                    if kind.kind is _COUNTER:
                        value = highest[name, label] = max(value, highest.get((name, label), 0))
                    family.add_metric([*labels, label] if kind.label else labels, value)
            yield family
        audited = _audit_family()
        for kind_of_finding in KINDS:
            audited.add_metric([kind_of_finding], FOUND[kind_of_finding])
        yield audited


def _family(name: str, kind: MetricKind) -> Metric:
    return kind.kind(name, kind.help, labels=(*_LABELS, kind.label) if kind.label else _LABELS)  # type: ignore[call-arg]


def _audit_family() -> CounterMetricFamily:
    return CounterMetricFamily("simplegraph_audit_findings", "Findings of `simplegraph.audit`.", labels=("kind",))


def register(registry: CollectorRegistry = REGISTRY) -> GraphCollector:
    """Add the metrics of every wrapper, present and future, to a registry of ``prometheus_client``.

    Counters are read when the registry is scraped; calls and replays cost nothing more. Each series has the labels
    `wrapper`, the class's name, and `number`, which tells wrappers of one class apart.

    Args:
        registry: the default one is what ``start_http_server`` serves.

    Raises:
        ConfigError: they are in the registry already.
    """
    collector = GraphCollector()
    try:
        registry.register(collector)
    except ValueError as error:
        raise ConfigError("the metrics are in this registry already; call register once for each registry.") from error
    return collector
