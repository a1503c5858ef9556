"""Writes the tables of pages from the raw figures, so that no cell is copied by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import sleep
from bench.latency.rows import WAITED
from docs.tools import latency, lifecycle, model_table, notes, optimized, ranges, raw, several_gpus
from docs.tools.grids import grid, seconds_cell, step_cells
from docs.tools.layer_kinds import accuracy, kinds_equal, kinds_steps, speculation
from docs.tools.raw import ROOT, commit, device_name, extra, load, startup
from docs.tools.wording import NUMBERS, between

MIB = 2**20
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "figures.md",
    ROOT / "docs" / "design.md",
    ROOT / "docs" / "models_tried.md",
    ROOT / "docs" / "recipes" / "index.md",
    ROOT / "bench" / "results" / "README.md",
]
_PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Return a page's text with every table in it written again."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{make(place['name'])}\n\n{place[3]}", text)


def make(name: str) -> str:
    """Return a table, or that it was not measured, if a file that it is made from is not there."""
    try:
        raw.read.clear()
        return TABLES[name]() + _sources(name)
    except FileNotFoundError as error:
        return f"**Not measured yet**: `bench/results` has no `{Path(error.filename).name}`."


def _sources(name: str) -> str:
    """Name the files that a table was made from, with GPUs and commits; README's tables say so themselves."""
    if name.startswith(("readme", "model-table")):
        return ""
    files = dict.fromkeys(raw.read)
    shown = [f"`{file}.json` ({raw.device_name(file)}, commit {raw.commit(file)})" for file in files]
    if len(shown) > 4 and len({raw.commit(file) for file in files}) == 1:  # a folder of them
        first = next(iter(files))
        shown = [f"`{first.rpartition('/')[0]}/*.json` ({raw.device_name(first)}, commit {raw.commit(first)})"]
    return f"\n\nFrom {', '.join(shown)}." if files else ""


def write(page: Path) -> None:
    """Write the tables of a page again."""
    page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


_README_ARMS = {
    "graph": "**simplegraph**",
    "optimized": "**`sg.optimize`**",
    "compiled": "`torch.compile`, reduce-overhead",
}
_READY = {"graph": "ready, s: simplegraph", "optimized": "`sg.optimize`", "compiled": "`torch.compile`, empty cache"}


def readme_rows() -> dict[str, dict[str, Any]]:
    """Return the figures of every arm at batch 1, by the model's name."""
    rows = load("headline/models")["rows"]
    return {text: rows[f"{key} 1"]["arms"] for key, text in optimized.MODELS.items() if f"{key} 1" in rows}


def _readme() -> str:
    singles, rows = latency.rows(), []
    for text, arms in readme_rows().items():
        model = next(key for key, name in optimized.MODELS.items() if name == text)
        eager, gains = between(ranges.times_of(model), ".1f"), between(ranges.gains_of(model), ".1f")
        times = (f"{arms[arm]['ms']:.2f}" if "ms" in arms.get(arm, {}) else "" for arm in _README_ARMS)
        ready = (f"{arms[arm]['ready_seconds']:.1f}" if "ready_seconds" in arms.get(arm, {}) else "" for arm in _READY)
        waited = f"{singles[text]['arms']['simplegraph'][WAITED] / 1000:.2f}" if text in singles else ""
        rows.append([text, eager, *times, waited, gains, *ready])
    missing = NUMBERS[sum(text not in singles for text in readme_rows())]
    caption = (
        f"Milliseconds of a call at batch 1 in bfloat16, on one {device_name('headline/models')} with torch 2.11 "
        f"(commit {commit('headline/models')}), issued back to back. Eager depends on the host's Python: it and the "
        "gain are ranges over all committed runs. `waited for`: each answer is awaited before the next call, in "
        f"another run (commit {commit(latency.FILE)}) without {missing} of the models. `ready`: from the built model "
        "to the end of its fourth call. Weights are random, proofs are on, and simplegraph copies its outputs."
    )
    waited_for, gain = "**simplegraph**, waited for", "times faster than eager"
    head = ["ms a call", "eager", *_README_ARMS.values(), waited_for, gain, *_READY.values()]
    return f"{caption}\n\n{grid(head, rows)}"


