"""Draws the dashboard over a minute of traffic that Prometheus scrapes: ``python -m docs.tools.dashboard_picture``.

Queries, units and legends are the dashboard's own; series that stay at zero have no legend here.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prometheus_client
import torch
from torch import nn

import simplegraph as sg
from bench.tools.measure import say
from docs.tools import dashboard
from docs.tools.charts import draw
from docs.tools.raw import ROOT
from docs.tools.screenshot import Ranker
from simplegraph.integrations import prometheus

PICTURE = ROOT / "docs" / "_static" / "dashboard.png"
_METRICS, _PROMETHEUS = 9464, 9465  # ports
_SECONDS, _RATE = 60, "10s"
_COLUMNS = 2  # of a legend
_CONFIG = f"""
scrape_configs:
  - job_name: models
    scrape_interval: 1s
    static_configs: [{{targets: ["127.0.0.1:{_METRICS}"]}}]
"""


class Encoder(nn.TransformerEncoderLayer):
    """A layer with a name that fits into a legend."""


def _traffic() -> None:
    """Call two models for a while, with batches that are too large and weights that move half-way."""
    chance, registry = random.Random(0), prometheus_client.CollectorRegistry()
    prometheus.register(registry)
    server, _ = prometheus_client.start_http_server(_METRICS, "127.0.0.1", registry)
    settings: dict[str, Any] = {"capture_sizes": [1, 2, 4, 8, 16], "progress": False}
    encoder = Encoder(64, 4, 128, batch_first=True).eval()
    models = [(sg.wrap(encoder, **settings), (7, 64)), (sg.wrap(Ranker().eval(), mode="PIECEWISE", **settings), (256,))]
    begin, moved = time.monotonic(), False
    with torch.inference_mode():
        while (passed := time.monotonic() - begin) < _SECONDS:
            most = 9 if passed < _SECONDS / 2 else 18
            for model, shape in models:
                model(torch.randn(chance.randint(1, most), *shape))
            if passed > _SECONDS / 2 and not moved:
                encoder.linear1.weight = nn.Parameter(encoder.linear1.weight.clone())
                moved = True
            time.sleep(0.01)
    server.shutdown()


@contextmanager
def _prometheus(binary: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(_CONFIG, encoding="utf-8")
        places = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        places.append(f"--web.listen-address=127.0.0.1:{_PROMETHEUS}")
        with subprocess.Popen([binary, *places], stderr=subprocess.DEVNULL) as server:
            try:
                yield
            finally:
                server.terminate()


def _series(query: str, end: float) -> list[dict[str, Any]]:
    asked = {"query": query.replace("$__rate_interval", _RATE), "start": end - _SECONDS + 10, "end": end, "step": 1}
    url = f"http://127.0.0.1:{_PROMETHEUS}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def store() -> None:
    """Run the traffic, ask every query of the dashboard, and draw the answers."""
    binary = shutil.which("prometheus")
    if binary is None:
        say("no picture of the dashboard: prometheus is not installed (apt-get install prometheus)")
        return
    with _prometheus(binary):
        _traffic()
        end = time.time()
        panels = [
            {legend: _series(query, end) for legend, query in queries.items()} for *_, queries in dashboard.PANELS
        ]

    def fill(chart: Any, axes: Any) -> None:
        for axis, (title, unit, _), found in zip(axes.flat, dashboard.PANELS, panels, strict=True):
            scale = {"percentunit": 100.0, "bytes": 1 / 2**10}.get(unit, 1.0)
            for legend, series in found.items():
                for one in series:
                    name = re.sub(r"{{(\w+)}}", lambda label, one=one: one["metric"].get(label[1], ""), legend)
                    at = [float(stamp) - end + _SECONDS for stamp, _ in one["values"]]
                    values = [scale * float(value) for _, value in one["values"]]
                    axis.plot(at, values, label=name if any(values) else None)
            shown = {"percentunit": "%", "bytes": "KiB", "ops": "a second", "s": "s"}.get(unit, "")
            axis.grid(color="#dee2e6")
            if axis.lines:
                axis.set_ylim(0, 1.15 * max(max(line.get_ydata()) for line in axis.lines))
                place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}  # between title and axes
                axis.legend(fontsize=7, ncols=_COLUMNS, handlelength=1, columnspacing=1, frameon=False, **place)
            else:
                axis.set_yticks([])
                axis.text(0.5, 0.5, "no such calls", transform=axis.transAxes, ha="center", color="#868e96")
            lines = -(-len(axis.get_legend_handles_labels()[1]) // _COLUMNS)
            title += f", {shown}" if shown else ""
            axis.set_title(title, loc="left", fontsize="medium", pad=6 + 11 * lines)

        for axis in axes[-1]:
            axis.set_xlabel("seconds")

    draw(PICTURE, fill, nrows=3, ncols=3, figsize=(11, 8.5), sharex=True)


if __name__ == "__main__":
    store()
