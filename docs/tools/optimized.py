"""Tables of optimized modules beside the compiler, and of fused operators beside those of other libraries."""

from __future__ import annotations

from typing import Any

from docs.tools.grids import grid
from docs.tools.raw import load

MODELS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "convnext": "ConvNeXt-T",
    "efficientnet": "EfficientNet-B0",
    "vit": "ViT-B/16",
    "bert": "BERT",
    "unet": "UNet of Stable Diffusion 1.5",
    "dit": "DiT-XL/2",
}
_ARMS = ("eager", "graph", "optimized", "compiled")
_OPERATORS = {
    "add_rms_norm": "a sum and its RMS norm",
    "add_layer_norm": "a sum and its layer norm",
    "silu_and_mul": "SiLU and product",
    "gelu_and_mul": "GELU and product",
    "rotate_and_write": "rotary embedding and cache write",
    "group_norm": "group norm of images in channels_last",
}


def models() -> str:
    """Return the milliseconds of a call at batch 8 and the seconds of the first one, by model; README has batch 1."""
    found = load("h200_optimized")["rows"]
    rows = []
    for model, text in MODELS.items():
        arms = found[f"{model} 8"]["arms"]
        ratio = arms["optimized"]["ms"] / arms["compiled"]["ms"]
        times = [f"{arms[arm]['ms']:.2f}" for arm in _ARMS]
        first = [f"{arms[arm]['first_seconds']:.1f}" for arm in ("optimized", "compiled")]
        rows.append([text, *times, f"{ratio:.2f}", " / ".join(first)])
    head = ["batch 8", "eager, ms", "a graph, ms", "optimized, ms", "compiled, ms"]
    return grid([*head, "optimized over compiled", "first call, optimized / compiled, s"], rows)


def in_turn() -> str:
    """Return the milliseconds of calls whose batch sizes take turns, and the seconds until all are ready, by model."""
    found = load("h200_sizes_in_turn")["rows"]
    rows = []
    for model, text in MODELS.items():
        arms = found[f"{model} 1+2+4+8"]["arms"]
        times = [f"{arms[arm]['ms']:.2f}" for arm in _ARMS]
        ready = [f"{arms[arm]['ready_seconds']:.1f}" for arm in ("optimized", "compiled")]
        ratio = arms["optimized"]["ms"] / arms["compiled"]["ms"]
        rows.append([text, *times, f"{ratio:.2f}", " / ".join(ready)])
    head = ["batch 1, 2, 4, 8 in turn", "eager, ms", "a graph, ms", "optimized, ms", "compiled, ms"]
    return grid([*head, "optimized over compiled", "all are ready, optimized / compiled, s"], rows)


def compilers() -> dict[str, Any]:
    """Return the latest rows of compilers with warm caches; no run had time for all models."""
    rows: dict[str, Any] = load("h200_compilers")["rows"] | load("h200_compilers_84c6bcf")["rows"]
    return rows


def other_compilations() -> str:
    """Return the same for a compiler with warm caches, and for one that may freeze weights, at batch 1."""
    found = compilers()
    arms = ("optimized", "compiled-warm", "compiled-freezing")
    rows = []
    for model, text in MODELS.items():
        if f"{model} 1" in found:
            measured = found[f"{model} 1"]["arms"]
            times = [f"{measured[arm]['ms']:.2f}" for arm in arms]
            rows.append([text, *times, " / ".join(f"{measured[arm]['first_seconds']:.1f}" for arm in arms)])
    head = ["batch 1", "optimized, ms", "compiled, warm caches, ms", "compiled with `freezing`, ms"]
    return grid([*head, "first call, in this order, s"], rows)


def fused_operators() -> str:
    """Return the microseconds of an operator in a graph, and the seconds of its first use, by library."""
    rows, batches = [], ("1", "8", "64", "256")
    results = [each for each in load("h200_fused_operators")["results"] if "operators" in each]
    for operator, text in _OPERATORS.items():
        for each in results:
            found = each["operators"][operator]
            if "us" in found:
                times = [f"{found['us'][batch]:.1f}" for batch in batches]
                rows.append([f"{text}: {each['library']}", *times, f"{found['first_s']:.2f}"])
    return grid(["us", "1 row", *batches[1:], "first use, s"], rows)
