"""``python -m bench.spec_decode``: EAGLE drafting eagerly, piecewise and in full graphs, beside no speculation.

On a GPU the 8B shape with random weights, whose drafts mean nothing: so many tokens a round as --mean-length says.
On a CPU a tiny trained target and draft, with the acceptance that they have.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.engine import EngineError
from bench.engine.runner import BACKENDS
from bench.models.checkpoint import CheckpointError
from bench.models.eagle import Eagle, Eagle3, build_eagle, load_eagle, tiny_pair
from bench.models.llama import Llama
from bench.models.workload import Workload
from bench.spec_decode.rounds import ARMS, Plan, measure, ratios, render
from bench.tools import environment
from bench.tools.measure import say

OUT = Path(__file__).parents[1] / "out"
TRAINED = "trained"
DRAFT_VOCAB = 32_000  # as public EAGLE-3 drafts for Llama-3 have


def main(arguments: list[str] | None = None) -> int:
    """Measure; 1 if models or settings do not fit."""
    options = _parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    model = options.model or ("8b" if on_gpu else TRAINED)
    sizes = (128, 128, 50, 2048) if on_gpu else (24, 24, 3, 64)  # an emulated step takes long enough
    try:
        target, draft, real = models(model, options.draft, device)
        plan = Plan(
            batches=options.batches or ((1, 8, 32) if on_gpu else (1, 4)),
            num_draft_tokens=options.k,
            attention=options.attention,
            mean_length=None if real and options.mean_length is None else options.mean_length or 2.4,
            prompt=options.prompt or sizes[0],
            output=options.output or sizes[1],
            steps=sizes[2],
            max_num_tokens=sizes[3],
            generations=3 if on_gpu else 1,
        )
        found = measure(plan, target, draft, tuple(options.arms))
    except (EngineError, CheckpointError, FileNotFoundError, ValueError) as error:
        print(f"python -m bench.spec_decode: {error}", file=sys.stderr)
        return 1
    given = "as drafted" if plan.mean_length is None else f"set to {plan.mean_length} tokens a round"
    print(f"{model}, {options.draft}, K = {plan.num_draft_tokens}, on {device.type}; acceptance {given}")
    print(render(found))
    if not on_gpu:
        print("On the CPU graphs are emulated: these times are no speed.")
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    load = {"model": model, "draft": options.draft, "k": plan.num_draft_tokens, "mean_length": plan.mean_length}
    load |= {"prompt": plan.prompt, "output": plan.output, "attention": plan.attention}
    results = {"machine_info": environment.describe(), "load": load, "results": found, "ratios": ratios(found)}
    path.write_text(json.dumps(results, indent=1))
    say(f"figures: {path}")
    return 0


def models(name: str, draft: str, device: torch.device) -> tuple[Llama, Eagle | Eagle3, bool]:
    """Target and draft, and whether both are trained."""
    kinds = ("eagle", "eagle3")
    if name == TRAINED:
        if draft not in kinds:
            raise ValueError(f"--draft is {draft!r}; the trained target has {' and '.join(kinds)}.")
        return *tiny_pair(draft, device=device), True
    target = Workload(name, (1,), device, lm_head=True).build()
    if draft not in kinds:
        return target, load_eagle(draft, target), True
    return target, build_eagle(draft, target, draft_vocab_size=min(DRAFT_VOCAB, target.config.vocab_size)), False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.spec_decode", description=__doc__)
    parser.add_argument("--model", help=f"{TRAINED}, tiny, 8b, or a folder with a config.json")
    parser.add_argument("--draft", default="eagle3", help="eagle, eagle3, or a folder with a draft's checkpoint")
    parser.add_argument("--k", type=int, default=5, help="tokens drafted a round")
    parser.add_argument("--batches", type=_numbers, help="requests that decode at once; 1,8,32 on a GPU, else 1,4")
    parser.add_argument("--arms", type=_arms, default=list(ARMS), help=f"of {'; '.join(ARMS)}; separated by ;")
    parser.add_argument("--attention", default="auto", choices=("auto", *BACKENDS), help="the backend")
    parser.add_argument("--mean-length", type=float, help="tokens a round; by default 2.4 where weights are random")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt; 128 on a GPU, else 24")
    parser.add_argument("--output", type=int, help="tokens of each output; 128 on a GPU, else 24")
    parser.add_argument("--json", default=str(OUT / "spec_decode.json"), help="where the figures go")
    return parser


def _numbers(given: str) -> tuple[int, ...]:
    return tuple(int(part) for part in given.split(","))


def _arms(names: str) -> list[str]:
    found = [name.strip() for name in names.split(";")]
    unknown = [name for name in found if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no arm is called {', '.join(unknown)}; the arms are {'; '.join(ARMS)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
