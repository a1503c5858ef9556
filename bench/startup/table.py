"""Formats the comparison as text."""

from __future__ import annotations

from bench.startup.runs import Result, comparison, figure
from bench.tools.measure import NOT_SPEED
from bench.tools.tables import MIB, NOTHING, grid, heading, measured

GIB = 2**30

EMULATED = f"{NOT_SPEED}\nThe compiled arms ran the C++ compiler's code without graphs."
EXPLANATION = """\
first, ready: seconds from the built model to the output of one request, and to every size ready.
ms: time of one step by batch. error: largest against eager, relative.
again: the same start a second time in the process, when what a first start loads is there: seconds, memory kept.
equal: comparisons with eager at captured sizes that agree to the bit.
replayed: of our arms, the timed and compared steps that graphs served, as the library counts them, and all of them."""
GPU_EXPLANATION = """\
piecewise/: how many times sooner than compiled-piecewise (cold, warm cache) every size is ready.
captures alone: what our graphs' captures and instantiation take of it, without the warmup and checks around them.
keeps: device memory gone after the start, libraries' own included in the first start. peak: tensors, weights included.
host: time to issue one call at batch 1."""


def render(results: dict[str, Result]) -> str:
    """Format the heading, one row per run, the runs without figures, and an explanation."""
    found = rows(results)
    if not found:
        return f"{heading(results)}\n\n{missing(results)}"
    parts = [heading(results), grid(measured([header(results), *found]))]
    if _emulated(results):
        parts += [EMULATED, missing(results), EXPLANATION, finding(results)]
    else:
        parts += [missing(results), ratios(results), f"{EXPLANATION}\n{GPU_EXPLANATION}", finding(results)]
    return "\n\n".join(part for part in parts if part)


def finding(results: dict[str, Result]) -> str:
    """Say in a sentence what was found of simplegraph; "" if it has no figures."""
    ours, eager = results.get("simplegraph", {}), results.get("eager")
    ready = figure(ours, "seconds", "ready")
    if ready is None:
        return ""
    found = f"Found: simplegraph had {len(ours['sizes'])} batch sizes ready {ready:.2f} s after the model was built"
    if _emulated(results):
        equal, error = _equal(ours), max((one["error"] for one in ours["correct"]), default=0.0)
        return f"{found}; at captured sizes {equal} answers are eager's to the bit, the largest error is {error:.0e}."
    others = [(cache, figure(results.get(f"compiled-piecewise ({cache})"), "seconds", "ready")) for cache in _CACHES]
    sooner = [
        f"{other / ready:.1f} times sooner than torch.compile ({cache} cache)" for cache, other in others if other
    ]
    pairs = [(batch, figure(ours, "step_ms", batch), figure(eager, "step_ms", batch)) for batch in _batches(results)]
    steps = [f"{one / other:.2f} of eager's step at batch {batch}" for batch, one, other in pairs if one and other]
    return "; ".join([", ".join([found, *sooner]), *([f"a step takes {', '.join(steps)}"] if steps else [])]) + "."


def header(results: dict[str, Result]) -> list[str]:
    """Return the column names, with one per batch that was timed."""
    steps = [f"ms b{batch}" for batch in _batches(results)]
    start = ["arm", "first s", "ready s", "piecewise/ cold", "warm", "again s", "keeps MiB", "again MiB", "peak GiB"]
    return [*start, *steps, "host us", "error", "equal", "graphs", "replayed"]


def rows(results: dict[str, Result]) -> list[list[str]]:
    """Return one row per run that has figures."""
    return [_row(label, result, results) for label, result in results.items() if result["status"] == "ok"]


def _row(label: str, result: Result, results: dict[str, Result]) -> list[str]:
    ready = figure(result, "seconds", "ready")
    others = [figure(results.get(f"compiled-piecewise ({cache})"), "seconds", "ready") for cache in _CACHES]
    if result["device"] == "cpu":
        others = [None] * len(others)  # a ratio of the emulator to a C++ compiler means nothing
    return [
        label,
        _number(figure(result, "seconds", "first_output"), "{:.3f}"),
        _number(ready, "{:.3f}"),
        *(_number(other / ready if other and ready else None, "{:.1f}x") for other in others),
        _number(figure(result, "primed", "seconds", "ready"), "{:.3f}"),
        _number(figure(result, "device_bytes"), "{:.0f}", MIB),
        _number(figure(result, "primed", "device_bytes"), "{:.0f}", MIB),
        _number(figure(result, "peak_bytes"), "{:.2f}", GIB),
        *(_number(figure(result, "step_ms", batch), "{:.2f}") for batch in _batches(results)),
        _number(figure(result, "host_us"), "{:.1f}"),
        _number(max((one["error"] for one in result["correct"]), default=None), "{:.0e}"),
        _equal(result),
        result["graphs"],
        f"{result['replays']}/{result['steps']}" if "replays" in result else NOTHING,
    ]


_CACHES = ("cold", "warm")


def _equal(result: Result) -> str:
    """Count the comparisons at captured sizes that were equal to the bit."""
    captured = [one["equal"] for one in result["correct"] if one["captured"]]
    return f"{sum(captured)}/{len(captured)}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return NOTHING if value is None else form.format(value / unit)


def _emulated(results: dict[str, Result]) -> bool:
    return any(result.get("device") == "cpu" for result in results.values())


def _batches(results: dict[str, Result]) -> list[str]:
    """List the batches that any run was timed at, ascending."""
    found = {batch for result in results.values() for batch in result.get("step_ms", {})}
    return sorted(found, key=int)


def missing(results: dict[str, Result]) -> str:
    """List the runs without figures and the reasons, and the notes of the others."""
    bad = [f"{label}: {r['status']}: {r['error']}" for label, r in results.items() if r["status"] != "ok"]
    notes = [f"{label}: {note}" for label, r in results.items() for note in r.get("notes", ())]
    return "\n".join(bad + notes)


def ratios(results: dict[str, Result]) -> str:
    """Format the ratios that judge the library, one per line."""
    return "\n".join(f"{name.replace('_', ' ')}: {ratio:.3g}" for name, ratio in comparison(results).items())
