"""Tables and sentences about figures say what the raw files say; nothing in a plot is cut off."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from docs.tools import drawings, model_table, plots, quantities, ranges, raw, tables, wording
from docs.tools import optimized as optimized_page
from tests.docs.pages import DOCS, PAGES, ROOT, name_of, prose, text_of
from tests.docs.test_headline import git

FIGURES, HISTORY = DOCS / "figures.md", ROOT / "bench" / "results" / "README.md"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_raw_figures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.fill(text) == text, "python -m docs.tools writes the tables again"
    assert "<!-- table:" in text


def test_every_table_is_shown() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert [name for name in tables.TABLES if f"<!-- table: {name} -->" not in pages] == []


def test_every_model_that_was_tried_is_named_with_what_came_of_it() -> None:
    page = (DOCS / "models_tried.md").read_text(encoding="utf-8")
    names = [name.removeprefix(f"{row['category']}/") for name, row in model_table.rows().items()]
    assert len(names) > 180
    assert [name for name in names if not re.search(rf"[|,] {re.escape(name)} \([^)]", page)] == []


def test_a_table_whose_figures_are_not_there_says_so_and_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with one must build, and no other table may go with it."""
    monkeypatch.setitem(tables.TABLES, "host", lambda: str(raw.load("h200_absent")))
    page = tables.fill("a\n<!-- table: host -->\n| old |\n<!-- end -->\nb\n<!-- table: lifecycle -->\n<!-- end -->\n")
    assert page.startswith(
        "a\n<!-- table: host -->\n\n**Not measured yet**: `bench/results` has no `h200_absent.json`."
    )
    assert "| old |" not in page
    assert "UNSEEN" in page


def between(ratios: Iterable[float], form: str = ".2f") -> str:
    found = list(ratios)
    return " to ".join(dict.fromkeys(f"{ratio:{form}}" for ratio in (min(found), max(found))))


def ready(one: str, other: str, file: str = "h200_startup_compiled") -> float:
    runs = raw.startup(file)
    return float(runs[one]["seconds"]["ready"] / runs[other]["seconds"]["ready"])


def again(key: str, one: str, other: str, file: str = "h200_startup_compiled") -> float:
    first, second = (raw.startup(file)[name]["primed"] for name in (one, other))
    return float(first[key] / second[key]) if key == "device_bytes" else first["seconds"][key] / second["seconds"][key]


def decode(one: str, other: str) -> list[float]:
    return [row["ms"][one] / row["ms"][other] for row in raw.extra("h200_engine_steps")["decode"]]


def sooner() -> list[float]:
    arms = tables.models().values()
    return [each["compiled-reduce-overhead"]["first_seconds"] / each["simplegraph"]["first_seconds"] for each in arms]


def generated_sooner() -> list[float]:
    models = raw.load("h200_generate")["models"].values()
    return [
        model["arms"]["static-compiled"]["first_seconds"] / model["arms"]["simplegraph"]["first_seconds"]
        for model in models
    ]


def profiled(attention: str) -> list[float]:
    steps = raw.load("h100_engine_profile")["steps"]
    return [step["ms"] for step in reversed(steps) if step["attention"] == attention]


def _and(figures: list[float]) -> str:
    *first, last = (f"{figure:.2f}" for figure in figures)
    return f"{', '.join(first)} and {last}"


def shorter(ours: float, other: float) -> float:
    return 100 * (1 - ours / other)


def kernels(name: str) -> float:
    """Add up the ms of kernels of a name in the profiled step of 256 requests."""
    step = next(
        each
        for each in raw.load("h100_engine_profile")["steps"]
        if (each["attention"], each["batch"]) == ("triton", 256)
    )
    return sum(us for kernel, _, us in step["kernels"] if name in kernel and "layer_norm" not in kernel) / 1e3


def in_turn(arm: str, *, again: bool = False) -> float:
    """Compute the median of an arm's starts, the first ones or all later ones in the process."""
    runs = [run for run in raw.load("h100_startup_rounds")["runs"] if run["arm"] == arm]
    found = [seconds for run in runs for seconds in (run["again"] if again else [run["seconds"]["ready"]])]
    return statistics.median(found)


