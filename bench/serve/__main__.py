"""``python -m bench.serve``: serves loads of requests eagerly, from graphs, compiled and with speculation.

With ``--http`` it serves completions over HTTP instead, with OpenAI's interface, until it is told to end; see
`bench.serve.http`.

Lengths have ShareGPT's long tail (`data/lengths.json`); weights are random unless --model names a checkpoint, or the
trained pair. Drafts of random weights are arbitrary: --mean-length sets the tokens that a round gives.
"""

from __future__ import annotations

import argparse
import sys

import torch

from bench.engine import EngineError
from bench.engine.config import BACKENDS, EngineConfig
from bench.models.checkpoint import CheckpointError
from bench.models.eagle import TINY
from bench.models.workload import Workload
from bench.serve import load
from bench.serve.serving import ARMS, ServePlan, default_arms, served
from bench.spec_decode.pairs import KINDS, TRAINED, load_draft
from bench.tools import torchrun
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, Figures, say
from bench.tools.options import (
    TP,
    Options,
    command_line,
    count,
    folder_or,
    json_file,
    listed,
    model_name,
    name_list,
    numbers,
    positive,
    rates,
)
from bench.tools.tables import cell, grid, measured

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
    ("in flight", "mean_in_flight"),
    ("tokens a round", "mean_length"),
    ("dropped", "dropped"),
)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; expected HOST:PORT, such as 127.0.0.1:8000")
    return host or "127.0.0.1", int(port)


OPTIONS: Options = {
    "--model": model_name(TRAINED),
    "--arms": name_list(ARMS, "all by default, with --tp those that compile nothing and do not speculate"),
    "--attention": name_list(("auto", *BACKENDS), "auto by default") | {"default": ("auto",)},
    "--requests": {"type": count, "help": "how many in each load; 400 on a GPU, else 12"},
    "--rate": {"type": rates, "help": "requests a second, such as 20,40,80; inf for all at once; 40 on a GPU"},
    "--in-flight": {"type": numbers, "default": (), "help": "loads with so many requests all the time: 2,8,32"},
    "--seed": {"type": int, "default": 0, "help": "of arrival times and lengths"},
    "--draft": {
        "type": folder_or("draft", *KINDS),
        "default": KINDS[-1],
        "help": f"{listed(KINDS)}, trained for --model {TRAINED} only; or a folder with a checkpoint",
    },
    "--k": {"type": count, "default": 5, "help": "tokens drafted a round"},
    "--mean-length": {"type": positive, "help": "tokens a round; by default 2.4 where weights are random"},
    "--limit": {"type": positive, "default": float("inf"), "help": "seconds after which no other load begins"},
    "--http": {
        "type": _address,
        "nargs": "?",
        "const": "127.0.0.1:8000",
        "metavar": "HOST:PORT",
        "help": "serve completions there",
    },
    "--most": {"type": count, "default": 256, "help": "requests that --http lets in at once; others get 429"},
    **TP,
    **json_file(OUT / "serve.json"),
}


def main(arguments: list[str] | None = None) -> int:
    """Serve every load with every arm; return 1 if a request was dropped, or the models do not fit the settings."""
    parser = command_line("bench.serve", __doc__, OPTIONS)
    options = parser.parse_args(arguments)
    torchrun.check_launched(parser, options.tp)
    if options.http is not None and options.tp > 1:
        parser.error("--http serves on one GPU; leave out --tp")
    shard, ranks, device = torchrun.start(options.tp, "serve")
    on_gpu = device.type == "cuda"
    model = options.model or ("8b" if on_gpu else "tiny")
    if options.http is not None:
        return _serve_http(options, model, device)
    arms = list(options.arms or default_arms(options.tp))
    for arm in [arm for arm in arms if ARMS[arm].get("compiled") and not on_gpu]:
        say(f"{arm}: not available; emulated graphs cannot see compiled code")
        arms.remove(arm)
    plan = _plan(options, on_gpu, trained=model == TRAINED or options.draft not in KINDS)
    settings = {"model": model, "requests": plan.requests, "loads": list(map(str, plan.loads)), "tp": shard.size}
    settings |= {"draft": options.draft, "k": plan.num_draft_tokens, "mean_length": plan.mean_length}
    results: dict[str, Figures] = {}
    try:
        target, draft = folders(model, options.draft)
        llama = Workload(target, (1,), device, lm_head=True, shard=shard).build(windows=True)
        drafts = load_draft(draft, llama) if any("draft_mode" in ARMS[arm] for arm in arms) else None
        for name, figures in served(plan, llama, drafts, arms, options.attention, ranks):
            results[name] = figures
            if shard.rank == 0:
                save_figures(options.json, {"load": settings, "results": results})
    except (EngineError, CheckpointError, FileNotFoundError, ValueError) as error:
        print(f"python -m bench.serve: {error}", file=sys.stderr)
        return 1
    torchrun.finish()
    if shard.rank == 0:
        on = device.type if shard.size == 1 else f"{shard.size} ranks, {device.type}"
        print(render(results, f"{model}, {plan.requests} requests at {listed(map(str, plan.loads))} on {on}"))
        if not on_gpu:
            print(NOT_SPEED)
    return int(any(result["dropped"] for result in results.values()))


def _serve_http(options: argparse.Namespace, model: str, device: torch.device) -> int:
    """Serve over HTTP; return 1 if the model cannot be loaded or a package is missing."""
    try:
        from bench.serve import http
    except ImportError as error:
        print(f"python -m bench.serve: {error}; pip install -e '.[bench-serve]'", file=sys.stderr)
        return 1
    batch, length = (256, 2048) if device.type == "cuda" else (8, 512)
    arm = options.arms[0] if options.arms else "full-and-piecewise"
    settings = {"mode": ARMS[arm]["mode"], "attention": options.attention[0], "max_num_seqs": batch}
    config = EngineConfig(**settings, max_model_len=length, num_pages=1 + batch * -(-length // 16))
    try:
        workload = Workload(folders(model, options.draft)[0], (1,), device, lm_head=True)
        http.run(workload.build(windows=True), model, workload.folder, config, options.http, options.most)
    except (EngineError, CheckpointError, FileNotFoundError, ValueError) as error:
        print(f"python -m bench.serve: {error}", file=sys.stderr)
        return 1
    return 0


def folders(model: str, draft: str) -> tuple[str, str]:
    """Return model and draft with the names of the trained pair replaced by its folders."""
    if model != TRAINED:
        return model, draft
    return str(TINY / "target"), str(TINY / draft) if draft in KINDS else draft


def _plan(options: argparse.Namespace, on_gpu: bool, *, trained: bool) -> ServePlan:
    rates = options.rate or (() if options.in_flight else ((40.0,) if on_gpu else (20.0,)))
    return ServePlan(
        loads=[load.Load(rate) for rate in rates] + [load.Load(in_flight=number) for number in options.in_flight],
        requests=options.requests or (400 if on_gpu else 12),
        seed=options.seed,
        longest=None if on_gpu else 128,  # an emulated step takes long enough
        batch=256 if on_gpu else 4,
        step_tokens=2048 if on_gpu else 48,
        num_draft_tokens=options.k,
        mean_length=options.mean_length or (None if trained else 2.4),
        limit=options.limit,
    )


def render(results: dict[str, Figures], title: str) -> str:
    """Format the serving table; times are in ms."""
    lines = [("", *(name for name, _ in COLUMNS))]
    lines += [(name, *(cell(result, key, ".2f") for _, key in COLUMNS)) for name, result in results.items()]
    return f"{title}\n{grid(measured(lines))}"


if __name__ == "__main__":
    sys.exit(main())
