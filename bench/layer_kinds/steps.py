"""Decode steps of the engine: as a graph, eagerly, and compiled piecewise, in turn in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench.engine import Engine, EngineConfig
from bench.engine.repeated import RepeatedStep
from bench.engine.start import drop_graphs, replays_of, start
from bench.models.llama import CacheShape, Llama, build_llama
from bench.tools.measure import Figures, in_turn, say
from bench.tools.replays import Served
from bench.tools.tables import in_line


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model.

    Args:
        config: name of its config's class in transformers.
        full: settings of the shape that steps are measured with; small: of one for comparisons in float32.
        context: tokens in each request's cache in a measured step.
    """

    config: str
    full: dict[str, Any]
    small: dict[str, Any]
    context: int

    def build(self, device: torch.device, *, small: bool) -> Llama:
        """Build the model with random weights, in bfloat16 or small in float32."""
        import transformers

        settings = self.small if small else self.full
        config = getattr(transformers, self.config)(**settings, rms_norm_eps=1e-5, tie_word_embeddings=False)
        dtype = torch.float32 if small else torch.bfloat16
        return build_llama(config, CacheShape(1, 16), 1, device=device, dtype=dtype, seed=3, windows=True)


def _every_sixth_is_full(layers: int) -> list[str]:
    return ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]


_SMALL = {
    "vocab_size": 997,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "num_hidden_layers": 6,
}
KINDS = {
    "windows": Kind(
        "Qwen3Config",
        # Half of Gemma-3-12B's layers: five with a window to one without, heads of 256 elements, normed.
        {
            "vocab_size": 262_208,
            "hidden_size": 3840,
            "intermediate_size": 15_360,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "use_sliding_window": True,
            "sliding_window": 1024,
            "layer_types": _every_sixth_is_full(24),
        },
        _SMALL
        | {"head_dim": 32, "use_sliding_window": True, "sliding_window": 50, "layer_types": _every_sixth_is_full(6)},
        context=2000,
    ),
    "hybrid": Kind(
        "BambaConfig",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_indices": [9, 18, 27],
            "mamba_n_heads": 128,
            "mamba_d_state": 128,
            "max_position_embeddings": 8192,
        },
        _SMALL | {"attn_layer_indices": [2, 5], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16},
        context=2000,
    ),
}


ROUNDS, STEPS = 3, 30


def measure(kind: Kind, device: torch.device, batches: tuple[int, ...], *, small: bool) -> Figures:
    """Return ms of a decode step by arm, for each number of requests, after comparing the arms' tokens."""
    llama = kind.build(device, small=small)
    on_gpu = device.type == "cuda"
    context = kind.context if on_gpu else 60
    engines = {"graph": _engine(llama, batches, context)}
    fused = engines["graph"].runner.model.fused
    if fused:
        engines["graph, plain layers"] = _engine(llama, batches, context, fused=False)
    if on_gpu:  # last: what is compiled must outlive the reset of Dynamo before it
        engines["compiled piecewise"] = _engine(llama, batches, context, mode="PIECEWISE", compiled=True)
    figures: Figures = {"context": context, "fused": fused, "layers": llama.config.num_hidden_layers}
    figures |= {"attention": engines["graph"].runner.backends[0].name, "decode": []}
    for count in batches:
        figures["decode"].append({"batch": count} | _decode(engines, context, count, device))
        say(f"decode steps of {count}: {in_line(figures['decode'][-1]['ms'], '.3f', 'ms')}")
    for engine in engines.values():
        drop_graphs(engine)
    return figures


def _engine(llama: Llama, batches: tuple[int, ...], context: int, **changes: object) -> Engine:
    most = max(batches)
    config = EngineConfig(
        max_num_seqs=most,
        max_num_tokens=max(512, most),
        max_model_len=context,
        num_pages=1 + most * -(-context // 16),
        capture_sizes=batches,
    )
    torch._dynamo.reset()
    say(f"capturing with {changes or 'graphs'}")
    return start(dataclasses.replace(config, **changes), llama)  # type: ignore[arg-type]


@torch.inference_mode()
def _decode(engines: dict[str, Engine], context: int, count: int, device: torch.device) -> Figures:
    calls: dict[str, Callable[[], object]] = {}
    tokens = {}
    for name, engine in engines.items():
        step = RepeatedStep(engine, count, context)
        calls[name] = Served(step.tokens, replays_of(engine, name))
        tokens[name] = _from_zero(engine, step.tokens)
        if name == "graph":
            calls["eager"] = step.eager_tokens
            tokens["eager"] = _from_zero(engine, step.eager_tokens)
    # Random weights make near ties, which rounding decides in half precision.
    agreeing = {name: float((found == tokens["eager"]).double().mean()) for name, found in tokens.items()}
    if agreeing["graph"] < 0.9:
        raise RuntimeError(f"batch {count}: {agreeing['graph']:.0%} of the graph's tokens are eager's.")
    on_gpu = device.type == "cuda"
    times = in_turn(calls, device, rounds=ROUNDS if on_gpu else 1, steps=STEPS if on_gpu else 2)
    return {"ms": times, "tokens_as_eager": agreeing}


def _from_zero(engine: Engine, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run a step from states of zero: each call advances them."""
    if engine.runner.states is not None:
        for tensor in engine.runner.states.cache.tensors:
            tensor.zero_()
    return call().clone()
