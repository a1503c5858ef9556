"""``python -m bench.serve.agreement``: compares the engine's arms: their tokens, and their logits with float32's.

In half precision rounding decides between near ties, and one different token changes all later ones. So arms are
compared up to and including their first different token: until then their inputs are equal, and only rounding differs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.scheduler import StepPlan
from bench.engine.start import drop_graphs, replays_of
from bench.models.llama import Llama
from bench.models.workload import Workload
from bench.tools import command, text
from bench.tools.measure import Figures, say

# Largest error of an arm's logits from float32's, relative to that of the eager, unfused arm.
NOISE_FACTOR = 1.5


class Disagreement(RuntimeError):
    """An arm's logits differ by more than rounding, so none of its figures count."""


@dataclasses.dataclass
class Generated:
    """Each request's tokens, and the logits they were chosen from, (vocab_size,) each."""

    tokens: list[list[int]]
    logits: list[list[Tensor]]


@dataclasses.dataclass(frozen=True)
class AgreementPlan:
    """The model, requests of so many tokens, and tokens that are generated for each."""

    model: str = "8b"
    requests: int = 16
    prompt: int = 128
    tokens: int = 64


def default_plan(device: torch.device) -> AgreementPlan:
    """Return the 8B shape on a GPU; a tiny one on a CPU."""
    return AgreementPlan() if device.type == "cuda" else AgreementPlan("tiny", 3, 12, 6)


def measure(plan: AgreementPlan, device: torch.device) -> Figures:
    """Compare all arms on random weights in bfloat16; see `compare`."""
    llama = Workload(plan.model, (1,), device, lm_head=True).build().bfloat16()
    prompts = prompts_of(plan.requests, plan.prompt, llama.config.vocab_size)
    return {"agreement": compare(llama, default_arms(device), prompts, plan.tokens)}


def compare(llama: Llama, arms: Mapping[str, EngineConfig], prompts: Sequence[Sequence[int]], count: int) -> Figures:
    """Compare greedy tokens of every arm with those of float32 weights, run eagerly.

    Args:
        llama: the model, in half precision.
        arms: name -> config; the first, eager and unfused, sets the rounding that others are judged by.
        prompts: token ids; count: tokens to generate for each.

    Raises:
        Disagreement: logits differ by more than rounding.
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
            raise Disagreement(f"{name}: logits differ from float32's by {found['error']:.2e}; {bound:.2e} is allowed")
        found["allowed"] = bound
    return figures


@torch.inference_mode()
def generate(llama: Llama, config: EngineConfig, prompts: Sequence[Sequence[int]], count: int) -> Generated:
    """Generate greedy tokens with a new engine, and keep their logits."""
    engine = Engine(llama, config)
    engine.capture()
    logits: dict[int, list[Tensor]] = {number: [] for number in range(len(prompts))}

    def observe(plan: StepPlan, found: Tensor) -> None:
        for row, (request, samples) in enumerate(zip(plan.requests, plan.samples, strict=True)):
            if samples:
                logits[request.id].append(found[row].clone())  # the next step overwrites them

    engine.runner.observe = observe
    replays = replays_of(engine, config.mode)
    tokens = engine.generate(prompts, SamplingParams(max_tokens=count))
    replays.end(count)
    drop_graphs(engine)
    return Generated(tokens, [logits[number][:count] for number in range(len(prompts))])


def compared(found: Generated, reference: Generated) -> Figures:
    """Compute one arm's figures.

    `error`: the largest relative error of logits, in the norm, up to and including a request's first different token.
    `divergences`: for each request that diverges: the position, the difference of the reference's logits of the two
    tokens, and the arm's largest error there; both in units of the logits' standard deviation.
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
    """Return the eager, unfused arm first, then those for serving; on a CPU through the emulator."""
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
    """Take prompts from the text."""
    return [text.token_ids(length, vocab_size, start=41 * number).tolist() for number in range(count)]


def render(figures: Figures) -> str:
    """Format the figures, with a line for every arm."""
    lines = ["greedy tokens against float32"]
    for name, found in figures["agreement"].items():
        gaps = [one["gap"] for one in found["divergences"]]
        widest = f", at gaps up to {max(gaps):.4f} standard deviations" if gaps else ""
        lines.append(
            f"{name:>24}: {found['identical_requests']} of {found['requests']} requests identical{widest}; "
            f"logits off by {found['error']:.2e} at most ({found['allowed']:.2e} allowed)"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Compare, print, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.agreement", description=__doc__)
    command.run(parser, arguments, default_plan, measure, render)


if __name__ == "__main__":
    main()