def _over(arm: str, *, again: bool = False) -> str:
    """Write an arm's seconds, and ours over them."""
    other = in_turn(arm, again=again)
    return f"{other:.2f} ({in_turn('simplegraph', again=again) / other:.2f})"


def longest(arm: str, file: str = "h100_lazy_in_gaps") -> float:
    return float(raw.load(file)["lazy"][arm]["longest_ms"])


def _times_eagers_longest(arm: str, digits: int) -> tuple[str, str]:
    """Return the ms of an arm's longest call, of the headline, and how many times eager's it is."""
    ours = longest(arm, "headline/model_calls")
    return f"{ours:.0f} ms", f"{ours / longest('eager', 'headline/model_calls'):.{digits}f}"


def _between_starts(arm: str) -> str:
    """Divide the longer of an arm's first starts by the shorter."""
    found = [each["ready"] for each in raw.startup("headline/startup")[arm]["rounds"]]
    return f"{max(found) / min(found):.2f}"


def issued() -> str:
    """What Python takes to issue operators of the library, and torch's."""
    us = {name: each["eager_us"] for name, each in raw.load("h100_fused_launches")["host_us"].items()}
    norm, gate, rotary = (us[f"{name}, the fused operator"] for name in ("add_rms_norm", "gated", "rotate"))
    ours = f"in {norm:.0f} us, the gate in {gate:.0f} and the rotary embedding in {rotary:.0f}"
    torchs = [us[f"torch's {name}"] for name in ("rms_norm", "add")]
    return f"{ours}, torch's norm in {torchs[0]:.0f} and a sum in {torchs[1]:.0f}"


def captured_again(arm: str) -> str:
    """The seconds that captures took, but for the first start in the process, which loads libraries."""
    starts = [each for each in raw.load("h100_fused_launches")["starts"][1:] if each["arm"] == arm]
    return between(each["parts_s"]["capture"] for each in starts)


def tokens_on_an_h200(name: str, said: str) -> str:
    """A token's median ms by requests, and how many times its products alone that is."""
    file = raw.load(name)
    ms = [each["median_ms"] for each in file["generation"]]
    times = [own / each["ms"]["GEMMs alone"] for own, each in zip(ms, file["decode"], strict=True)]
    return f"{_and(ms)} ms {said} {_and(times)}"


def started_on_an_h200(other: str, *, again: bool = False) -> tuple[str, str]:
    """Write our seconds until every size is ready, another arm's, and how many times these ours are."""
    runs = (raw.startup("h200_startup_lean")[arm] for arm in (OURS, other))
    ours, others = (float((run["primed"] if again else run)["seconds"]["ready"]) for run in runs)
    return f"{ours:.2f} s", f"{others:.2f} ({ours / others:.2f})"


def one_row(key: str, model: str = "8B", part: str = "linears") -> str:
    """Write the us of a layer's linear layers on a single row, but for the vocabulary's."""
    found = [
        each[key]
        for each in raw.load("h200_one_row")[part]
        if (each["model"], each["layer"] == "head") == (model, False)
    ]
    *first, last = (f"{us:.1f}" for us in found)
    return f"{', '.join(first)} and {last} us"


PROMPTS = "h200_generate_prompts"


def a_token(arm: str, file: str = "h200_generate_launches", key: str = "ms_per_token") -> float:
    return float(raw.load(file)["models"]["llama"]["arms"][arm][key])


def autotuned(arm: str, key: str) -> float:
    return float(raw.load("h100_optimized_autotuned")["rows"]["bert 1"]["arms"][arm][key])


def faster() -> list[float]:
    return [arms["eager"]["ms"] / arms["simplegraph"]["ms"] for arms in tables.models().values()]


def later_than(arm: str, key: str) -> int:
    return sum(arms[arm][key] < arms["simplegraph"][key] for arms in tables.models().values())


def shorter_by() -> list[float]:
    ours = raw.load("h200x4_tp4_70b")["results"]["simplegraph"]["step_ms"]
    compiled = raw.load("h200x4_tp4_70b_compiled")["results"].values()
    return [100 * (1 - run["step_ms"][batch] / ms) for run in compiled for batch, ms in ours.items()]


