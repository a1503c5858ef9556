"""``python -m bench.two_batch``: steps with two-batch overlap and without, decoding and of prompts.

With ranks: ``torchrun --nproc-per-node 2 -m bench.two_batch --tp 2``. On one rank nothing is summed: what halves cost.
"""

from __future__ import annotations

import argparse
import sys

from bench.engine import EngineError
from bench.models.workload import Workload
from bench.tools import torchrun
from bench.tools.command import limited
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, Figures, few_threads, say
from bench.tools.options import TP, Options, command_line, count, json_file, model_name, numbers, positive
from bench.tools.tables import cell, grid
from bench.two_batch import steps

MAX_ERROR = {"cuda": 0.1, "cpu": 1e-4}  # of logits, relative; products of other shapes round otherwise in bfloat16


OPTIONS: Options = {
    "--model": model_name(),
    "--layers": {"type": count, "help": "a part of the model"},
    "--batches": {"type": numbers, "help": "requests that decode; 64,128,256,512 on a GPU, else 2,4"},
    "--prompt-tokens": {"type": count, "help": "tokens of a step of prompts; 2048 on a GPU, else 16"},
    "--limit": {"type": positive, "default": 540.0, "help": "seconds after which it stops; 540 by default"},
    **TP,
    **json_file(OUT / "two_batch.json"),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure every step; figures are written as they come. Return 1 if halves give other logits than whole steps."""
    parser = command_line("bench.two_batch", __doc__, OPTIONS)
    options = parser.parse_args(arguments)
    torchrun.check_launched(parser, options.tp)
    shard, ranks, device = torchrun.start(options.tp, "two_batch")
    on_gpu = device.type == "cuda"
    model = options.model or ("8b" if on_gpu else "tiny")
    batches = options.batches or ((64, 128, 256, 512) if on_gpu else (2, 4))
    prompts = options.prompt_tokens or (2048 if on_gpu else 16)
    found: Figures = {"model": model, "tp": shard.size, "steps": [], "not_available": {}}
    with few_threads(device), limited(options.limit):
        workload = Workload(model, (1,), device, lm_head=True, layers=options.layers, shard=shard)
        llama = workload.build()
        for plan in (steps.decode_steps(batches, device), steps.prompt_steps(prompts, device)):
            try:
                for figures in steps.measure(llama, ranks, plan):
                    found["steps"].append(figures)
                    _save(options, found, shard.rank)
            except EngineError as error:
                found["not_available"][plan.mode] = str(error)
                say(f"{plan.mode}: not available: {error}")
            _save(options, found, shard.rank)
        torchrun.finish()
    if shard.rank == 0:
        print(render(found))
        if not on_gpu:
            print(NOT_SPEED)
    return int(any(each["relative_error"] > MAX_ERROR[device.type] for each in found["steps"]))


def _save(options: argparse.Namespace, found: Figures, rank: int) -> None:
    if rank == 0:
        save_figures(options.json, {"results": found})


def render(found: Figures) -> str:
    """Format the steps as a table."""
    rows = [("requests", "tokens", "whole, ms", "halves, ms", "gain", "error", "same tokens")]
    forms = {"requests": "d", "tokens": "d", "whole": ".3f", "halves": ".3f", "gain": "+.1%"}
    forms |= {"relative_error": ".1e", "tokens_equal": ".0%"}
    rows += [tuple(cell(each | each["ms"], name, form) for name, form in forms.items()) for each in found["steps"]]
    on = f"{found['model']} on {found['tp']} rank{'s' * (found['tp'] > 1)}"
    return "\n".join([f"{on}: steps whole and as two micro-batches", grid(rows)])


if __name__ == "__main__":
    sys.exit(main())
