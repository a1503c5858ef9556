"""Tables of sliding windows and hybrids, of serving with speculation, and of trained weights' scores."""

from __future__ import annotations

from docs.tools.grids import grid
from docs.tools.raw import load

_KINDS = {"windows": "sliding windows", "hybrid": "attention and Mamba2"}


def kinds_equal() -> str:
    """Return how many requests have eager's tokens, by arm."""
    found = {text: load(f"h200_layer_kinds_{key}")["results"][key]["equality"] for key, text in _KINDS.items()}
    first = next(iter(found.values()))
    head = [f"of {first['requests']} requests, with eager's {first['tokens']} tokens", *found]
    return grid(head, ([arm, *(str(each["equal"][arm]) for each in found.values())] for arm in first["equal"]))


def kinds_steps() -> str:
    """Return the milliseconds of decode steps, by arm; hybrid layers were measured again since."""
    rows = []
    for file, kind in (("h200_layer_kinds", "windows"), ("h200_hybrid", "hybrid")):
        steps = load(file)["results"][kind]["steps"]["decode"]
        rows += [[f"{_KINDS[kind]}, batch {step['batch']}", *_two_digits(step["ms"])] for step in steps]
    return grid(["a decode step, ms", *steps[0]["ms"]], rows)


def _two_digits(ms: dict[str, float]) -> list[str]:
    return [f"{each:.2f}" for each in ms.values()]


def speculation() -> str:
    """Return latencies at three rates, with speculation and without."""
    keys = {
        "requests_per_second": ("requests/s", 1),
        "ttft_median_ms": ("time to first token, median, ms", 1),
        "tpot_median_ms": ("time per output token, median, ms", 2),
        "itl_median_ms": ("between rounds, median, ms", 2),
        "itl_p99_ms": ("99th percentile", 2),
        "mean_in_flight": ("requests in flight", 0),
    }
    rows = [
        [name.replace(", triton", ""), *(f"{run[key]:.{digits}f}" for key, (_, digits) in keys.items())]
        for name, run in load("h200_serve_speculation")["results"].items()
    ]
    return grid(["mode, arrivals", *(text for text, _ in keys.values())], rows)


def accuracy() -> str:
    """Return the scores of trained weights in every way of running them."""
    rows = []
    for task, ways in load("h200_accuracy")["results"].items():
        for way, found in ways.items():
            accepted = " ".join(f"{share:.2f}" for share in found.get("per_position", ()))
            rows.append([f"{task}, {way}", f"{found['exact_match']:.3f}", f"{found['perplexity']:.4f}", accepted])
    return grid(["task, way", "exact match", "perplexity", "drafts accepted in each position"], rows)