def prepared(backend: str) -> list[float]:
    return [row["prepare_us"] for row in raw.extra("h200_attention")["rows"] if row["backend"] == backend]


def optimized(key: str, one: str, other: str) -> list[float]:
    """Ratios of two arms, a row each."""
    rows = raw.load("h200_optimized")["rows"].values()
    return [row["arms"][one][key] / row["arms"][other][key] for row in rows]


def slowest() -> float:
    """A whole model's call over its bare replay."""
    calls = raw.load("h200_model_calls")["steady"]
    return max(each["ms"] / each["bare_ms"] for name, each in calls.items() if name != "ten modules")


def first_again() -> list[float]:
    return [row["arms"]["optimized-static"]["first_seconds"] for row in raw.load("h200_optimized")["rows"].values()]


def libraries() -> dict[str, Any]:
    return {each["library"]: each for each in raw.load("h200_fused_operators")["results"]}


def errors() -> list[float]:
    ours, theirs = (libraries()[name]["operators"] for name in ("simplegraph", "torch"))
    return [each["error"] / theirs[name]["error"] for name, each in ours.items() if "error" in each]


def shortest() -> str:
    """In how many rows a library has the shortest time; one number of rows of one operator is a row."""
    named = {name: each["operators"] for name, each in libraries().items() if "operators" in each}
    least = []
    for operator, ours in named["simplegraph"].items():
        for rows in ours["us"]:
            us = {name: each[operator]["us"][rows] for name, each in named.items() if "us" in each[operator]}
            least.append(min(us, key=us.__getitem__))
    return "each row" if set(least) == {"simplegraph"} else f"{least.count('simplegraph')} of {len(least)} rows"


def started(arm: str, key: str) -> list[Any]:
    """A figure of the processes to a first token, caches empty and filled."""
    return [each[key] for each in raw.load("h200_first_token")["results"] if each["arm"] == arm]


def imported(arm: str) -> str:
    return " / ".join(f"{seconds['imported']:.1f}" for seconds in started(arm, "seconds"))


def weights() -> str:
    found = [each["seconds"] for each in raw.load("h200_first_token")["results"]]
    return between((seconds["weights"] - seconds["imported"] for seconds in found), ".1f")


def preloaded(name: str) -> str:
    return f"{raw.load('h200_startup_preloaded')['comparison'][name]:.2f}"


NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "all eight"}
NOW, OURS = "headline/startup", "simplegraph"
COLD, WARM = "compiled-piecewise (cold)", "compiled-piecewise (warm)"
CLAIMS: list[tuple[str, Callable[[], str]]] = [
    ("{} times sooner than with compiled piecewise", lambda: f"{ready(COLD, 'simplegraph'):.1f}"),
    ("and {} times sooner than from a filled one", lambda: f"{ready(WARM, 'simplegraph'):.1f}"),
    ("took {} of the plain loop's time", lambda: f"{again('ready', 'simplegraph', 'plain-loop'):.2f}"),
    ("kept {} of its memory", lambda: f"{again('device_bytes', 'simplegraph', 'plain-loop'):.2f}"),
    ("start takes {} times as long as eager needs to run every", lambda: f"{ready(OURS, 'eager', NOW):.2f}"),
    ("{} times as long as the lean loop", lambda: f"{ready(OURS, 'lean-loop', NOW):.2f}"),
    (
        "second one takes {} of the plain loop's, and keeps",
        lambda: " times the lean loop's time and ".join(
            f"{again('ready', OURS, other, NOW):.2f}" for other in ("lean-loop", "plain-loop")
        ),
    ),
    ("and keeps {} of their memory", lambda: f"{again('device_bytes', OURS, 'plain-loop', NOW):.2f}"),
    ("the start takes {} times as long", lambda: f"{ready('simplegraph-fused', OURS, NOW):.1f}"),
    (
        "of which the longer took {} times (lean loop) as long",
        lambda: (
            f"{_between_starts('eager')} (eager), {_between_starts('simplegraph')} (ours) and "
            f"{_between_starts('lean-loop')}"
        ),
    ),
    (
        "a generated token takes {} times its matrix products alone, by",
        lambda: tokens_on_an_h200("h200_engine_one_row", "in the median at 1, 8 and 64 requests:"),
    ),
    (
        "commit 65e8625): {} times its products alone.",
        lambda: tokens_on_an_h200("h200_engine_triton", "at 1, 8, 64 and 256 requests,"),
    ),
    ("multiplies, and down take {}, the gate's", lambda: one_row("us")),
    ("and cuBLAS {} without it", lambda: one_row("us, 1 row", part="cuBLAS")),
    (
        "they take {} with one token in a launch",
        lambda: " ms, and ".join(f"{a_token(arm):.2f}" for arm in ("simplegraph-8-tokens", "simplegraph")),
    ),
    (
        "commit c55bbe1) they take {} with one token in a launch",
        lambda: " ms, and ".join(f"{a_token(arm, PROMPTS):.2f}" for arm in ("simplegraph-8-tokens", "simplegraph")),
    ),
    (
        "A generation of one token takes {}.",
        lambda: " ms there, and plain `generate`'s ".join(
            f"{a_token(arm, PROMPTS, 'first_token_ms'):.1f}" for arm in ("simplegraph-8-tokens", "plain")
        ),
    ),
    ("a first start took {}, the lean", lambda: ", eager ".join(started_on_an_h200("eager"))),
    ("the lean loop {}, and a second", lambda: started_on_an_h200("lean-loop")[1]),
    ("and a second {}.", lambda: " beside ".join(started_on_an_h200("lean-loop", again=True))),
    ("Python issued the sum with its norm {}. Triton", issued),
    (
        "they took {} without",
        lambda: f"{captured_again('simplegraph-fused')} s with fused layers and {captured_again('simplegraph')} s",
    ),
    ("a second one {} times.", lambda: f"{again('ready', 'simplegraph-fused', OURS, NOW):.1f}"),
    ("then waits for up to {} times as long as eager's", lambda: ", ".join(_times_eagers_longest("simplegraph", 1))),
    (
        "no call took longer than {} times eager's longest",
        lambda: ", ".join(_times_eagers_longest("simplegraph-in-gaps", 2)),
    ),
    ("every size is ready after {} s", lambda: f"{raw.startup(NOW)['simplegraph-lazy']['seconds']['ready']:.1f}"),
    ("step takes at most {} % longer than the bare replay", lambda: f"{100 * (slowest() - 1):.1f}"),
    ("takes {} times as long as eager needs", lambda: preloaded("ready_ours_over_eager")),
    ("for the first time, its captures alone {}.", lambda: preloaded("ready_our_captures_alone_over_eager")),
    (
        "second one takes {} of the plain loop's time, its",
        lambda: f"{1 / float(raw.load('h200_startup_preloaded')['comparison']['again_plain_loop_over_ours']):.2f}",
    ),
    ("time, its captures alone {}.", lambda: preloaded("again_our_captures_alone_over_plain_loop")),
    ("{} of the capture time", lambda: f"{again('ready', 'simplegraph-piecewise', 'breakable'):.2f}"),
    (
        "{} of the memory of its quick start",
        lambda: f"{again('device_bytes', 'simplegraph-piecewise', 'breakable'):.2f}",
    ),
    (
        "{} of its leanest use",
        lambda: " and ".join(
            f"{again(key, 'simplegraph-piecewise', 'breakable-lean'):.2f}" for key in ("ready", "device_bytes")
        ),
    ),
    ("takes {} of compiled piecewise, and", lambda: between(decode("fa3 graph", "compiled-piecewise"))),
    ("and {} of compiled full graphs", lambda: between(decode("fa3 graph", "compiled-full"))),
    ("measured with, takes {} of compiled piecewise", lambda: between(decode("triton graph", "compiled-piecewise"))),
    ("{} times faster than eager", lambda: between(faster(), ".1f")),
    ("first call comes {} times sooner", lambda: f"{int(min(sooner()))} to {int(max(sooner()))}"),
    (
        "comes {} times sooner than the compiled one's",
        lambda: f"{min(generated_sooner()):.1f} to {max(generated_sooner()):.1f}",
    ),
    ("shorter call on {} of the eight", lambda: NUMBERS[later_than("compiled-reduce-overhead", "ms")]),
    ("simplegraph on {} of the eight", lambda: NUMBERS[later_than("make-graphed-callables", "first_seconds")]),
    ("tensordict on {}", lambda: NUMBERS[later_than("tensordict-cudagraph", "first_seconds")]),
    ("compiled steps are {} % shorter", lambda: f"{min(shorter_by()):.0f} to {max(shorter_by()):.0f}"),
    ("the host {} us with FlashAttention-3", lambda: between(prepared("FlashAttention-3"), ".1f")),
    ("optimized call takes {} times as long as", lambda: between(optimized("ms", "optimized", "compiled"))),
    (
        "one, {} times in the geometric mean",
        lambda: f"{statistics.geometric_mean(optimized('ms', 'optimized', 'compiled')):.2f}",
    ),
    ("in {} of the 16 rows", lambda: str(sum(ratio > 1 for ratio in optimized("ms", "optimized", "compiled")))),
    ("graph without `optimize` takes {} times", lambda: between(optimized("ms", "graph", "optimized"))),
    (
        "a replay, {} times sooner than the compiled",
        lambda: between(optimized("ready_seconds", "compiled", "optimized"), ".1f"),
    ),
    (
        "runs eagerly in ours, {} times.",
        lambda: between(optimized("first_seconds", "compiled", "optimized"), ".1f"),
    ),
    ("optimized after that, takes {} s", lambda: between(first_again())),
    ("errors are {} times eager's", lambda: between(optimized("error", "optimized", "eager"))),
    ("of the compiler {} times", lambda: between(optimized("error", "compiled", "eager"))),
    ("kernels have the shortest time in {}.", shortest),
    ("ready after {} s one after", lambda: f"{libraries()['simplegraph']['ready_s']:.1f}"),
    ("after {} s if each is", lambda: f"{libraries()['simplegraph-threads']['ready_s']:.1f}"),
    ("four after {} s", lambda: f"{libraries()['flashinfer']['ready_s']:.1f}"),
    ("against float64 are {} times those of torch's", lambda: between(errors())),
    (
        '"Every graph" is {} of the compiled',
        lambda: (
            f"{started('simplegraph-fused', 'captured')[0]} of ours, full and piecewise, and "
            f"{started('compiled-piecewise', 'captured')[0]}"
        ),
    ),
    ("weights took {} s;", weights),
    ("imported after {} s with fused", lambda: imported("simplegraph-fused")),
    ("and after {} s with the compiler", lambda: imported("compiled-piecewise")),
    ("and {} us with FlashInfer", lambda: between(map(int, prepared("FlashInfer")), "d")),
    ("takes {} ms with `TritonDecodeBackend`, and", lambda: _and(profiled("triton"))),
    ("`TritonDecodeBackend`, and {} ms with FlashAttention-3.", lambda: _and(profiled("fa3"))),
    (
        "by itself, they are on an H100 {} % shorter",
        lambda: between(map(shorter, profiled("triton"), profiled("fa3")), ".0f"),
    ),
    ("products take {}, attention", lambda: f"{kernels('nvjet'):.2f}"),
    ("attention {}, which reads", lambda: f"{kernels('_decode'):.2f}"),
    ("gates {}, norms", lambda: f"{kernels('_gate'):.2f}"),
    ("norms {}, the choice", lambda: f"{kernels('_norm'):.2f}"),
    ("the choice of the token {} (", lambda: f"{kernels('reduce_kernel'):.2f}"),
    ("rotary embeddings {}.", lambda: f"{kernels('_rotate_and_write'):.2f}"),
    ("took {} s in the median, eager", lambda: f"{in_turn('simplegraph'):.2f}"),
    ("in the median, eager {} and the lean", lambda: _over("eager")),
    ("and the lean loop {}, which", lambda: _over("lean-loop")),
    ("which needs {} of eager's time itself", lambda: f"{in_turn('lean-loop') / in_turn('eager'):.2f}"),
    ("Second starts took {} s beside", lambda: f"{in_turn('simplegraph', again=True):.2f}"),
    ("beside the lean loop's {}.", lambda: _over("lean-loop", again=True)),
    ("the longest call took {} ms", lambda: f"{longest('simplegraph-in-gaps'):.0f}"),
    (
        "ms, eager's longest {}, and",
        lambda: f"{longest('eager'):.0f} ({longest('simplegraph-in-gaps') / longest('eager'):.2f})",
    ),
    ("and {} ms where the sizes were captured lazily", lambda: f"{longest('simplegraph'):.0f}"),
    ("its fourth call was done after {} s", lambda: f"{autotuned('compiled-max-autotune', 'ready_seconds'):.0f}"),
    ("the compiled one's after {} and", lambda: f"{autotuned('compiled', 'ready_seconds'):.1f}"),
    ("and ours after {}, and", lambda: f"{autotuned('optimized', 'ready_seconds'):.1f}"),
    ("and a call took {} ms, in place", lambda: f"{autotuned('compiled-max-autotune', 'ms'):.2f}"),
    (
        "of the compiled one's {}.",
        lambda: f"{autotuned('compiled', 'ms'):.2f} and our {autotuned('optimized', 'ms'):.2f}",
    ),
]


