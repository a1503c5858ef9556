"""Writes the Grafana dashboard over the metrics of `simplegraph.integrations.prometheus`."""

from __future__ import annotations

import json
import re
from typing import Any

from docs.tools.raw import ROOT
from simplegraph.integrations.prometheus import METRICS

DASHBOARD = ROOT / "docs" / "_static" / "grafana.json"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_BY, _RATE = "by (wrapper)", "[$__rate_interval]"
_CHOSEN = '{job=~"$job", wrapper=~"$wrapper"}'  # by variables of the dashboard


def _rate(metric: str) -> str:
    return f"rate(simplegraph_{metric}_total{_RATE})"


# Title, unit, and queries by the legend of their series.
PANELS: list[tuple[str, str, dict[str, str]]] = [
    (
        "Calls served by graphs",
        "percentunit",
        {
            "{{wrapper}}": f"sum {_BY} ({_rate('replays')}) / "
            f"(sum {_BY} ({_rate('replays')}) + sum {_BY} ({_rate('eager_calls')}))"
        },
    ),
    ("Eager calls by reason", "ops", {"{{wrapper}}: {{reason}}": f"sum by (wrapper, reason) ({_rate('eager_calls')})"}),
    (
        "Rows in replays that are padding",
        "percentunit",
        {
            "{{wrapper}}": f"sum {_BY} ({_rate('padding_rows')}) / "
            f"(sum {_BY} ({_rate('padding_rows')}) + sum {_BY} ({_rate('rows')}))"
        },
    ),
    ("Replays", "ops", {"{{wrapper}}": f"sum {_BY} ({_rate('replays')})"}),
    ("Calls served in a slower way", "ops", {"{{reason}}": f"sum by (reason) ({_rate('slower_calls')})"}),
    ("Memory of graphs", "bytes", {"{{wrapper}}": f"sum {_BY} (simplegraph_graph_memory_bytes)"}),
    (
        "Graphs",
        "short",
        {
            "{{wrapper}}": f"sum {_BY} (simplegraph_graphs)",
            "{{wrapper}}: unverified": f"sum {_BY} (simplegraph_unverified_graphs)",
            "{{wrapper}}: sizes refused": f"sum {_BY} (simplegraph_refused_sizes)",
        },
    ),
    (
        "Captured, and dropped again, in the last interval",
        "short",
        {
            "{{wrapper}}: captures": f"sum {_BY} (increase(simplegraph_captures_total{_RATE}))",
            "{{wrapper}}: something moved": f"sum {_BY} (increase(simplegraph_recaptures_total{_RATE}))",
            "{{wrapper}}: too many signatures": f"sum {_BY} (increase(simplegraph_flushes_total{_RATE}))",
        },
    ),
    (
        "Time spent",
        "s",
        {
            "{{wrapper}}: capturing": f"sum {_BY} (simplegraph_capture_seconds)",
            "{{wrapper}}: comparing with eager": f"sum {_BY} (simplegraph_proof_seconds)",
            "{{wrapper}}: longest call that captured": f"max {_BY} (simplegraph_longest_stall_seconds)",
        },
    ),
]


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    named = [re.findall(r"simplegraph_\w+", query) for query in queries.values()]
    helps = {METRICS[name.removesuffix("_total")].help: None for names in named for name in names}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": re.sub(r"simplegraph_\w+", lambda name: name[0] + _CHOSEN, query),
            "legendFormat": legend,
            "datasource": _SOURCE,
        }
        for index, (legend, query) in enumerate(queries.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": " ".join(helps),
        "datasource": _SOURCE,
        "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _choice(label: str) -> dict[str, Any]:
    """Return a variable of the dashboard: the values of a label to show, all by default."""
    everything = {"text": "All", "value": "$__all"}
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values(simplegraph_graphs, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": everything,
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it; it asks which Prometheus, jobs and wrappers to read."""
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "simplegraph: CUDA graphs",
        "uid": "simplegraph",
        "tags": ["simplegraph", "pytorch"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, _choice("job"), _choice("wrapper")]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def text() -> str:
    """Return the dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def store() -> None:
    """Write the file."""
    DASHBOARD.write_text(text(), encoding="utf-8")
