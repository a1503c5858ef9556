"""``python -m bench.generate --prompt ... --model DIR``: generates text from a checkpoint, through the engine.

It uses the folder's tokenizer if there is one; otherwise prompt and output are token ids.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.engine import Engine, EngineConfig, EngineError, SamplingParams
from bench.engine.config import BACKENDS
from bench.engine.request import shown
from bench.models.checkpoint import CheckpointError
from bench.models.workload import Workload
from bench.tools.measure import device_of
from bench.tools.options import Options, command_line, count, model_name
from simplegraph import CudaGraphMode

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


OPTIONS: Options = {
    "--model": model_name(default="") | {"required": True},
    "--prompt": {"required": True, "nargs": "+", "help": "texts; token ids such as '5 17 3' without tokenizer"},
    "--max-tokens": {"type": count, "default": 64, "help": "tokens to generate"},
    "--temperature": {"type": float, "default": 0.0, "help": "0 takes the likeliest token"},
    "--top-k": {"type": int, "default": 0, "help": "only the k likeliest tokens; 0 for all"},
    "--top-p": {"type": float, "default": 1.0, "help": "only the likeliest tokens of this probability together"},
    "--seed": {"type": int, "help": "makes the tokens repeatable"},
    "--mode": {
        "default": "FULL_AND_PIECEWISE",
        "choices": tuple(CudaGraphMode.__members__),
        "help": "of the graphs; NONE runs eagerly",
    },
    "--attention": {"default": "auto", "choices": ("auto", *BACKENDS), "help": "the backend"},
}


def main(arguments: list[str] | None = None) -> int:
    """Generate and print; return 1 if the model or a prompt is invalid."""
    options = command_line("bench.generate", __doc__, OPTIONS).parse_args(arguments)
    device = device_of()
    try:
        workload = Workload(options.model, (1,), device, lm_head=True)
        tokenizer = load_tokenizer(workload.folder)
        prompts = [encode(prompt, tokenizer) for prompt in options.prompt]
        longest = max(map(len, prompts)) + options.max_tokens
        config = EngineConfig(
            mode=options.mode,
            attention=options.attention,
            max_num_seqs=len(prompts),
            max_model_len=longest,
            num_pages=1 + len(prompts) * -(-longest // 16),
        )
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop_token_ids=stop_tokens(workload.config()),
        )
        engine = Engine(workload.build(windows=True), config)
        engine.capture()
        outputs = engine.generate(prompts, params, progress=sys.stderr.isatty())
    except (EngineError, CheckpointError, FileNotFoundError, ValueError) as error:
        print(f"python -m bench.generate: {error}", file=sys.stderr)
        return 1
    for output in outputs:
        print(" ".join(map(str, output)) if tokenizer is None else tokenizer.decode(output))
    return 0


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's tokenizer; None if it has none."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encode(prompt: str, tokenizer: Any) -> list[int]:
    """Convert a prompt to token ids.

    Raises:
        ValueError: there is no tokenizer, and the prompt is no row of numbers.
    """
    if tokenizer is not None:
        ids: list[int] = tokenizer.encode(prompt)
        return ids
    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"the model's folder has no tokenizer, and {shown(prompt)} is no row of token ids such as '5 17 3'."
        ) from None


def stop_tokens(config: Any) -> list[int]:
    """Return the tokens that end a text, from the model's config."""
    found = getattr(config, "eos_token_id", None)
    return [found] if isinstance(found, int) else list(found or ())


if __name__ == "__main__":
    sys.exit(main())
