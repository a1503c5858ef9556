"""Whether the engine's arms generate one another's tokens, and how far their logits are from float32's.

In half precision rounding decides between near ties, and one other token changes all that follow. So arms are compared
up to and including their first other token: until there they saw the same tokens, and may differ by rounding alone.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.scheduler import StepPlan
from bench.models.llama import Llama
from bench.tools import text
from bench.tools.measure import Figures, say

# An arm's logits may be off from float32's by this many times what the eager, unfused arm's are.
NOISE_FACTOR = 1.5


class Disagreement(RuntimeError):
    """An arm's logits differ by more than rounding; nothing measured with it counts."""


@dataclasses.dataclass
class Generated:
    """Each request's tokens, and the logits they were chosen from, (vocab_size,) each."""

    tokens: list[list[int]]
    logits: list[list[Tensor]]


def measure(llama: Llama, arms: Mapping[str, EngineConfig], prompts: Sequence[Sequence[int]], count: int) -> Figures:
    """Greedy tokens of every arm against those of float32 weights, run eagerly.

    Args:
        llama: the model, in half precision.
        arms: by name; the first is the one whose rounding the others are judged by: eager, unfused.
        prompts: token ids; count: tokens to generate for each.

    Raises:
        Disagreement: logits are off by more than rounding.
    """
    exact = copy.deepcopy(llama).float()
    first = next(iter(arms.values()))
    config = dataclasses.replace(first, mode="NONE", attention="sdpa", fused=False, compiled=False)
    say("agreement: float32, eager")
    reference = generate(exact, config, prompts, count)
    del exact
    figures: Figures = {}
    for name, config in arms.items():
        say(f"agreement: {name}")
        figures[name] = compared(generate(llama, config, prompts, count), reference)
        say(f"agreement: {name}: logits off by {figures[name]['error']:.2e} of their norm at most")
    bound = NOISE_FACTOR * next(iter(figures.values()))["error"]
    for name, found in figures.items():
        if not found["error"] <= bound:  # also refuses NaN
            raise Disagreement(f"{name}: logits are off from float32's by {found['error']:.2e}; {bound:.2e} is allowed")
        found["allowed"] = bound
    return figures


@torch.inference_mode()
def generate(llama: Llama, config: EngineConfig, prompts: Sequence[Sequence[int]], count: int) -> Generated:
    """Greedy tokens of an engine made for this, with their logits."""
    engine = Engine(llama, config)
    engine.capture()
    logits: dict[int, list[Tensor]] = {number: [] for number in range(len(prompts))}

    def observe(plan: StepPlan, found: Tensor) -> None:
        for row, (request, samples) in enumerate(zip(plan.requests, plan.samples, strict=True)):
            if samples:
                logits[request.id].append(found[row].clone())  # the next step overwrites them

    engine.runner.observe = observe
    tokens = engine.generate(prompts, SamplingParams(max_tokens=count))
    engine.runner.manager.reset()
    del engine
    gc.collect()
    return Generated(tokens, [logits[number][:count] for number in range(len(prompts))])


def compared(found: Generated, reference: Generated) -> Figures:
    """One arm's figures.

    `error`: the largest relative error of logits up to and including each request's first other token, in the norm.
    `divergences`: for each request that has one, where it is, how far apart the reference's logits of the two
    tokens are, and how far off the arm's own are there, at most; both in units of the logits' standard deviation.
    """
    errors, divergences = [], []
    pairs = zip(found.tokens, reference.tokens, found.logits, reference.logits, strict=True)
    for request, (mine, theirs, my_logits, their_logits) in enumerate(pairs):
        other = next((place for place, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        last = len(mine) if other is None else other + 1
        for one, exact in itertools.islice(zip(my_logits, their_logits, strict=True), last):
            errors.append(float((one.double() - exact.double()).norm() / exact.double().norm()))
        if other is not None:
            one, exact = my_logits[other].double(), their_logits[other].double()
            gap = float(exact[theirs[other]] - exact[mine[other]])
            off = float((one - exact).abs().max())
            deviation = float(exact.std())
            divergences.append(
                {"request": request, "token": other, "gap": gap / deviation, "largest_error": off / deviation}
            )
    compared = sum(map(len, found.tokens))
    return {
        "requests": len(found.tokens),
        "tokens": compared,
        "identical_requests": len(found.tokens) - len(divergences),
        "error": max(errors),
        "divergences": divergences,
    }


def default_arms(device: torch.device) -> dict[str, EngineConfig]:
    """Eager and unfused first, then what serves; on a CPU through the emulator."""
    size: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 256, "num_pages": 257}
    if device.type != "cuda":
        plain = EngineConfig(mode="NONE", attention="sdpa", fused=False, capture_sizes=(1, 4, 16, 64), **size)
        return {"eager": plain, "graphs": dataclasses.replace(plain, mode="FULL_AND_PIECEWISE")}
    plain = EngineConfig(mode="NONE", attention="fa3", fused=False, **size)
    graphs = dataclasses.replace(plain, mode="FULL_AND_PIECEWISE", fused=None)
    return {
        "eager, plain layers": plain,
        "eager": dataclasses.replace(plain, fused=None),
        "graphs": graphs,
        "graphs, flashinfer": dataclasses.replace(graphs, attention="flashinfer"),
        "graphs, triton": dataclasses.replace(graphs, attention="triton"),
        "compiled piecewise": dataclasses.replace(plain, mode="PIECEWISE", compiled=True),
    }


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of the text."""
    return [text.token_ids(length, vocab_size, start=41 * number).tolist() for number in range(count)]


def render(figures: Figures) -> str:
    """A line for every arm."""
    lines = ["greedy tokens against float32"]
    for name, found in figures.items():
        gaps = [one["gap"] for one in found["divergences"]]
        widest = f", at gaps up to {max(gaps):.4f} standard deviations" if gaps else ""
        lines.append(
            f"{name:>24}: {found['identical_requests']} of {found['requests']} requests identical{widest}; "
            f"logits off by {found['error']:.2e} at most ({found['allowed']:.2e} allowed)"
        )
    return "\n".join(lines)