def _startup(file: str = "headline/startup") -> str:
    rows = []
    for name, run in startup(file).items():
        again = run.get("primed")
        kept = f"{(again or run)['device_bytes'] / MIB:.0f}" + ("" if again else r" \*")
        paths = ("seconds", "first_output"), ("seconds", "ready"), ("primed", "seconds", "ready")
        digits = 1 if len(run.get("rounds", ())) in (1, 2) else 2  # two starts differ by more than a hundredth
        times = [seconds_cell(run, *path, digits=digits) for path in paths]
        no_graphs = name == "eager"
        rows.append([name, *times, "" if no_graphs else kept, *step_cells(run)])
    head = ["arm", "first output, s", "every size ready, s", "the same again in the process, s", "memory kept, MiB"]
    return grid([*head, "step, ms, at batch 1", "8", "64", "256"], rows)


def _beside_compiled() -> str:
    """Show starts beside compiled ones, measured together with proofs on, and say how far they are apart."""
    file = "h200_startup"
    starts = {one["param"]: one for one in load(file)["benchmarks"]}
    count = len(load(file).get("calls", [file]))
    calls = "one call" if count == 1 else f"{count} calls, each"
    ours, cold, warm = (starts[name]["stats"] for name in ("simplegraph-first", *_COMPILED_STARTS))
    sizes = len(starts["simplegraph-first"]["extra_info"]["sizes"])
    spread = [f"{each['min']:.2f} to {each['max']:.2f} s" for each in (ours, cold, warm)]
    sooner = [f"{each['median'] / ours['median']:.1f}" for each in (cold, warm)]
    return (
        f"{_startup(file)}\n\nMedians of {ours['rounds']} processes, and {cold['rounds']} of each compiled arm, in "
        f"{calls} on one {device_name(file)}, commit {commit(file)}.\n"
        f"All {sizes} sizes were ready {sooner[0]} times sooner than with compiled piecewise graphs from an empty "
        f"compile cache, and {sooner[1]} times sooner than\n"
        f"from a filled one: starts took {spread[0]}, {spread[1]} and {spread[2]}."
    )


_COMPILED_STARTS = ("compiled-piecewise-cold", "compiled-piecewise-warm")


def _model_calls() -> str:
    """Show the host's us of a steady call, now and before, and the ms of a step beside a bare replay."""
    now, before = (load(f"h200_model_calls{which}")["steady"] for which in ("", "_881db13"))
    names = {"ten modules": "ten modules", "llama": "the 8 B Llama above, batch 1"} | optimized.MODELS
    rows = []
    for key, text in names.items():
        run, then = now[key], before[key]
        host = (f"{us:.0f}" for us in (run["bare_us"], run["us"], then["us"]))
        rows.append(
            [text, *host, *(f"{run[ms]:.3f}" for ms in ("bare_ms", "ms")), f"{run['ms'] / then['ms'] - 1:+.1%}"]
        )
    head = [
        "a call",
        "host, us: bare replay",
        "a call",
        "at 881db13",
        "step, ms: bare replay",
        "a call",
        "since 881db13",
    ]
    return grid(head, rows)


