"""``python -m bench.accuracy``: scores a trained model on small texts, eagerly and through graphs, which must be equal.

Without --model it scores the trained pair of `data/eagle`, whose target has seen the first text and not the second.
"""

from __future__ import annotations

import sys

import torch

from bench.accuracy.checkpoints import load_trained
from bench.accuracy.scores import ScoreError, render
from bench.accuracy.ways import WAYS, ScorePlan, measure
from bench.engine import EngineError
from bench.engine.config import BACKENDS
from bench.models.checkpoint import CheckpointError
from bench.spec_decode.pairs import KINDS, TRAINED
from bench.tools.files import OUT, save_figures
from bench.tools.measure import device_of, few_threads
from bench.tools.options import Options, changed, command_line, count, folder_or, json_file, listed, name_list

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


OPTIONS: Options = {
    "--model": {
        "type": folder_or("model", TRAINED),
        "default": TRAINED,
        "help": f"{TRAINED}, or a folder with a checkpoint of transformers: config.json, safetensors, tokenizer",
    },
    "--draft": {
        "type": folder_or("draft", *KINDS),
        "default": KINDS[-1],
        "help": f"{listed(KINDS)}, trained for --model {TRAINED} only; or a folder with a checkpoint",
    },
    "--k": {"type": count, "dest": "num_draft_tokens", "help": "tokens drafted a round; 5 by default"},
    "--ways": name_list(WAYS, "all by default") | {"default": WAYS},
    "--dtype": {"choices": DTYPES, "help": "of the weights; float32, for a checkpoint on a GPU its own"},
    "--questions": {"type": count, "help": "of each text, at most; 100 by default"},
    "--windows": {"type": count, "help": "of each text, at most, for the perplexity; 100 by default"},
    "--context": {"type": count, "help": "tokens before an answer; 64 by default"},
    "--output": {"type": count, "help": "tokens of an answer; 24 by default"},
    "--batch": {"type": count, "help": "requests at once; 32 on a GPU, else 8"},
    "--attention": {"choices": ("auto", *BACKENDS), "help": "the engine's backend"},
    **json_file(OUT / "accuracy.json"),
}


def main(arguments: list[str] | None = None) -> int:
    """Score and print; return 1 if a score is not the eager one, or the model cannot be scored."""
    options = command_line("bench.accuracy", __doc__, OPTIONS).parse_args(arguments)
    device = device_of()
    plan = changed(ScorePlan(batch=32 if device.type == "cuda" else 8), vars(options))
    try:
        with few_threads(device):
            checkpoint = load_trained(options.model, options.draft, device, DTYPES.get(options.dtype))
            found = measure(checkpoint, plan, options.ways)
    except (EngineError, CheckpointError, ScoreError, OSError, RuntimeError, ValueError) as error:
        print(f"python -m bench.accuracy: {error}", file=sys.stderr)
        return 1
    drafts = "none" if checkpoint.draft is None else "random, so that drafts are refused"
    if checkpoint.draft_is_trained:
        drafts = "trained"
    print(render(f"{options.model}, {checkpoint.dtype}, on {device.type}; draft: {drafts}", found))
    settings = {"model": options.model, "dtype": str(checkpoint.dtype), "draft": drafts, "k": plan.num_draft_tokens}
    save_figures(options.json, {"load": settings, "results": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
