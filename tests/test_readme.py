"""The README's Python is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import simplegraph as sg

README = Path(__file__).parent.parent / "README.md"


def test_the_readmes_python_runs_and_gives_eagers_answer() -> None:
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(block, namespace)
    assert issubclass(namespace["Decoder"], sg.CudaGraphWrapper)
    module, x, y = (namespace[name] for name in ("module", "x", "y"))
    with torch.inference_mode():
        torch.testing.assert_close(y, module(x), rtol=1e-3, atol=1e-4)


def test_the_readmes_report_shows_one_padded_replay() -> None:
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0], namespace)
    report = namespace["model"].graph_report().to_dict()
    assert (report["captures"], report["replays"], report["padded_tokens"]) == (4, 1, 3)
