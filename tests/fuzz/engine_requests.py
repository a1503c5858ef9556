"""Run random loads on the reference engine: ``python -m tests.fuzz.engine_requests --requests 10000 --seed 0``.

Requests with seeds come, wait, are computed in parts, preempted and cancelled beside others, in every mode; each must
get the tokens that it gets alone, from an engine without graphs. The model is in float64, so that no near tie of its
logits ends otherwise in another batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

from tiny_engine import PAGE, SHAPE, VOCAB

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.request import MAX_TOP_K, SEEDS, Request
from bench.models.llama import CacheShape, Llama, build_llama

MODES = ("NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE")
LIMITS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 64, "page_size": PAGE}
ROOMS: dict[str, dict[str, Any]] = {
    "ample": {"max_num_tokens": 24, "num_pages": 100, "capture_sizes": (1, 2, 4, 6, 8, 16, 24)},
    "few pages": {"max_num_tokens": 24, "num_pages": 18, "capture_sizes": (1, 2, 4, 6, 8, 16, 24)},
    "short steps": {"max_num_tokens": 7, "num_pages": 100, "capture_sizes": (1, 4, 7)},
    "both": {"max_num_tokens": 7, "num_pages": 18, "capture_sizes": (1, 4, 7)},
}
PER_LOAD = 16
SAY_EVERY = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request of a load.

    Attributes:
        steps: of the engine before it comes, after the one before it.
        cancelled_after: steps after which it is cancelled; None if it is not.
    """

    prompt: list[int]
    params: SamplingParams
    steps: int
    cancelled_after: int | None


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests, and the engine that serves them together."""

    mode: str
    room: str
    overlap: bool
    asks: list[Ask]


@dataclasses.dataclass
class Counts:
    """What ran."""

    requests: int = 0
    compared: int = 0
    tokens: int = 0
    preemptions: int = 0
    cancelled: int = 0
    different: int = 0


def random_load(seed: int) -> Load:
    """Make the load of a seed; each mode and room comes equally often."""
    draw = random.Random(seed)
    mode, room = MODES[seed % len(MODES)], list(ROOMS)[seed // len(MODES) % len(ROOMS)]
    return Load(mode, room, draw.random() < 0.7, [_random_ask(draw) for _ in range(PER_LOAD)])


def _random_ask(draw: random.Random) -> Ask:
    params = SamplingParams(
        max_tokens=draw.randint(1, 16),
        temperature=draw.choice([0, 0.3, 1.0, 1.0, 1.5, 5.0, 1e-46, 3e38]),
        top_k=draw.choice([0, 0, 0, 1, 5, 40, VOCAB, MAX_TOP_K]),
        top_p=draw.choice([1.0, 1.0, 0.95, 0.5, 1e-46]),
        seed=draw.choice([None, 0, 1, draw.randrange(*SEEDS), *SEEDS]),
        stop_token_ids=draw.sample(range(VOCAB), draw.choice([0, 0, 2])),
    )
    prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))]
    return Ask(prompt, params, draw.choice([0, 0, 0, 1, 3]), draw.choice([None] * 9 + [draw.randrange(12)]))


class Engines:
    """The engines of all loads, each built once.

    Args:
        device: on which they run.
    """

    def __init__(self, device: str = "cpu") -> None:
        from transformers import LlamaConfig

        self._device = torch.device(device)
        # The other backends have no float64.
        self._attention = "auto" if self._device.type == "cpu" else "sdpa"
        config = LlamaConfig(**SHAPE, num_hidden_layers=2)
        self._llama: Llama = build_llama(
            config, CacheShape(1, PAGE), 1, dtype=torch.float64, device=self._device, seed=0
        )
        self.of = functools.cache(self._built)
        self._alone = self._built("NONE", "ample", True)

    def _built(self, mode: str, room: str, overlap: bool) -> Engine:
        config = EngineConfig(mode=mode, attention=self._attention, overlap=overlap, **LIMITS, **ROOMS[room])
        engine = Engine(self._llama, config)
        engine.capture()
        return engine

    def differences(self, load: Load, counts: Counts) -> list[str]:
        """Run a load, then each of its requests alone; return a line for each that got other tokens."""
        engine = self.of(load.mode, load.room, load.overlap)
        requests = _served(engine, load.asks)
        counts.requests += len(requests)
        counts.preemptions += sum(request.preemptions for request in requests)
        found = []
        for ask, request in zip(load.asks, requests, strict=True):
            if request.params.seed is None and not request.params.greedy:
                continue
            (expected,) = self._alone.generate([request.prompt], request.params)
            if str(request.finished) == "cancelled":
                counts.cancelled += 1
                expected = expected[: len(request.output)]
            counts.compared += 1
            counts.tokens += len(expected)
            if request.output != expected:
                found.append(f"{ask}\n  alone:    {expected}\n  together: {request.output}")
        pages = engine.scheduler.pages
        if not engine.idle or pages.num_free != pages.num_pages:
            found.append(f"{pages.num_free} of {pages.num_pages} pages are free after the load")
        counts.different += len(found)
        return found


def _served(engine: Engine, asks: Sequence[Ask]) -> list[Request]:
    """Serve a load to its end, by the engine's steps."""
    requests: list[Request] = []
    ends: dict[Request, int] = {}
    comes = list(itertools.accumulate(ask.steps for ask in asks))
    for step in itertools.count():
        while len(requests) < len(asks) and comes[len(requests)] <= step:
            ask = asks[len(requests)]
            requests.append(engine.add(ask.prompt, ask.params))
            if ask.cancelled_after is not None:
                ends[requests[-1]] = step + ask.cancelled_after
        for request in [request for request, end in ends.items() if end == step]:
            engine.cancel(request)
        if len(requests) == len(asks) and engine.idle:
            return requests
        engine.step()
    raise AssertionError("unreachable")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.engine_requests", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first load")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most", type=int, default=10, help="stop after so many requests that differ")
    return parser.parse_args(argv)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Run loads until there were so many requests; 1 if any differs."""
    options = parsed(argv)
    engines, counts = Engines(options.device), Counts()
    started = said = time.perf_counter()
    for seed in itertools.count(options.seed):
        if counts.requests >= options.requests or counts.different >= options.most:
            break
        load = random_load(seed)
        for line in engines.differences(load, counts):
            print(f"load {seed}, {load.mode}, {load.room}, overlap={load.overlap}: {line}", flush=True)
        if time.perf_counter() - said > SAY_EVERY:
            said = time.perf_counter()
            print(f"{counts.requests} of {options.requests}, {said - started:.0f} s: {counts}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s: {counts}", flush=True)
    return int(bool(counts.different))


if __name__ == "__main__":
    sys.exit(main())
