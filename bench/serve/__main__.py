"""``python -m bench.serve``: a load of requests, served eagerly, from graphs and compiled; the usual serving table.

With real lengths (`data/lengths.csv`) and random weights, unless --model names a checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.engine import Engine, EngineConfig
from bench.engine.runner import BACKENDS
from bench.models.llama import Llama
from bench.models.workload import Workload
from bench.serve import load
from bench.tools import environment, torchrun
from bench.tools.measure import say
from simplegraph import RankGroup

OUT = Path(__file__).parents[1] / "out"
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
    ("TTFT mean", "ttft_mean_ms"),
    ("median", "ttft_median_ms"),
    ("p99", "ttft_p99_ms"),
    ("TPOT mean", "tpot_mean_ms"),
    ("median", "tpot_median_ms"),
    ("p99", "tpot_p99_ms"),
    ("ITL mean", "itl_mean_ms"),
    ("median", "itl_median_ms"),
    ("p99", "itl_p99_ms"),
    ("dropped", "dropped"),
)


def main(arguments: list[str] | None = None) -> int:
    """Serve the load with every arm; 1 if a request was dropped."""
    parser = _parser()
    options = parser.parse_args(arguments)
    torchrun.check_launched(parser, options.tp)
    on_gpu = torch.cuda.is_available()
    shard, ranks = torchrun.start(options.tp, "cuda" if on_gpu else "cpu", "serve")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    model = options.model or ("8b" if on_gpu else "tiny")
    count = options.requests or (400 if on_gpu else 12)
    rate = options.rate or (40.0 if on_gpu else 20.0)
    llama = Workload(model, (1,), device, lm_head=True, shard=shard).build()
    longest = None if on_gpu else 64  # an emulated step takes long enough
    arrivals = load.load(count, rate, llama.config.vocab_size, seed=options.seed, longest=longest)
    results = {}
    for attention in options.attention.split(","):
        for arm in options.arms or default_arms(options.tp):
            if ARMS[arm].get("compiled") and not on_gpu:
                say(f"{arm}: not available; emulated graphs cannot see compiled code")
                continue
            name = arm if attention == "auto" else f"{arm}, {attention}"
            results[name] = _run(llama, arm, attention, arrivals, ranks)
    torchrun.finish()
    if shard.rank == 0:
        on = device.type if shard.size == 1 else f"{shard.size} ranks, {device.type}"
        print(render(results, f"{model}, {count} requests at {rate:g} a second on {on}"))
        if not on_gpu:
            print("On the CPU graphs are emulated: these times are no speed.")
        _save(results, Path(options.json), {"model": model, "requests": count, "rate": rate, "tp": shard.size})
    return int(any(result["dropped"] for result in results.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--model", help="tiny, 8b, 70b, or a folder with a config.json; 8b on a GPU, else tiny")
    parser.add_argument("--arms", type=_arms, help=f"of {','.join(ARMS)}; all, or with --tp those that compile nothing")
    parser.add_argument("--attention", default="auto", help=f"auto, or of {','.join(BACKENDS)}")
    parser.add_argument("--requests", type=int, help="how many; 400 on a GPU, else 12")
    parser.add_argument("--rate", type=float, help="requests a second; inf for all at once; 40 on a GPU, else 20")
    parser.add_argument("--seed", type=int, default=0, help="of arrival times and lengths")
    torchrun.add_option(parser)
    parser.add_argument("--json", default=str(OUT / "serve.json"), help="where the figures go, the plot beside them")
    return parser


def _arms(names: str) -> list[str]:
    unknown = [name for name in names.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no arm is called {', '.join(unknown)}; the arms are {', '.join(ARMS)}")
    return names.split(",")


def default_arms(tp: int) -> list[str]:
    """All; on several ranks those that capture a collective as it is called, since what compiles brings its own."""
    return [name for name, settings in ARMS.items() if tp == 1 or not settings.get("compiled")]


def _run(
    llama: Llama, arm: str, attention: str, arrivals: list[load.Arrival], ranks: RankGroup | None
) -> dict[str, Any]:
    """One arm: a figure of everything."""
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


def render(results: dict[str, dict[str, Any]], title: str) -> str:
    """The serving table; times in ms."""
    lines = [("", *(name for name, _ in COLUMNS))]
    lines += [(name, *(f"{result[key]:.2f}" for _, key in COLUMNS)) for name, result in results.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([title, *rows])


def _save(results: dict[str, dict[str, Any]], path: Path, settings: dict[str, Any]) -> None:
    """JSON, and the distribution of inter-token latencies beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine_info": environment.describe(), "load": settings, "results": results}))
    say(f"figures: {path}")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        say(f"no plot ({error}); to have one: pip install matplotlib")
        return
    chart, axis = pyplot.subplots(figsize=(8, 4))
    for name, result in results.items():
        axis.plot(result["itl_percentiles_ms"], [share / 100 for share in load.PERCENTILES], label=name)
    axis.set_xscale("log")
    axis.set_xlabel("inter-token latency, ms")
    axis.set_ylabel("share of tokens")
    axis.legend()
    chart.tight_layout()
    chart.savefig(path.with_suffix(".png"))
    pyplot.close(chart)
    say(f"plot: {path.with_suffix('.png')}")


if __name__ == "__main__":
    sys.exit(main())
