"""``python -m bench.host_overhead``: microseconds of a call: replayed, refused by a capture, and bare of all this."""

from __future__ import annotations

import dataclasses

import torch

from bench.host_overhead import calls
from bench.tools import command
from bench.tools.measure import Figures, say
from bench.tools.options import Options, count
from bench.tools.tables import grid
from simplegraph.batch.sizes import default_sizes

SIZES = {"1 size": [calls.SIZE], "51 sizes": default_sizes(512)}  # a call's time does not grow with captured sizes


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """Medians are taken over so many blocks."""

    rounds: int


def default_plan(device: torch.device) -> HostPlan:
    """Return 50 blocks on a GPU, else 3."""
    return HostPlan(calls.ROUNDS[device.type])


def measure(plan: HostPlan, device: torch.device) -> Figures:
    """Measure with one captured size, and with many."""
    return {"medians_us": {name: calls.measure(device, sizes, plan.rounds, say) for name, sizes in SIZES.items()}}


def render(figures: Figures) -> str:
    """Format a line for every call."""
    medians = figures["medians_us"]
    rows = [(call, *(f"{found[call]:.2f}" for found in medians.values())) for call in medians["1 size"]]
    return grid([("call, us", *medians), *rows])


OPTIONS: Options = {
    "--rounds": {"type": count, "help": "blocks that a median is taken over; 50 on a GPU, else 3"},
}
main = command.of("bench.host_overhead", __doc__, OPTIONS, default_plan, measure, render)


if __name__ == "__main__":
    main()
