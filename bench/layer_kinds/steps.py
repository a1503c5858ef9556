"""Decode steps of the engine: as a graph, eagerly, and compiled piecewise, in turn in one process."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import torch

from bench.engine import Engine, EngineConfig
from bench.engine.start import replays_of
from bench.layer_kinds.shapes import Kind
from bench.models.llama import Llama
from bench.serve.decode_steps import DecodePlan, RepeatedStep
from bench.tools.measure import Figures, in_turn, say
from bench.tools.replays import Served
from bench.tools.tables import in_line

ROUNDS, STEPS = 3, 30


def measure(kind: Kind, device: torch.device, batches: tuple[int, ...], *, small: bool) -> Figures:
    """Return ms of a decode step by arm, for each number of requests, after comparing the arms' tokens."""
    llama = kind.build(device, small=small)
    on_gpu = device.type == "cuda"
    plan = DecodePlan("", batches, (), context=kind.context if on_gpu else 60)
    engines = {"graph": _engine(llama, plan)}
    fused = engines["graph"].runner.model.fused
    if fused:
        engines["graph, plain layers"] = _engine(llama, plan, fused=False)
    if on_gpu:  # last: what is compiled must outlive the reset of Dynamo before it
        engines["compiled piecewise"] = _engine(llama, plan, mode="PIECEWISE", compiled=True)
    figures: Figures = {"context": plan.context, "fused": fused, "layers": llama.config.num_hidden_layers}
    figures |= {"attention": engines["graph"].runner.backends[0].name, "decode": []}
    for count in batches:
        figures["decode"].append({"batch": count} | _decode(engines, plan, count, device))
        say(f"decode steps of {count}: {in_line(figures['decode'][-1]['ms'], '.3f', 'ms')}")
    for engine in engines.values():
        engine.runner.manager.reset()
    del engines
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()  # the pools of graphs that are gone
    return figures


def _engine(llama: Llama, plan: DecodePlan, **changes: object) -> Engine:
    most = max(plan.batches)
    config = EngineConfig(
        max_num_seqs=most,
        max_num_tokens=max(512, most),
        max_model_len=plan.context,
        num_pages=1 + most * -(-plan.context // 16),
        capture_sizes=plan.batches,
    )
    torch._dynamo.reset()
    engine = Engine(llama, dataclasses.replace(config, **changes))  # type: ignore[arg-type]
    say(f"capturing with {changes or 'graphs'}")
    failed = engine.capture().failed
    if failed:
        raise RuntimeError(f"not captured: {failed}")
    return engine


@torch.inference_mode()
def _decode(engines: dict[str, Engine], plan: DecodePlan, count: int, device: torch.device) -> Figures:
    calls: dict[str, Callable[[], object]] = {}
    tokens = {}
    for name, engine in engines.items():
        step = RepeatedStep(engine, plan, count)
        calls[name] = Served(step.graph, replays_of(engine, name))
        tokens[name] = _from_zero(engine, step.graph)
        if name == "graph":
            calls["eager"] = step.eager
            tokens["eager"] = _from_zero(engine, step.eager)
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
