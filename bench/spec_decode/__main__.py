"""``python -m bench.spec_decode``: EAGLE drafting eagerly, piecewise and in full graphs, and no speculation.

On a GPU it runs the 8B shape with random weights, whose drafts are arbitrary: --mean-length sets the tokens per round.
On a CPU it runs a tiny trained target and draft, with their real acceptance.
"""

from __future__ import annotations

import sys

from bench.engine import EngineError
from bench.engine.config import BACKENDS
from bench.models.checkpoint import CheckpointError
from bench.spec_decode.pairs import KINDS, TRAINED, load_pair
from bench.spec_decode.rounds import ARMS, SpecPlan, measure, ratios, render
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, device_of
from bench.tools.options import (
    Options,
    command_line,
    count,
    folder_or,
    json_file,
    listed,
    model_name,
    name_list,
    numbers,
    positive,
)

OPTIONS: Options = {
    "--model": model_name(TRAINED),
    "--draft": {
        "type": folder_or("draft", *KINDS),
        "default": "eagle3",
        "help": f"{listed(KINDS)}, or a folder with a checkpoint",
    },
    "--k": {"type": count, "default": 5, "help": "tokens drafted a round"},
    "--batches": {"type": numbers, "help": "requests that decode at once; 1,8,32 on a GPU, else 1,4"},
    "--arms": name_list(ARMS, "all by default") | {"default": tuple(ARMS)},
    "--attention": {"default": "auto", "choices": ("auto", *BACKENDS), "help": "the backend"},
    "--mean-length": {"type": positive, "help": "tokens a round; by default 2.4 where weights are random"},
    "--prompt": {"type": count, "help": "tokens of each prompt; 128 on a GPU, else 24"},
    "--output": {"type": count, "help": "tokens of each output; 128 on a GPU, else 24"},
    **json_file(OUT / "spec_decode.json"),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if models or settings are invalid."""
    options = command_line("bench.spec_decode", __doc__, OPTIONS).parse_args(arguments)
    device = device_of()
    on_gpu = device.type == "cuda"
    model = options.model or ("8b" if on_gpu else TRAINED)
    sizes = (128, 128, 50, 2048) if on_gpu else (24, 24, 3, 64)  # an emulated step takes long enough
    try:
        target, draft, real = load_pair(model, options.draft, device)
        plan = SpecPlan(
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
        found = measure(plan, target, draft, options.arms)
    except (EngineError, CheckpointError, FileNotFoundError, ValueError) as error:
        print(f"python -m bench.spec_decode: {error}", file=sys.stderr)
        return 1
    given = "as drafted" if plan.mean_length is None else f"set to {plan.mean_length} tokens a round"
    print(f"{model}, {options.draft}, K = {plan.num_draft_tokens}, on {device.type}; acceptance {given}")
    print(render(found))
    if not on_gpu:
        print(NOT_SPEED)
    load = {"model": model, "draft": options.draft, "k": plan.num_draft_tokens, "mean_length": plan.mean_length}
    load |= {"prompt": plan.prompt, "output": plan.output, "attention": plan.attention}
    results = {"load": load, "results": found, "ratios": ratios(found)}
    save_figures(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