# Attention kernels by the engine's names for them; the first is its default.
_ATTENTION = {"triton": "`TritonDecodeBackend`", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer"}


def _headline() -> str:
    """Show what was measured at one commit: ours, and what it is measured beside."""
    start, calls = startup(), load("headline/model_calls")
    lazy = calls["lazy"]
    memory = load("headline/training_memory")["workloads"]["vit-b 64"]
    ready, again = ("seconds", "ready"), ("primed", "seconds", "ready")
    loops = {"eager": "eager", "lean-loop": "lean loop", "plain-loop": "plain loop"}
    lines: list[list[str]] = []

    def line(text: str, digits: int, ours: float, beside: dict[str, float]) -> None:
        others = (f"{name} {value:.{digits}f} ({ours / value:.2f})" for name, value in beside.items())
        lines.append([text, f"{ours:.{digits}f}", ", ".join(others)])

    def starts(text: str, *path: str) -> None:
        found = {arm: seconds_cell(start[arm], *path, digits=9) for arm in ("simplegraph", *loops)}
        beside = {loops[arm]: float(found[arm]) for arm in loops if found[arm]}
        line(text, 1, float(found["simplegraph"]), beside)  # of two processes

    def steps(text: str, rows: list[dict[str, Any]], ours: str, beside: dict[str, str]) -> None:
        for row in (row for row in rows if row["batch"] != 8):
            found = {name: row["ms"][arm] for arm, name in beside.items() if arm in row["ms"]}
            line(f"{text}, batch {row['batch']}, ms", 2, row["ms"][ours], found)

    starts("51 sizes of an 8 B Llama ready, s", *ready)
    starts("the same again in the process, s", *again)
    found = {text: start[arm]["step_ms"]["1"] for arm, text in loops.items()}
    line("its step at batch 1, ms", 2, start["simplegraph"]["step_ms"]["1"], found)
    decode = load("headline/engine")["decode"]
    attention = next(name for name in _ATTENTION if f"{name} graph" in decode[0]["ms"])
    engine = {
        f"{attention} eager": "eager",
        "eager": "the plain layers, eager",
        "GEMMs alone": "its products by cuBLAS",
    }
    text = f"the engine's step, fused layers, logits, {_ATTENTION[attention]}"
    steps(text, decode, f"{attention} graph", engine)
    engines = load("headline/vllm")["arms"]
    others = {
        name.replace("vllm", f"vLLM {found['version']}"): found
        for name, found in engines.items()
        if name.startswith("vllm")
    }
    for batch, found in engines["simplegraph"]["batches"].items():
        text = f"the engine, FlashAttention-3, {batch} request{'s' * (batch != '1')}, ms a token"
        beside = {name: arm["batches"][batch]["step_ms"] for name, arm in others.items() if "warm" not in name}
        line(text, 2, found["step_ms"], beside)
    seconds = {name: found["first_answer_s"] for name, found in others.items()}
    line("the first answer of its process, s", 0, engines["simplegraph"]["first_answer_s"], seconds)
    longest = {name: found["longest_ms"] for name, found in lazy.items()}
    for ours, text in {"simplegraph": "lazily", "simplegraph-in-gaps": "in gaps between calls"}.items():
        if ours in longest:
            beside = {"eager's longest": longest["eager"]}
            line(f"longest call while sizes are captured {text}, ms", 0, longest[ours], beside)
    reserved = {arm: found["reserved_mib"] for arm, found in memory.items()}
    line("ViT-B, batch 64, `training=True`, MiB", 0, reserved["forward-backward"], {"eager": reserved["eager"]})
    return grid([f"one {device_name('headline/startup')}", "simplegraph", "beside it (ours over it)"], lines)


def _training_memory() -> str:
    arms = {"eager": "eager", "train-step": "**`train_step`**", "forward-backward": "**`training=True`**"}
    arms |= {"hand-made": "a graph made by hand"}
    runs = load("headline/training_memory")["workloads"]["vit-b 64"]
    rows = []
    for arm, text in arms.items():
        over = runs[arm]["reserved_mib"] / runs["eager"]["reserved_mib"]
        rows.append([text, f"{runs[arm]['ms']:.2f}", f"{runs[arm]['reserved_mib']:,.0f}", f"{over:.2f}"])
    return grid(["ViT-B, batch 64", "a step, ms", "reserved, MiB", "of eager's"], rows)


def _preloaded() -> str:
    keys = ("seconds", "ready"), ("details", "captures_alone_s")
    head = ["every size ready, s", "of it captures alone", "the same again in the process, s", "of it captures alone"]
    rows = [
        [name, *(seconds_cell(run, *first, *key) for first in ((), ("primed",)) for key in keys)]
        for name, run in startup("h200_startup_preloaded").items()
    ]
    return grid(["arm", *head], rows)


def _mixed() -> str:
    rows = []
    for mix in extra("h200_piecewise")["mixed"]:
        eager, ours = mix["ms"]["eager"], mix["ms"]["piecewise"]
        what = mix["mix"].replace("the same, padded", "chunks among decodes, padded")
        sizes = [str(mix["tokens"]), str(mix["size"]), str(mix["requests"])]
        rows.append([what, *sizes, f"{eager:.1f}", f"{ours:.1f}", f"{ours / eager:.2f}"])
    return grid(["batch", "tokens", "captured size", "requests", "eager, ms", "graphs, ms", "graphs over eager"], rows)


def _attention() -> str:
    cells: dict[tuple[str, int], dict[int, str]] = {}
    for row in extra("h200_attention")["rows"]:
        line = cells.setdefault((row["backend"], row["context"]), {})
        digits = 1 if row["graph_ms"] >= 10 else 2
        line[row["batch"]] = f"{row['graph_ms']:.{digits}f} / {row['eager_ms']:.{digits}f}"
    batches = [str(batch) for batch in next(iter(cells.values()))]
    rows = [[f"{backend}, {context} tokens", *line.values()] for (backend, context), line in cells.items()]
    return grid(["in a graph / eager, ms", f"batch {batches[0]}", *batches[1:]], rows)


def _decode() -> str:
    steps = {row["batch"]: row["ms"] for row in extra("h200_engine_steps")["decode"]}
    labels = {f"{key} {how}": f"{text}, {how}" for key, text in _ATTENTION.items() for how in ("graph", "eager")}
    labels |= {
        "eager": "FlashAttention-3, eager, no fused layers",
        "compiled-piecewise": "FlashAttention-3, compiled piecewise",
        "compiled-full": "FlashAttention-3, compiled full",
        "GEMMs alone": "the matrix products alone",
    }
    rows = [[text, *(f"{ms[key]:.2f}" for ms in steps.values())] for key, text in labels.items()]
    batches = [str(batch) for batch in steps]
    return grid(["decode step, ms", f"batch {batches[0]}", *batches[1:]], rows)


def _generation() -> str:
    found: dict[str, dict[int, float]] = {}
    for row in extra("h200_engine_steps")["generation"]:
        found.setdefault(row["attention"], {})[row["batch"]] = row["ms_per_token"]
    rows = [[text, *(f"{ms:.2f}" for ms in found[key].values())] for key, text in _ATTENTION.items()]
    return grid(["token to token, ms", "batch 1", "8", "64", "256"], rows)


def _first_token(results: Iterable[Any]) -> str:
    found: dict[str, dict[str, Any]] = {}
    for row in results:
        found.setdefault(row["arm"], {})[row["cache"]] = row["seconds"]
    names = {
        "eager": "eager, plain layers",
        "simplegraph": "simplegraph, plain layers",
        "simplegraph-fused": "simplegraph, fused layers",
        "compiled-piecewise": "compiled piecewise",
    }

    def both(runs: dict[str, Any], seconds: Callable[[Any], float]) -> str:
        return " / ".join(f"{seconds(runs[cache]):.2f}" for cache in ("cold", "warm"))

    rows = []
    for key, text in ((key, text) for key, text in names.items() if key in found):
        ready = "" if key == "eager" else both(found[key], lambda s: s["ready"])
        after = both(found[key], lambda s: s["first_token"] - s["weights"])
        rows.append([text, both(found[key], lambda s: s["first_token"]), ready, after])
    head = ["s, compile caches empty / filled", "first token", "every graph", "first token after the weights"]
    return grid(head, rows)


def _serving(file: str = "h200_serve") -> str:
    keys = {
        "requests_per_second": ("requests/s", 1),
        "ttft_median_ms": ("time to first token, median, ms", 1),
        "tpot_median_ms": ("time per output token, median, ms", 2),
        "itl_mean_ms": ("between tokens, mean, ms", 2),
        "itl_median_ms": ("median", 2),
        "itl_p99_ms": ("99th percentile", 2),
    }
    rows = [
        [re.sub(", (triton|fa3)", "", name), *(f"{run[key]:.{digits}f}" for key, (_, digits) in keys.items())]
        for name, run in load(file)["results"].items()
    ]
    return grid(["mode", *(text for text, _ in keys.values())], rows)


def _generate() -> str:
    arms = extra("h200_transformers")["models"]["llama"]["arms"]
    names = {
        "plain": "plain `generate`",
        "static-compiled": "static cache, compiled by transformers",
        "simplegraph": "`graph_generation`",
        "simplegraph-8-tokens": "`graph_generation`, 8 tokens a launch",
    }
    rows = [
        [text, f"{arms[key]['ms_per_token']:.2f}", f"{arms[key]['first_seconds']:.2f}"] for key, text in names.items()
    ]
    return grid(["", "a token, ms", "first generation, s"], rows)


FAMILIES = {
    "llama": "Llama, 1.5 B parameters",
    "qwen2": "Qwen2, 0.5 B",
    "qwen3": "Qwen3, 0.6 B",
    "mistral": "Mistral, 1.0 B",
    "gemma3": "Gemma 3, 1.0 B",
    "gpt2": "GPT-2, 0.1 B",
    "mixtral": "Mixtral's kind, 0.8 B",
    "t5": "T5, 0.2 B",
    "whisper": "Whisper, 0.2 B",
}


def _families() -> str:
    rows = []
    for key, text in FAMILIES.items():
        arms = extra(f"h200x4_models/generate_{key}")["models"][key]["arms"]
        cells = [
            f"{arms[arm]['ms_per_token']:.2f} / {arms[arm]['first_seconds']:.2f}"
            for arm in ("plain", "static-compiled", "simplegraph")
        ]
        sooner = arms["static-compiled"]["first_seconds"] / arms["simplegraph"]["first_seconds"]
        rows.append([text, *cells, f"{arms['plain']['busy_share']:.0%}", f"{sooner:.0f} times"])
    head = ["a token, ms / first generation, s", "plain", "static cache, compiled", "`graph_generation`"]
    return grid([*head, "GPU busy, plain", "first generation sooner than compiled"], rows)


def _tokens() -> str:
    rows = []
    for key, text in FAMILIES.items():
        arms = load("h200_generate")["models"][key]["arms"]
        both = [arms[arm] for arm in ("static-compiled", "simplegraph")]
        compiled, graphs = (run["ms_per_token"] for run in both)
        first = [run["first_seconds"] for run in both]
        cells = [f"{run['ms_per_token']:.2f} / {run['first_seconds']:.2f}" for run in both]
        rows.append([text, *cells, f"{graphs / compiled:.2f}", f"{first[0] / first[1]:.0f} times"])
    head = ["a token, ms / first generation, s", "static cache, compiled", "`graph_generation`"]
    return grid([*head, "ratio of a token", "first generation sooner"], rows)


MODELS = {
    "timm_vit": "timm ViT",
    "timm_convnext": "timm ConvNeXt",
    "torchvision_resnet18": "torchvision ResNet-18",
    "diffusers_unet": "diffusers UNet",
    "diffusers_dit": "diffusers DiT",
    "transformers_bert": "transformers BERT",
    "transformer": "a small transformer",
    "unet": "a small UNet",
}
MODEL_ARMS = ("eager", "simplegraph", "compiled-reduce-overhead", "make-graphed-callables", "tensordict-cudagraph")


def models() -> dict[str, dict[str, Any]]:
    """Return the figures of every arm of vision, diffusion and encoder models, by the table's name."""
    found = {key: extra(f"h200x4_models/models_{key}")["models"] for key in MODELS}
    return {MODELS[key]: next(iter(arms.values())) for key, arms in found.items()}


def _models() -> str:
    rows = []
    for text, arms in models().items():
        cells = [f"{arms[arm]['ms']:.2f} / {arms[arm]['first_seconds']:.2f}" for arm in MODEL_ARMS]
        sooner = arms["compiled-reduce-overhead"]["first_seconds"] / arms["simplegraph"]["first_seconds"]
        rows.append([text, *cells, f"{arms['eager']['busy_share']:.0%}", f"{sooner:.0f} times"])
    head = ["a call, ms / first call, s", "eager", "simplegraph", "`torch.compile`, reduce-overhead"]
    more = ["`make_graphed_callables`", "tensordict", "GPU busy, eager", "first call sooner than compiled"]
    return grid([*head, *more], rows)


def _spec() -> str:
    found: dict[str, dict[int, Any]] = {}
    for row in extra("h200_spec_decode")["results"]:
        found.setdefault(row["arm"], {})[row["batch"]] = row
    rows = []
    for arm, runs in found.items():
        rounds = [
            " / ".join(f"{run[key]:.2f}" for run in runs.values() if key in run)
            for key in ("draft_ms", "draft_kernels_ms")
        ]
        rows.append([arm, *(f"{run['tpot_ms']:.2f}" for run in runs.values()), *rounds])
    head = ["", "time per output token, ms, at batch 1", "8", "32"]
    return grid([*head, "a draft round, ms, at batch 1 / 8 / 32", "its kernels, ms"], rows)


def _host() -> str:
    rows = []
    found = load("h200_host_overhead")
    by_sizes = found.get("medians_us") or {
        one["params"]["sizes"]: one["extra_info"]["microseconds"] for one in found["benchmarks"]
    }
    for sizes, us in by_sizes.items():
        cells = [us["bare"], us["in place above bare"], us["copied above bare"]]
        rows.append([f"{sizes} captured", *(f"{cell:.1f}" for cell in cells)])
    return grid(["us a call", "bare replay", "above it, inputs in place", "above it, four inputs copied"], rows)


def _recipes() -> str:
    rows = []
    for name, times in (load("h200_recipes")["ms"] | load("h200_recipes_sam2")["ms"]).items():
        kinds = [kind.replace("plain", "graphs") for kind in times or {} if "plain" in kind]
        for kind in kinds:
            plain, graphs = times[kind.replace("graphs", "plain")], times[kind]
            what = name if len(kinds) == 1 else f"{name}, {kind.removesuffix(' graphs')}"
            rows.append([f"`{what}`", f"{plain:.2f}", f"{graphs:.2f}", f"{plain / graphs:.1f}"])
    return grid(["ms of a call that is waited for", "plain", "with graphs", "times faster"], rows)


def _advise() -> str:
    rows = []
    for name, found in load("h200_advise")["programs"].items():
        if "told" in found:
            what = found["first"].split("`")[1]
            rows.append([name, f"`{what}`", f"{found['told']:.2f}", f"{found['measured']:.2f}", f"{found['off']:+.0%}"])
    return grid(["program", "what is ranked first", "times faster, told", "measured", "off by"], rows)


def _host_inputs() -> str:
    found = load("h100_host_inputs")["waited_us"]
    names = {
        "device": "copied to the GPU first, then passed",
        "pinned": "passed pinned, moved with `non_blocking=True`",
        "pinned, waits": "passed pinned, moved by `.to(device)`",
        "pageable": "passed from ordinary memory, moved by `.to(device)`",
        "eager": "eager, passed pinned",
    }
    rows = [[text, f"{found[key]:,.0f}", f"{found[key] / found['device']:.2f}"] for key, text in names.items()]
    return grid(["a call, waited for", "us", "beside the first"], rows)


# What the page of figures shows of a run's rows.
_SLEEP = (
    "sizes whose answers stay equal to the bit",
    "awake, GiB",
    "asleep, GiB above context and libraries",
    "on the host, GiB",
    "sleep, first and median, s",
    "wake, median and most, s",
    "dropping the graphs and capturing again, s",
)


def _sleep() -> str:
    """Show a run in a row."""
    runs = {name: dict(sleep.rows(load(f"{name.lower()}_sleep"))) for name in ("H200", "H100")}
    return grid(["8B shape", *_SLEEP], [[name, *(run[key] for key in _SLEEP)] for name, run in runs.items()])


def _serving_rates() -> str:
    keys = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between tokens"}
    rows = [
        [name.replace(", fa3", ""), *(f"{run[f'{key}_median_ms']:.1f}" for key in keys)]
        for name, run in load("h100_serve_rates")["results"].items()
    ]
    return grid(["medians, ms; mode, requests a second", *keys.values()], rows)


def _vllm_audit() -> str:
    found = load("h200_vllm_audit")
    plain = {"full": ("fullbase", "fullbase2"), "default": ("defbase", "defbase2")}
    names = {"full": "full graphs, no compiler", "default": "compiled, piecewise and full"}
    columns = []
    for mode, name in names.items():
        run, audit = found[mode], found[mode]["audit"]
        steps = [(each["without"][0], each["every 100th"][0]) for each in run["decode"].values()]
        without = sorted(found["without audit"][each]["GPUModelRunner.capture_model"] for each in plain[mode])
        columns.append(
            {
                "": name,
                "graphs inventoried": f"{audit['inventoried']:,} of {audit['graphs']:,}",
                "their nodes": f"{audit['nodes']:,}",
                "findings without a fault": str(len(run["no fault"])),
                "capture, s": f"{audit['capture_model seconds']:.2f}",
                "of it the audit's own, s": f"{audit['of it the audit']:.2f} ({audit['share']:.1%})",
                "captures of two processes without an audit, s": " and ".join(f"{each:.2f}" for each in without),
                "a step at batch 1, 8, 64, 256, ms": " / ".join(f"{without:.2f}" for without, _ in steps),
                "with every 100th replay checked": " / ".join(f"{checked:.2f}" for _, checked in steps),
                "one check, ms": f"{run['costs']['check ms']:.1f}",
                "a replay that is not checked, us": f"{run['costs']['hook us']:.1f}",
                "the report, s": f"{run['report']['seconds']:.2f}",
            }
        )
    rows = [[key, *(column[key] for column in columns)] for key in columns[0]]
    return grid(rows[0], rows[1:])


def _training() -> str:
    arms = ("eager", "hand-made", "train-step", "forward-backward", "compiled-reduce-overhead")
    rows = []
    for name, found in load("h200_training")["workloads"].items():
        if "train-step" in found:  # a whole step
            rows.append([name, f"{found['eager']['kernel_ms']:.2f}", *(f"{found[arm]['ms']:.2f}" for arm in arms)])
    names = ("eager", "a graph made by hand", "**`train_step`**", "**`training=True`**", "compiled, reduce-overhead")
    return grid(["a step, ms", "eager's kernels", *names], rows)


def _training_start() -> str:
    rows = []
    for name, found in load("h200_training")["workloads"].items():
        if "train-step" not in found:
            continue
        arms = found | load("h200_training_first")["workloads"].get(name, {})
        replay = arms["train-step"]["first_replay"]
        steps = {"eager": replay, "eager-capturable": replay, "train-step": replay}
        steps |= {"hand-made": arms["hand-made"]["first_replay"]}
        steps |= {"compiled-reduce-overhead": arms["compiled-reduce-overhead"]["steady"]}
        rows.append([name, *(f"{arms[arm]['calls'][index]:.2f}" for arm, index in steps.items())])
    head = ["s from the built model on", "eager, as many steps", "eager, `capturable`", "first replay of `train_step`"]
    return grid([*head, "of a graph made by hand", "compiled, steady"], rows)


def _training_pairs() -> str:
    rows = []
    for name, found in load("h200_training_pairs")["workloads"].items():
        ours, theirs = (found["in turn"]["ms"][arm] for arm in ("forward-backward", "make-graphed-callables"))
        rows.append([name, f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.2f}"])
    return grid(["a step, ms", "`training=True`", "`make_graphed_callables`", "ratio"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "model-table": model_table.all_rows,
    "model-table-names": model_table.names,
    "model-table-summary": model_table.summary,
    "readme": _readme,
    "readme-headline": ranges.headline,
    "readme-losses": ranges.losses,
    "headline": _headline,
    "losses": notes.losses,
    "http-load": notes.http_load,
    "optimized-summary": notes.optimized,
    "startup": _startup,
    "startup-beside-compiled": _beside_compiled,
    "startup-compiled": lambda: _startup("h200_startup_compiled"),
    "model-calls": _model_calls,
    "latency": latency.waited,
    "latency-back-to-back": latency.back_to_back,
    "latency-slowest": latency.slowest,
    "training-memory": _training_memory,
    "startup-preloaded": _preloaded,
    "mixed": _mixed,
    "attention": _attention,
    "decode": _decode,
    "generation": _generation,
    "first-token": lambda: _first_token(extra("h200_engine", "test_first_token")["results"]),
    "first-token-process": lambda: _first_token(load("h200_first_token")["results"]),
    "serving": _serving,
    "serving-rates": _serving_rates,
    "vllm-audit": _vllm_audit,
    "serving-speculation": speculation,
    "kinds-equal": kinds_equal,
    "kinds-steps": kinds_steps,
    "accuracy": accuracy,
    "generate": _generate,
    "families": _families,
    "tokens": _tokens,
    "models": _models,
    "speculative": _spec,
    "two-gpus": several_gpus.two_gpus,
    "four-gpus": several_gpus.four_gpus,
    "eight-gpus": several_gpus.eight_gpus,
    "eight-gpus-parts": several_gpus.eight_gpus_parts,
    "dtensor": several_gpus.dtensor,
    "two-batch": several_gpus.two_batch,
    "consensus": several_gpus.consensus,
    "recipes": _recipes,
    "advise": _advise,
    "host": _host,
    "host-inputs": _host_inputs,
    "sleep": _sleep,
    "optimized": optimized.models,
    "optimized-in-turn": optimized.in_turn,
    "other-compilations": optimized.other_compilations,
    "fused-operators": optimized.fused_operators,
    "training": _training,
    "training-start": _training_start,
    "training-pairs": _training_pairs,
    "lifecycle": lifecycle.drawing,
}