def test_a_range_holds_its_ends_and_one_number_is_no_range() -> None:
    assert wording.between([3.0, 1.0, 2.04], ".1f") == "1.0 to 3.0"
    assert wording.between([1.01, 1.04], ".1f") == "1.0"


def test_the_headline_is_of_both_batches_and_both_states_of_the_compilers_cache() -> None:
    """A ratio over one slow host's eager, beside a compiler's cold start, is not the whole of it."""
    said, lost = (" ".join(part().split()) for part in (ranges.headline, ranges.losses))
    parts = ("batch 1", "batch 8", "back to back", "waited for", "cold cache", "warm one", "host runs Python slowly")
    assert [part for part in parts if part not in said] == []
    assert [part for part in ("lazy", "waits", "GPU memory", "compiler is ahead") if part not in lost] == []
    one = [eager["ms"] / ours["ms"] for eager, ours, _ in ranges.arms(1)]
    assert f"{min(one):.1f} to {max(one):.1f} times faster than eager over all" in said
    assert said.startswith("- **How much you gain depends mostly on how slow the host's Python is.**")
    assert len(one) > 2 * len(optimized_page.MODELS), "every run on an H200"


def test_memory_is_that_of_pools_once_a_run_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory also falls for another process on the GPU."""
    assert "by the fall of free memory" in ranges.losses()
    measured = raw.load("headline/models")
    rows = {
        name: {"arms": {arm: {**each} for arm, each in row["arms"].items()}} for name, row in measured["rows"].items()
    }
    for count, row in enumerate(rows.values()):
        row["arms"]["graph"]["memory"] = {"pool_bytes": (count + 3) << 20}
    monkeypatch.setattr(ranges, "load", lambda name: {"rows": rows} if name == "headline/models" else raw.load(name))
    assert f"3 to {2 + len(rows)} MiB at batch 1, in their pools" in " ".join(ranges.losses().split())


@pytest.mark.parametrize(("sentence", "value"), CLAIMS, ids=[sentence for sentence, _ in CLAIMS])
def test_a_sentence_says_what_the_raw_figures_say(sentence: str, value: Callable[[], str]) -> None:
    """Of the history, whose sentences nobody writes again; those of pages are written by script."""
    assert sentence.format(value()) in " ".join(prose(HISTORY).split())


def by_hand(page: Path) -> str:
    """Return what a person wrote of a page: no tables, code or inline code."""
    written = re.sub(r"<!-- table:.*?<!-- end -->", "", text_of(page), flags=re.DOTALL)
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", written, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [ROOT / "README.md", FIGURES], ids=lambda page: page.name)
def test_no_measured_number_is_written_by_hand(page: Path) -> None:
    """Prose that states a number is written from the raw figures like the tables, or goes."""
    goals = {"0.2 us", "0.1 us"}  # what a guard may cost
    found = re.findall(r"\d[\d.,]* (?:s|ms|us|times|MiB|%)(?!\w)", by_hand(page))
    assert [number for number in found if number not in goals] == []


def test_every_file_of_raw_figures_measured_one_quantity_and_is_named_with_its_commit() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert len(raw.names()) >= 30
    assert [name for name in raw.names() if not quantities.quantity(name)] == []
    listed = {name for files in quantities.QUANTITIES.values() for name in files}
    assert listed == {quantities.family(name) for name in raw.names()}
    assert [name for name in raw.names() if f"commit {raw.commit(name)}" not in text] == []


def shown_by(page: Path) -> set[str]:
    """Return the raw files that a page's tables are made from, and those that its prose names."""
    shown: set[str] = set()
    for name in re.findall(r"<!-- table: ([\w-]+) -->", text_of(page)):
        if name not in quantities.RANGES:
            tables.make(name)
            shown.update(raw.read)
    named = re.findall(r"`([\w/]+)\.json`", re.sub(r"<!-- table:.*?<!-- end -->", "", text_of(page), flags=re.DOTALL))
    return shown | {name for name in named if name in raw.names()}


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=name_of)
def test_a_page_shows_the_newest_file_of_a_quantity_and_none_of_a_dirty_commit(page: Path) -> None:
    shown = shown_by(page)
    assert [name for name in sorted(shown) if quantities.is_superseded(name)] == []
    assert [name for name in sorted(shown) if raw.is_dirty(name)] == []


