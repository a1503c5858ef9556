"""``python -m bench.serve``: serves a load of requests eagerly, from graphs and compiled, and prints a table.

Lengths are real ones (`data/lengths.csv`); weights are random unless --model names a checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from typing import Any

import torch

from bench.engine import Engine, EngineConfig
from bench.engine.config import BACKENDS
from bench.models.llama import Llama
from bench.models.workload import Workload
from bench.serve import load
from bench.tools import environment, torchrun
from bench.tools.charts import draw
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, Figures, say
from bench.tools.options import add_json, add_model, add_names, count, positive
from bench.tools.tables import grid
from simplegraph import RankGroup

# How the engine runs in each arm.
ARMS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "NONE"},
    "full-decode-only": {"mode": "FULL_DECODE_ONLY"},
    "full-and-piecewise": {"mode": "FULL_AND_PIECEWISE"},
    "compiled-piecewise": {"mode": "PIECEWISE", "compiled": True},
}
COLUMNS = (
    ("requests/s", "requests_per_second"),
    ("tokens/s", "tokens_per_second"),
    ("TTFT ms mean", "ttft_mean_ms"),
    ("median", "ttft_median_ms"),
    ("p99", "ttft_p99_ms"),
    ("TPOT ms mean", "tpot_mean_ms"),
    ("median", "tpot_median_ms"),
    ("p99", "tpot_p99_ms"),
    ("ITL ms mean", "itl_mean_ms"),
    ("median", "itl_median_ms"),
    ("p99", "itl_p99_ms"),
    ("dropped", "dropped"),
)


def main(arguments: list[str] | None = None) -> int:
    """Serve the load with every arm; return 1 if a request was dropped."""
    parser = _parser()
    options = parser.parse_args(arguments)
    torchrun.check_launched(parser, options.tp)
    shard, ranks, device = torchrun.start(options.tp, "serve")
    on_gpu = device.type == "cuda"
    model = options.model or ("8b" if on_gpu else "tiny")
    count = options.requests or (400 if on_gpu else 12)
    rate = options.rate or (40.0 if on_gpu else 20.0)
    llama = Workload(model, (1,), device, lm_head=True, shard=shard).build(windows=True)
    longest = None if on_gpu else 64  # an emulated step takes long enough
    arrivals = load.arrivals(count, rate, llama.config.vocab_size, seed=options.seed, longest=longest)
    results = {}
    for attention in options.attention:
        for arm in options.arms or default_arms(options.tp):
            if ARMS[arm].get("compiled") and not on_gpu:
                say(f"{arm}: not available; emulated graphs cannot see compiled code")
                continue
            name = arm if attention == "auto" else f"{arm}, {attention}"
            figures = results[name] = _run(llama, arm, attention, arrivals, ranks)
            rate_of, tpot = figures["requests_per_second"], figures["tpot_median_ms"]
            say(f"served: {name}: {rate_of:.1f} requests/s, TPOT {tpot:.2f} ms")
    torchrun.finish()
    if shard.rank == 0:
        on = device.type if shard.size == 1 else f"{shard.size} ranks, {device.type}"
        print(render(results, f"{model}, {count} requests at {rate:g} a second on {on}"))
        if not on_gpu:
            print(NOT_SPEED)
        settings = {"model": model, "requests": count, "rate": rate, "tp": shard.size}
        save_figures(options.json, {"machine_info": environment.describe(), "load": settings, "results": results})
        draw(options.json.with_suffix(".png"), functools.partial(_fill, results), figsize=(8, 4))
    return int(any(result["dropped"] for result in results.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    add_model(parser)
    add_names(parser, "--arms", ARMS, "all by default, with --tp those that compile nothing")
    add_names(parser, "--attention", ("auto", *BACKENDS), "auto by default", default=("auto",))
    parser.add_argument("--requests", type=count, help="how many; 400 on a GPU, else 12")
    parser.add_argument("--rate", type=positive, help="requests a second; inf for all at once; 40 on a GPU, else 20")
    parser.add_argument("--seed", type=int, default=0, help="of arrival times and lengths")
    torchrun.add_option(parser)
    add_json(parser, OUT / "serve.json", ", the plot beside them")
    return parser


def default_arms(tp: int) -> list[str]:
    """All; on several ranks those that capture a collective as it is called, since what compiles brings its own."""
    return [name for name, settings in ARMS.items() if tp == 1 or not settings.get("compiled")]


def _run(
    llama: Llama, arm: str, attention: str, arrivals: list[load.Arrival], ranks: RankGroup | None
) -> dict[str, Any]:
    """Serve the load with one arm, and return its figures."""
    say(f"serving: {arm}, attention {attention}")
    most = 256 if torch.cuda.is_available() else 4
    longest = max(len(arrival.prompt) + arrival.max_tokens for arrival in arrivals)
    pages = 1 + most * -(-longest // 16)
    config = EngineConfig(attention=attention, max_num_seqs=most, max_model_len=longest, num_pages=pages, **ARMS[arm])
    engine, clock = Engine(llama, config, ranks), torchrun.clock()
    engine.capture()
    warmup = [load.Arrival(0.0, one.prompt, 4) for one in arrivals[:most]]
    load.serve(engine, warmup, clock)  # libraries load here
    figures = load.summary(*load.serve(engine, arrivals, clock))
    engine.runner.manager.reset()
    gc.collect()
    return figures


def render(results: dict[str, Figures], title: str) -> str:
    """Format the serving table; times are in ms."""
    lines = [("", *(name for name, _ in COLUMNS))]
    lines += [(name, *(f"{result[key]:.2f}" for _, key in COLUMNS)) for name, result in results.items()]
    return f"{title}\n{grid(lines)}"


def _fill(results: dict[str, Figures], chart: Any, axis: Any) -> None:
    """Draw the distribution of inter-token latencies."""
    for name, result in results.items():
        axis.plot(result["itl_percentiles_ms"], [share / 100 for share in load.PERCENTILES], label=name)
    axis.set_xscale("log")
    axis.set_xlabel("inter-token latency, ms")
    axis.set_ylabel("share of tokens")
    axis.legend()


if __name__ == "__main__":
    sys.exit(main())
