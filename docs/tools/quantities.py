"""Says which raw files measured the same, so that no page shows an older one."""

from __future__ import annotations

# By what was measured, the files from the oldest commit to the newest. The headline's files stand beside newer ones of
# single arms, since all of them must be of one state of the package (tests/docs/test_headline.py).
QUANTITIES: dict[str, tuple[str, ...]] = {
    "calls of eight models at batch 1": ("h200_models_410cdb8", "headline/models"),
    "starts and steps of every arm": ("h200_startup_preloaded", "h200_startup_lean", "headline/startup"),
    "starts beside compiled ones": ("h200_startup_compiled", "h200_startup"),
    "starts in turn with an older commit": ("h200_startup_in_turn",),
    "steps of the engine": ("h200_engine_triton", "h200_engine_one_row", "headline/engine"),
    "steps of the engine beside compiled ones": ("h200_engine_steps",),
    "the engine beside vLLM": ("headline/vllm",),
    "a process's first token": ("h200_engine", "h200_first_token"),
    "generate of a Llama": ("h200_generate_launches", "h200_transformers"),
    "generate with the prompt in a graph": ("h200_generate_prompts",),
    "generate of nine families": ("h200x4_models/generate", "h200_generate"),
    "generate on a busy host": ("h200_generate_busy",),
    "eight models at batch 1 and 8 beside the compiler": ("h200x4_models/models", "h200_optimized"),
    "eight models whose batch sizes take turns": ("h200_sizes_in_turn",),
    "models beside a compiler with warm caches, and with frozen weights": ("h200_compilers", "h200_compilers_84c6bcf"),
    "layers with windows": ("h200_layer_kinds",),
    "hybrid layers": ("h200_hybrid",),
    "tokens of layers with windows": ("h200_layer_kinds_windows",),
    "tokens of hybrid layers": ("h200_layer_kinds_hybrid",),
    "the longest call": ("headline/model_calls",),
    "the host's time of a call of whole models": (
        *("h200_model_calls_881db13", "h200_model_calls"),
        *("h200_latency_6e56cc7", "h200_latency_84c6bcf", "h200_latency"),
    ),
    "the host's time of a tiny call": ("h200_host_overhead",),
    "memory of training graphs": ("h200_training_shapes", "headline/training_memory"),
    "training steps": ("h200_training",),
    "first training steps of small models": ("h200_training_first",),
    "training graphs beside torch's": ("h200_training_pairs",),
    "scores": ("h200_accuracy",),
    "recipes": ("h200_recipes",),
    "the recipe of SAM2's tracker": ("h200_recipes_sam2",),
    "gains that advise tells": ("h200_advise",),
    "attention": ("h200_attention",),
    "fused operators": ("h200_fused_operators",),
    "products of one row": ("h200_one_row",),
    "models of other libraries": ("h200_model_table",),
    "models of other libraries on the emulator": ("emulator_model_table",),
    "eager breaks and mixed batches": ("h200_piecewise",),
    "the piecewise decode step in turn with an older commit": ("h200_piecewise_in_turn",),
    "serving": ("h200_serve",),
    "serving with speculation": ("h200_serve_speculation",),
    "load over HTTP": ("emulator_http_load",),
    "the slowest waited calls": ("h200_tail",),
    "sleep": ("h200_sleep",),
    "speculative decoding": ("h200_spec_decode",),
    "rounds of speculative decoding": ("h200_spec_rounds",),
    "a profile": ("h200_trace",),
    "audits": ("h200_vllm_audit",),
    "an audit's report": ("h200_vllm_audit_report",),
    "two GPUs": ("h200x2_tp2",),
    "two GPUs, compiled": ("h200x2_tp2_compiled",),
    "DTensors": ("h200x2_dtensor",),
    "agreement": ("h200x4_consensus",),
    "four GPUs": ("h200x4_tp4_70b",),
    "four GPUs, compiled": ("h200x4_tp4_70b_compiled",),
    "eight GPUs": ("h200x8_tp8_70b",),
    "eight GPUs, compiled": ("h200x8_tp8_70b_compiled",),
    "eight GPUs, eager": ("h200x8_tp8_70b_eager",),
    "eight GPUs with a meeting for each size": ("h200x8_tp8_70b_meetings_each",),
    "engine, by a profile, H100": ("h100_engine_profile",),
    "launches of fused kernels, H100": ("h100_fused_launches",),
    "first generations, H100": ("h100_generate_early",),
    "inputs on the host, H100": ("h100_host_inputs",),
    "the longest call, H100": ("h100_lazy_in_gaps",),
    "max-autotune, H100": ("h100_optimized_autotuned",),
    "serving at three rates, H100": ("h100_serve_rates",),
    "sleep, H100": ("h100_sleep",),
    "starts in turn with an older commit, H100": ("h100_startup_in_turn",),
    "starts in turn, H100": ("h100_startup_rounds",),
    "steps in turn with an older commit, H100": ("h100_steady_in_turn",),
    "training graphs beside torch's, H100": ("h100_training_pairs",),
    "audits, H100": ("h100_vllm_audit",),
    "two batches, H100": ("h100x2_two_batch",),
}
# Paragraphs and tables that give a range over every committed run, old ones included.
RANGES = {"readme", "readme-headline", "readme-losses", "losses"}


def quantity(file: str) -> str:
    """Return what a file measured. Raises KeyError."""
    found = [name for name, files in QUANTITIES.items() if family(file) in files]
    if len(found) != 1:
        raise KeyError(f"{file} is in {len(found)} quantities of docs/tools/quantities.py; expected one")
    return found[0]


def family(file: str) -> str:
    """Return the name under which a file is listed: files of one folder by model have one."""
    folder, _, name = file.rpartition("/")
    return f"{folder}/{name.partition('_')[0]}" if folder == "h200x4_models" else file


def is_superseded(file: str) -> bool:
    """Return True if a newer file measured the same."""
    return family(file) != QUANTITIES[quantity(file)][-1]