def test_files_of_a_quantity_are_listed_from_the_oldest_commit_to_the_newest() -> None:
    for files in quantities.QUANTITIES.values():
        of_family = [next(name for name in raw.names() if quantities.family(name) == file) for file in files]
        dates = [int(git("log", "-1", "--format=%ct", raw.commit(name))) for name in of_family]
        assert dates == sorted(dates), files


def test_an_older_file_and_a_dirty_one_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("As `h200_startup_compiled.json` says, and `h200_trace.json`.", encoding="utf-8")
    assert shown_by(page) == {"h200_startup_compiled", "h200_trace"}
    assert quantities.is_superseded("h200_startup_compiled")
    assert not quantities.is_superseded("h200_startup")
    assert raw.is_dirty("h200_trace")
    assert not raw.is_dirty("h200_startup")


@pytest.mark.parametrize("name", [*plots.PLOTS, *drawings.DRAWINGS])
def test_no_label_of_a_picture_is_cut_off_or_overlaps_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    if name in plots.PLOTS:
        plots.PLOTS[name](tmp_path / "plot.png")
    else:
        drawings.draw_one(name, tmp_path / "plot.png")
    monkeypatch.undo()
    (chart,) = kept
    chart.canvas.draw()
    texts = [text for text in chart.findobj(pyplot.Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in _shown(chart, texts)]
    frame = chart.bbox.padded(1)
    cut = [text for text, box in boxes if not (frame.x0 <= box.x0 and box.x1 <= frame.x1)]
    cut += [text for text, box in boxes if not (frame.y0 <= box.y0 and box.y1 <= frame.y1)]
    pairs = itertools.combinations(boxes, 2)
    overlapping = [(one, other) for (one, a), (other, b) in pairs if a.shrunk(0.9, 0.9).overlaps(b.shrunk(0.9, 0.9))]
    pyplot.close(chart)
    assert (cut, overlapping) == ([], [])
    assert len(boxes) >= 5
    assert (ROOT / "docs" / "_static" / f"{name}.png").stat().st_size > 5000


def _shown(chart: Any, texts: Iterable[Any]) -> list[Any]:
    """Texts that are drawn: an axis keeps tick labels beyond its ends, too."""
    hidden = set()
    for axis in chart.axes:
        for part, limits in ((axis.xaxis, sorted(axis.get_xlim())), (axis.yaxis, sorted(axis.get_ylim()))):
            ticks = [*part.get_major_ticks(), *part.get_minor_ticks()]
            outside = [tick for tick in ticks if not limits[0] <= tick.get_loc() <= limits[1] or not axis.axison]
            hidden |= {id(label) for tick in outside for label in (tick.label1, tick.label2)}
            hidden |= {id(part.get_offset_text())}
    return [text for text in texts if id(text) not in hidden]
