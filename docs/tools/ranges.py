"""Sentences of the README whose numbers are ranges over all committed runs on an H200."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from bench.latency.arms import CALLABLES
from bench.latency.rows import ISSUED, ROW, WAITED
from docs.tools import latency
from docs.tools.optimized import MODELS, compilers
from docs.tools.raw import extra, load, startup
from docs.tools.wording import NUMBERS, between, bullets

# Runs of the models beside eager, and beside a compiler that starts from an empty cache.
_RUNS = ("headline/models", "h200_models_410cdb8", "h200_optimized")
_SINGLE = "a-call-that-is-waited-for"  # heading of docs/figures.md
EARLY = ("torchvision_resnet18", "transformers_bert", "diffusers_unet", "diffusers_dit")
_KEYS = {"resnet18": EARLY[0], "bert": EARLY[1], "unet": EARLY[2], "dit": EARLY[3]}
# Starts of the 8 B shape with 51 sizes on one H200, with proofs; and those beside a compiler.
_STARTS = ("headline/startup", "h200_startup", "h200_startup_lean")
_COMPILED = ("h200_startup", "h200_startup_compiled")


def arms(batch: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the figures of eager, simplegraph and the compiler, of every run and model."""
    for file in _RUNS:
        for model in MODELS:
            if row := load(file)["rows"].get(f"{model} {batch}"):
                found = row["arms"]
                yield found["eager"], found["graph"], found["compiled"]
    if batch == 1:
        for key in EARLY:
            (found,) = extra(f"h200x4_models/models_{key}")["models"].values()
            yield found["eager"], found["simplegraph"], found["compiled-reduce-overhead"]


def times_of(model: str, arm: str = "eager") -> list[float]:
    """Return the milliseconds of a model's calls at batch 1, back to back, in every run: of eager, or of graphs."""
    found = [load(file)["rows"].get(f"{model} 1", {"arms": {}})["arms"] for file in _RUNS]
    single = [row["arms"] for text, row in latency.all_runs() if text == MODELS[model]]
    name = {"graph": "simplegraph"}.get(arm, arm)
    return [arms[arm]["ms"] for arms in found if arm in arms] + [arms[name][ROW] / 1e3 for arms in single]


def gains_of(model: str) -> list[float]:
    """Return how many times longer eager takes than graphs, in every run."""
    return [eager / graph for eager, graph in zip(times_of(model), times_of(model, "graph"), strict=True)]


def slow_host() -> str:
    """Say how much less Python took in each model's fastest run than on the README's host."""
    now = load("headline/models")["rows"]
    shares = [min(times_of(model)) / now[f"{model} 1"]["arms"]["eager"]["ms"] for model in MODELS]
    return (
        f"The table's host runs Python slowly: in each model's fastest run elsewhere, eager took {_percent(shares)} "
        "of the table's time, so gains there are smaller"
    )


def bert() -> str:
    """Say why BERT gains the most: its kernels are a small part of the time of an eager call."""
    arms = load("headline/models")["rows"]["bert 1"]["arms"]
    kernels = sum(us for _, _, us in arms["graph"]["kernels"]) / 1e3
    eager = arms["eager"]["ms"]
    return f"BERT gains most, because its kernels take only {kernels:.2f} ms of eager's {eager:.2f} ms"


def _spread(arm: str) -> str:
    """Say by how much an arm's calls of one model differ at most between runs, at batch 1."""
    found = (times_of(model, arm) for model in MODELS)
    return f"{100 * max(max(times) / min(times) - 1 for times in found):.0f} %"


def _percent(shares: Iterable[float]) -> str:
    return f"{between((100 * share for share in shares), '.0f')} %"


def _memory() -> str:
    """Say how much device memory graphs take: by their pools, or by free memory if a file has only that."""
    rows = load("headline/models")["rows"]
    arms = [rows[f"{model} 1"]["arms"]["graph"] for model in MODELS]
    if all("memory" in arm for arm in arms):
        one, by = (arm["memory"]["pool_bytes"] / 2**20 for arm in arms), "in their pools"
    else:
        one, by = (
            (float(re.findall(r"([\d.]+) MiB", arm["report"][0])[0]) for arm in arms),
            "by the fall of free memory",
        )
    kept = startup()["simplegraph"]["primed"]["reserved_bytes"] / 2**20
    return (
        f"Graphs take GPU memory. Those of one of these models take {between(one, '.0f')} MiB at batch 1, {by}. "
        f"Those of the Llama's 51 sizes take {kept:.0f} MiB together, by torch's allocator."
    )


def _single_calls(figure: str) -> list[float]:
    """Return how many times longer eager takes, by the file of single calls."""
    rows = (row["arms"] for text, row in latency.all_runs() if text in MODELS.values())
    return [arms["eager"][figure] / arms["simplegraph"][figure] for arms in rows]


def _ready(arm: str, files: Iterable[str] = _STARTS) -> list[float]:
    found = (startup(file).get(arm) for file in files)
    return [run["seconds"]["ready"] for run in found if run]


