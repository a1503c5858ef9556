"""``python -m bench.layer_kinds``: decode steps of models with sliding windows and of hybrids, by arm.

On a GPU it measures bfloat16 shapes of 6 to 10 billion weights.
"""

from __future__ import annotations

import dataclasses

import torch

from bench.layer_kinds import steps
from bench.layer_kinds.steps import KINDS
from bench.tools import command
from bench.tools.measure import Figures, say
from bench.tools.options import Options, name_list, numbers
from bench.tools.tables import grid


@dataclasses.dataclass(frozen=True)
class KindsPlan:
    """The kinds, of `KINDS`, and the requests of a measured step; `small` shapes on a CPU."""

    kinds: tuple[str, ...] = tuple(KINDS)
    batches: tuple[int, ...] = (1, 8, 64)
    small: bool = False


def default_plan(device: torch.device) -> KindsPlan:
    """Return all kinds, at full shapes on a GPU."""
    return KindsPlan() if device.type == "cuda" else KindsPlan(batches=(1, 4), small=True)


def measure(plan: KindsPlan, device: torch.device) -> Figures:
    """Measure every kind."""
    results: Figures = {}
    for name in plan.kinds:
        say(name)
        results[name] = {"steps": steps.measure(KINDS[name], device, plan.batches, small=plan.small)}
    return {"results": results}


def render(figures: Figures) -> str:
    """Format the steps of every kind."""
    lines = []
    for name, found in figures["results"].items():
        rows = found["steps"]["decode"]
        arms = list(rows[0]["ms"])
        table = [("requests", *arms), *((row["batch"], *(f"{row['ms'][arm]:.3f}" for arm in arms)) for row in rows)]
        lines += [f"{name}: ms of a decode step, context {found['steps']['context']}", grid(table)]
    return "\n".join(lines)


OPTIONS: Options = {
    "--kinds": name_list(KINDS, "all by default"),
    "--batches": {"type": numbers, "help": "requests of a measured step; 1,8,64 on a GPU, else 1,4"},
}
main = command.of("bench.layer_kinds", __doc__, OPTIONS, default_plan, measure, render)


if __name__ == "__main__":
    main()
