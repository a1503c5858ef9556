"""Takes pictures of reports in a headless Chromium: ``python -m docs.tools.screenshot``."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn

import simplegraph as sg
from bench.tools.measure import say
from docs.tools.raw import ROOT
from simplegraph.doctor.audit_page import write_report

PICTURE = ROOT / "docs" / "_static" / "report.png"
AUDITED, AUDIT_PICTURE = ROOT / "bench" / "results" / "h200_vllm_audit_report.json", PICTURE.with_name("audit.png")
_SWITCHES = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
_SWITCHES += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


class Ranker(nn.Module):
    """A model with an eager break, called with batches of some sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(256, 64), nn.Linear(64, 256)

    @sg.eager_break
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Stand for code that no graph can hold."""
        return x.relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score a batch."""
        return self.up(self.mix(self.down(x)))


def example() -> sg.GraphHolder:
    """Serve some traffic, and return what has its report."""
    chance = random.Random(3)
    model = sg.wrap(Ranker().eval(), capture_sizes=[1, 2, 4, 8, 16, 32], mode="PIECEWISE", progress=False)
    with torch.inference_mode():
        model.capture_graphs(torch.randn(4, 256))
        for _ in range(400):
            model(torch.randn(chance.choice([1, 3, 3, 3, 5, 6, 11, 20, 40]), 256))
    return next(wrapper for wrapper in sg.wrappers() if wrapper.stats is model.graph_stats)


def photograph(page: Path, picture: Path, height: int) -> None:
    """Open a page in Chromium and save that many pixels of its height; say so if there is none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        say("no picture of the report: chromium is not installed (apt-get install chromium)")
        return
    with tempfile.TemporaryDirectory() as profile:
        place = [f"--user-data-dir={profile}", f"--window-size=1000,{height}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([chromium, *_SWITCHES, *place], check=True, capture_output=True, timeout=120)
    say(f"picture: {picture}")


def store() -> None:
    """Write the page of an example, that of an audit of vLLM, and their pictures."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "graphs.html"
        example().report().save(page)
        photograph(page, PICTURE, 1150)
        page = write_report(json.loads(AUDITED.read_text()), Path(folder) / "audit.html")
        photograph(page, AUDIT_PICTURE, 1250)


if __name__ == "__main__":
    store()