def headline() -> str:
    """Say how much faster calls are than eager, and how soon they are ready."""
    alone = {batch: [eager["ms"] / ours["ms"] for eager, ours, _ in arms(batch)] for batch in (1, 8)}
    alone[1] += _single_calls(ROW)
    waited = _single_calls(WAITED)
    every = [pair for batch in (1, 8) for pair in arms(batch)]
    ours, cold = (between((row[at]["ready_seconds"] for row in every), form) for at, form in ((1, ".1f"), (2, ".0f")))
    both = ("compiled-piecewise", "compiled-full")
    compiled = {
        cache: between((ready for arm in both for ready in _ready(f"{arm} ({cache})", _COMPILED)), ".1f")
        for cache in ("cold", "warm")
    }
    beside = startup("h200_startup")
    steps = beside["compiled-piecewise (warm)"]["step_ms"]["1"] / beside["simplegraph"]["step_ms"]["1"]
    models, timed = NUMBERS[len(MODELS)], NUMBERS[len(set(latency.rows()).intersection(MODELS.values()))]
    starts = between(_ready("simplegraph"), ".1f")
    one, eight, single = (between(times, ".1f") for times in (alone[1], alone[8], waited))
    calls = (
        "**How much you gain depends mostly on how slow the host's Python is.** Between runs, a model's replays",
        f"differ by up to {_spread('graph')}, and its eager calls by up to {_spread('eager')}. At batch 1, back to",
        f"back, these {models} models ran {one} times faster than eager over all committed runs on an H200, and at",
        f"batch 8 {eight} times. Calls that are [waited for](docs/figures.md#{_SINGLE}) one by one ran {single}",
        f"times faster ({timed} models, batch 1).",
    )
    host = f"{slow_host()}. {bert()}."
    again = {
        arm: [row["arms"][arm]["ready_seconds"] for row in compilers().values()]
        for arm in ("compiled-warm", "optimized")
    }
    warm, optimized = (between(found, ".1f") for found in again.values())
    soon = (
        f"In all runs, simplegraph was ready in {ours} s, and `torch.compile` in {cold} s with an empty cache. With",
        f"a warm cache, the compiler was ready in {warm} s on {NUMBERS[len(again['optimized'])]} of the models, and",
        f"[`sg.optimize`](docs/optimize.md) in {optimized} s in the same runs.",
    )
    llama = (
        f"For an 8 B Llama, `capture_graphs` captures 51 batch sizes in {starts} s. With `torch.compile` this takes",
        f"{compiled['cold']} s with a cold cache and {compiled['warm']} s with a warm one; the compiled step is then",
        f"{1 - steps:.0%} shorter than ours.".replace("%", " %"),
    )
    return bullets(" ".join(calls), host, " ".join(soon), " ".join(llama))


def _over(arms: dict[str, Any], figure: str) -> float:
    """Return how many times as long ours takes as `make_graphed_callables`."""
    return float(arms["simplegraph"][figure] / arms[CALLABLES][figure])


def losses() -> str:
    """Say where a compiler and other capture functions are ahead, by the README's table, and what graphs take."""
    rows = [load("headline/models")["rows"][f"{model} 1"]["arms"] for model in MODELS]
    shorter, ahead = (sum(arms["compiled"]["ms"] < arms[arm]["ms"] for arms in rows) for arm in ("graph", "optimized"))
    ratios = [arms["optimized"]["ms"] / arms["compiled"]["ms"] for arms in rows]
    longer, less = (f"{100 * share:.0f} %" for share in (max(ratios) - 1, 1 - min(ratios)))
    others = ("make-graphed-callables", "tensordict-cudagraph")
    ready = between(arms[arm]["ready_seconds"] for arms in rows for arm in others)
    single = {text: row["arms"] for text, row in latency.rows().items() if CALLABLES in row["arms"]}
    waited, busy = ({text: _over(arms, figure) for text, arms in single.items()} for figure in (WAITED, ROW))
    small = waited.pop("ten linear layers"), busy.pop("ten linear layers")
    del waited["BERT"], busy["BERT"]
    of_table = [arms["graph"]["ms"] / arms["make-graphed-callables"]["ms"] for arms in rows]
    beside = [*busy.values(), *(ratio for ratio, model in zip(of_table, MODELS, strict=True) if model != "bert")]
    issued = {arm: [arms[arm][ISSUED] for arms in single.values()] for arm in ("simplegraph", CALLABLES)}
    more = [ours / theirs for ours, theirs in zip(*issued.values(), strict=True)]
    unhelped = [
        text
        for text, arms in single.items()
        if "optimized-static" in arms and arms["optimized-static"][WAITED] > 0.99 * arms["simplegraph"][WAITED]
    ]
    compiler = (
        f"A graph replays eager's kernels. A compiler fuses kernels, and has the shorter call on {NUMBERS[shorter]}",
        f"of the {NUMBERS[len(rows)]} models. After [`sg.optimize`](docs/optimize.md) the compiler is ahead on",
        f"{NUMBERS[ahead]}, where our call takes up to {longer} longer; on the other {NUMBERS[len(rows) - ahead]}",
        f"our call takes up to {less} less time.",
    )
    unchecked = (
        f"`make_graphed_callables` and tensordict check and pad nothing, and are ready in {ready} s. Our calls take",
        f"{between(beside)} times as long as those of `make_graphed_callables` back to back, and",
        f"{between(waited.values())} if waited for. On a tiny model, ten linear layers, it is {small[1]:.1f} and",
        f"{small[0]:.1f} times. Not counted is BERT, which is slower with them, because their capture includes an",
        "attention mask that eager and our graphs skip.",
    )
    host = (
        f"A call takes {between(issued['simplegraph'], '.0f')} us of the host's time, {between(more, '.1f')} times as",
        "much as with `make_graphed_callables`: it checks what may have changed, and copies its outputs. While the GPU",
        f"is busy, this is hidden. If calls are waited for, `sg.optimize` gains nothing on {' and '.join(unhelped)}.",
    )
    lazy = (
        'By default (`capture="lazy"`) a size is captured at its second call, and that request waits. The 51 sizes of',
        f"the Llama then take {between(_ready('simplegraph-lazy'), '.1f')} s together:",
        "[capture before requests](docs/production.md#warm-up).",
    )
    return bullets(" ".join(compiler), " ".join(unchecked), " ".join(host), " ".join(lazy), _memory())
