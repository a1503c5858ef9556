"""``python -m bench``: measures the time until a model is ready, every arm in a fresh process; table and JSON."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.arms import ALONE, ARMS, OF_RANKS
from bench.startup import runs, table
from bench.startup.runs import Result, comparison
from bench.tools import fresh, torchrun
from bench.tools.files import OUT, save_figures
from bench.tools.measure import device_of
from bench.tools.options import (
    DEVICE,
    PRELOADED,
    TP,
    Options,
    changed,
    command_line,
    count,
    json_file,
    model_name,
    name_list,
    numbers,
    positive,
)
from simplegraph.batch.sizes import default_sizes

LARGEST_GPU_SIZE = 512
CPU_SIZES, CPU_STEPS = (1, 2, 4, 8), 10
SMOKE_SIZES = (1, 2, 4)
SMOKE_ARMS = ("eager", "simplegraph", "simplegraph-lazy", "compiled-piecewise")
SMOKE_STEPS = 5
# Arms that capture collectives as they are called; compiled arms use collectives of their own.
TP_ARMS = ("eager", "plain-loop", "lean-loop", "simplegraph", "simplegraph-lazy", "simplegraph-piecewise", *OF_RANKS)


OPTIONS: Options = {
    "--model": model_name(),
    "--layers": {"type": count, "help": "in place of the model's number of layers"},
    "--arms": name_list(ARMS, "all that run here by default"),
    "--sizes": {"type": numbers, "help": "batch sizes, such as 1,2,4; the default sizes to 512 on a GPU"},
    "--rounds": {"type": count, "help": "processes per arm that compiles nothing; 3 on a GPU, else 1"},
    "--compiled-rounds": {
        "type": count,
        "help": "processes per start of an arm that compiles; 1 by default",
    },
    **json_file(OUT / "startup.json"),
    **DEVICE,
    "--timeout": {"type": positive, "default": 300.0, "help": "seconds a process may take"},
    "--lm-head": {"action": "store_true", "help": "return logits in place of hidden states"},
    **TP,
    **PRELOADED,
    "--smoke": {"action": "store_true", "help": "tiny model, few sizes, few arms, any machine"},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 if an arm failed, or none could be measured."""
    parser = command_line("bench", __doc__, OPTIONS)
    options = parser.parse_args(arguments)
    torchrun.check_launched(parser, options.tp)
    plan = plan_of(options)

    def save(results: dict[str, Result]) -> None:
        if torchrun.rank() == 0:
            # Described by the processes that measured: this one asks the GPU nothing while they do.
            machine = next((one["environment"] for one in results.values() if "environment" in one), None)
            save_figures(options.json, {"results": results, "comparison": comparison(results)}, machine)

    fresh.preload(device_of(plan.device).type, "bench.startup.runs")
    with tempfile.TemporaryDirectory(prefix="compile-caches-") as folder:
        results = runs.run_all(runs_of(options), plan, runs.CompileCaches(Path(folder)), save)
    measured = any(result["status"] == "ok" for result in results.values())
    if torchrun.rank() == 0:
        print(table.render(results))
        if not measured:
            print("python -m bench: no arm has figures; the reasons are above.", file=sys.stderr)
    return int(not measured or any(result["status"] == "failed" for result in results.values()))


def plan_of(options: argparse.Namespace) -> runs.StartupPlan:
    """Return the machine's plan with the command line's changes."""
    return changed(default_plan(options.device, smoke=options.smoke), vars(options))


def default_plan(device: str | None = None, *, smoke: bool = False) -> runs.StartupPlan:
    """Return the 8B shape and all default sizes on a GPU; otherwise a small model and few sizes, fewer for a smoke."""
    if smoke:
        return runs.StartupPlan("tiny", SMOKE_SIZES, device, rounds=1, steps=SMOKE_STEPS)
    if device_of(device).type == "cpu":
        return runs.StartupPlan("tiny", CPU_SIZES, device, rounds=1, steps=CPU_STEPS)
    return runs.StartupPlan("8b", tuple(default_sizes(LARGEST_GPU_SIZE)), device)


def runs_of(options: argparse.Namespace) -> list[runs.Run]:
    """Return the chosen runs; a smoke runs its compiled arm with a cold cache only."""
    if options.arms:
        return runs.runs_of(options.arms)
    if options.tp > 1:
        return runs.runs_of(TP_ARMS)
    if options.smoke:
        return [run for run in runs.runs_of(SMOKE_ARMS) if run.cache != "warm"]
    return runs.runs_of(ALONE)


if __name__ == "__main__":
    sys.exit(main())
