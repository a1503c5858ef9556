"""The command line of a benchmark whose models and arms run in processes of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from bench.tools import environment
from bench.tools.files import save_figures
from bench.tools.measure import Figures, device_of
from bench.tools.options import changed

P = TypeVar("P")


def run(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    default_plan: Callable[[torch.device], P],
    measure: Callable[[P, torch.device], Figures],
    render: Callable[[Figures], str],
    failures: Callable[[Figures], list[str]],
) -> None:
    """Measure what the command line asks for, print the table, and write the figures where ``--json`` says.

    Raises:
        SystemExit: something that had to work did not.
    """
    parser.add_argument("--device", help="the GPU where there is one by default")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(arguments)
    device = device_of(given.device)
    figures = measure(changed(default_plan(device), vars(given)), device)
    print(render(figures))
    if given.json:
        save_figures(given.json, figures | {"environment": environment.describe()})
    if failures(figures):
        raise SystemExit("\n\n".join(failures(figures)))
