"""Calls with CPU tensors, which the forward moves to a GPU, and prints how 100 of them ran beside eager's.

``python -m tests.gpu.host_inputs CASE``, each in a process of its own: a wrong address ends the process.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg

ROOT = pathlib.Path(__file__).parents[2]
CALLS, WIDTH = 100, 64
SIZES = [1, 2, 4]
GPU = torch.device("cuda", 0)

Outcome = tuple[Any, Iterator[tuple[Tensor, Tensor]]]  # what counts, and each answer beside eager's


class Moves(nn.Module):
    """A layer whose forward moves what it is passed, in a way of its own."""

    def __init__(self, move: Callable[[Tensor], Tensor], device: torch.device = GPU) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).to(device)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.move(x))
        return out


class Alone(nn.Module):
    """The same without weights."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        return self.move(x) * 2 + 1


class FillsBuffer(nn.Module):
    """Copies what it is passed into a buffer of its own."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.register_buffer("given", torch.zeros(4, WIDTH, device=GPU))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        rows = self.given[: x.shape[0]].copy_(x, **self.how)
        return rows * 2 + 1


class InDict(Moves):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        out: Tensor = self.layer(self.move(batch["x"])) * self.move(batch["scale"])
        return out


class Beside(Moves):
    """A CPU tensor beside one on the GPU, and a number that Python reads."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.layer(self.move(x) + y) * scale.item()
        return out


class CpuWeights(nn.Module):
    """Keeps its weights on the CPU, beside an input on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight.to(x.device), self.layer.bias.to(x.device))


class Indexes(nn.Module):
    """Looks up rows of a table on the GPU by indices on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, WIDTH, device=GPU))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids] * 2


class Attends(Moves):
    """A layer of torch's own that has a fast path, which no mode may hide from a capture."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__(move)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True).to(GPU)


class Reads(Moves):
    """Uses what it is passed on the CPU before it moves it."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.move(x / 255))
        return out


def to(x: Tensor) -> Tensor:
    return x.to(GPU)


def later(x: Tensor) -> Tensor:
    return x.to(GPU, non_blocking=True)


def rows_of(call: int) -> int:
    return 1 + call % 4


def batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH)


def pinned(rows: int) -> Tensor:
    return batch(rows).pin_memory()


def module(model: nn.Module, given: Callable[[int], Any] = batch, **settings: Any) -> Outcome:
    """Wrap a module; each call is passed a new tensor, which is overwritten as soon as the call returned."""
    plain = copy.deepcopy(model.eval())
    wrapped: Any = sg.wrap(model, **{"capture_sizes": SIZES, "progress": False, **settings})

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for call in range(CALLS):
            passed = given(rows_of(call))
            passed = passed if isinstance(passed, tuple) else (passed,)
            expected = plain(*copy.deepcopy(passed))
            torch.cuda.synchronize()
            found = wrapped(*passed)
            for tensor in torch.utils._pytree.tree_leaves(passed):
                if not tensor.is_cuda and not tensor.is_pinned():
                    tensor.fill_(-1)  # eager allows it: the copy is over
            yield found, expected

    return wrapped, calls()


def overwritten_pinned() -> Outcome:
    """A pinned tensor that one buffer holds for all calls, moved by a copy that waits, and overwritten at once."""
    memory = torch.empty(4, WIDTH).pin_memory()
    model = Moves(to).eval()
    plain = copy.deepcopy(model)
    wrapped: Any = sg.wrap(model, capture_sizes=SIZES, progress=False)
    busy = torch.randn(4096, 4096, device=GPU)

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for call in range(CALLS):
            x = batch(rows_of(call))
            expected = plain(x)
            memory[: x.shape[0]].copy_(x)
            busy @ busy  # the copy waits behind it
            found = wrapped(memory[: x.shape[0]])
            memory.fill_(float("nan"))
            yield found, expected

    return wrapped, calls()


def data_loader_step() -> Outcome:
    """A training step that moves a data loader's batches itself."""
    torch.manual_seed(0)
    models = [nn.Linear(WIDTH, 8).to(GPU) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(x: Tensor, y: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            x, y = x.to(GPU, non_blocking=True), y.to(GPU, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps.append(step)
        if model is models[1]:
            graphed: Any = sg.train_step(step, optimizers=optimizer, modules=[model])
    data = torch.utils.data.TensorDataset(torch.randn(CALLS * 4, WIDTH), torch.randint(0, 8, (CALLS * 4,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        with torch.enable_grad():
            for x, y in loader:
                yield graphed(x, y).clone(), steps[0](x, y)

    return graphed, calls()


def pair() -> Outcome:
    """A module that trains, whose forward moves its input."""
    torch.manual_seed(0)
    plain = Moves(to).train()
    model = copy.deepcopy(plain)
    wrapped: Any = sg.wrap(model, training=True)

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        with torch.enable_grad():
            for _ in range(CALLS):
                x = batch(4)
                found, expected = wrapped(x), plain(x)
                found.square().mean().backward()
                expected.square().mean().backward()
                yield wrapped.layer.weight.grad.clone(), plain.layer.weight.grad.clone()
                for each in (wrapped, plain):
                    each.zero_grad()

    return wrapped, calls()


def overwritten_pair() -> Outcome:
    """A module that trains, whose forward waits for the copy of a pinned tensor that is overwritten at once."""
    torch.manual_seed(0)
    plain = Moves(to).train()
    model = copy.deepcopy(plain)
    wrapped: Any = sg.wrap(model, training=True)
    memory, busy = torch.empty(4, WIDTH).pin_memory(), torch.randn(4096, 4096, device=GPU)

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        with torch.enable_grad():
            for call in range(CALLS):
                x = batch(4)
                expected = plain(x)
                memory.copy_(x)
                busy @ busy  # the copy waits behind it
                found = wrapped(memory)
                if call > 10:  # a proof looks at the arguments again in the backward
                    memory.fill_(float("nan"))
                found.square().mean().backward()
                expected.square().mean().backward()
                yield wrapped.layer.weight.grad.clone(), plain.layer.weight.grad.clone()
                for each in (wrapped, plain):
                    each.zero_grad()

    return wrapped, calls()


def generation() -> Outcome:
    """Ids on the CPU beside a model on the GPU: `generate` says what plain `generate` says."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from simplegraph.integrations.transformers import graph_generation

    shape = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": WIDTH}
    config = LlamaConfig(**shape, vocab_size=100, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(GPU).eval()
    plain = copy.deepcopy(model)
    handle = graph_generation(model, max_batch_size=2, max_length=64)

    def generate(each: Any, ids: Tensor) -> Tensor:
        try:
            out: Tensor = each.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            return out.float()
        except RuntimeError as error:
            return torch.tensor(float(len(str(error).splitlines()[0])))

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for call in range(12):
            ids = torch.randint(2, 100, (1 + call % 2, 8), device="cpu" if call % 3 == 2 else GPU)
            yield generate(model, ids), generate(plain, ids)

    return handle, calls()


def function() -> Outcome:
    """A function that moves what it is passed."""
    layer = nn.Linear(WIDTH, WIDTH).to(GPU)

    def run(x: Tensor) -> Tensor:
        out: Tensor = layer(x.to(GPU))
        return out

    wrapped: Any = sg.wrap(run, capture_sizes=SIZES, progress=False)
    return wrapped, ((wrapped(x), run(x)) for x in map(batch, map(rows_of, range(CALLS))))


def lengths() -> Outcome:
    """A module of any length, whose forward moves its input."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).to(GPU)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.to(GPU))
            return out

    model = Tokens().eval()
    plain = copy.deepcopy(model)
    settings: Any = {"length_dims": {"x": 1}, "lengths": [8, 16], "capture_sizes": SIZES, "progress": False}
    wrapped: Any = sg.wrap(model, **settings)
    given = (torch.randn(rows_of(call), 3 + call % 11, WIDTH) for call in range(CALLS))
    return wrapped, ((wrapped(x), plain(x)) for x in given)


def lengths_and_draws() -> Outcome:
    """A module of any length that draws random numbers on the GPU, each call after the same seed as eager's."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).to(GPU)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = F.dropout(self.layer(x.to(GPU)), training=True)
            return out

    model = Drops().eval()
    plain = copy.deepcopy(model)
    settings: Any = {"length_dims": {"x": 1}, "lengths": [8, 16], "capture_sizes": SIZES, "progress": False}
    wrapped: Any = sg.wrap(model, **settings)

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for call in range(CALLS):
            x = torch.randn(rows_of(call), 3 + call % 11, WIDTH)
            torch.manual_seed(call)
            found = wrapped(x)
            torch.manual_seed(call)
            yield found, plain(x)

    return wrapped, calls()


def alternating() -> Callable[[int], Tensor]:
    """Make inputs on the CPU and on the GPU, in turn."""
    count = iter(range(CALLS))
    return lambda rows: batch(rows) if next(count) % 2 else batch(rows).to(GPU)


def gpu_first() -> Callable[[int], Tensor]:
    """Make inputs on the GPU until graphs serve them, and on the CPU later."""
    count = iter(range(CALLS))
    return lambda rows: batch(rows) if next(count) > 20 else batch(rows).to(GPU)


class ReadsAList(Moves):
    """Makes a tensor of a list of numbers that lie in what it is passed."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.move(x)) * torch.tensor([row[0] for row in x], device=GPU)[:, None]
        return out


def ones_first() -> Callable[[int], Tensor]:
    """Make rows that begin with one number for as long as graphs are captured and proven, and with others later."""
    count = iter(range(CALLS))

    def given(rows: int) -> Tensor:
        x = batch(rows)
        if next(count) < 24:
            x[:, 0] = 1
        return x

    return given


def image_break() -> Outcome:
    """A piecewise graph whose eager break is passed the CPU tensor."""

    @sg.eager_break
    def scale(x: Tensor) -> Tensor:
        return x.amax(1, keepdim=True).to(GPU)

    class Broken(Moves):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.move(x)) * scale(x)
            return out

    return module(Broken(to), mode="PIECEWISE")


def memory_mapped(rows: int) -> Tensor:
    path = pathlib.Path(tempfile.gettempdir()) / f"simplegraph_rows_{rows}.bin"
    if not path.exists():
        path.write_bytes(bytes(4 * rows * WIDTH))
    mapped = torch.from_file(str(path), shared=True, size=rows * WIDTH, dtype=torch.float32).view(rows, WIDTH)
    return mapped.copy_(batch(rows))


def other_kinds() -> Callable[[int], Tensor]:
    """Make CPU tensors of another dtype, layout or size at each call, and some without rows."""
    count = iter(range(CALLS))

    def given(rows: int) -> Tensor:
        kind = next(count) % 5
        if kind == 0:
            return batch(rows).double().float()
        if kind == 1:
            return torch.randn(WIDTH, rows).t()
        if kind == 2:
            return torch.randn(rows, 2 * WIDTH)[:, ::2]
        if kind == 3:
            return torch.empty(0, WIDTH)
        return batch(rows).half()

    return given


class AnyDtype(Moves):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.to(GPU, torch.float32))
        return out


# By name: what runs, and how many of its calls are replayed at least.
CASES: dict[str, tuple[Callable[[], Outcome], int]] = {
    "function": (function, 80),
    "lengths": (lengths, 60),
    "lengths-draws": (lengths_and_draws, 0),
    "alternating": (lambda: module(Alone(to), alternating()), 60),
    "gpu-first": (lambda: module(Alone(to), gpu_first()), 60),
    "attention": (lambda: module(Attends(to), lambda rows: torch.randn(rows, 5, WIDTH)), 80),
    "list": (lambda: module(ReadsAList(to), ones_first()), 0),
    "issue": (lambda: module(Moves(later)), 80),
    "to": (lambda: module(Moves(to)), 80),
    "cuda": (lambda: module(Moves(lambda x: x.cuda())), 80),
    "to-another-dtype": (
        lambda: module(Moves(lambda x: x.to(GPU, torch.float32)), lambda rows: batch(rows).double()),
        80,
    ),
    "pinned": (lambda: module(Moves(later), pinned), 80),
    "pinned-alone": (lambda: module(Alone(later), pinned), 80),
    "pinned-overwritten": (overwritten_pinned, 80),
    "alone": (lambda: module(Alone(lambda x: x.to("cuda"))), 80),
    "copy": (lambda: module(FillsBuffer()), 60),
    "copy-later": (lambda: module(FillsBuffer(non_blocking=True), pinned), 60),
    "sequential": (lambda: module(nn.Sequential(Moves(to), nn.ReLU(), nn.Linear(WIDTH, 8, device=GPU))), 80),
    "dict": (lambda: module(InDict(to), lambda rows: ({"x": batch(rows), "scale": torch.rand(rows, 1)},)), 80),
    "beside": (
        lambda: module(Beside(to), lambda rows: (batch(rows), batch(rows).to(GPU), torch.tensor(float(rows)))),
        60,
    ),
    "index": (lambda: module(Indexes(), lambda rows: torch.randint(0, 100, (rows, 5))), 80),
    "cpu-weights": (lambda: module(CpuWeights(), lambda rows: batch(rows).to(GPU)), 80),
    "cpu-module": (lambda: module(nn.Linear(WIDTH, WIDTH), batch), 80),
    "memory-mapped": (lambda: module(Moves(to), memory_mapped), 80),
    "shared": (lambda: module(Moves(to), lambda rows: batch(rows).share_memory_()), 80),
    "other-kinds": (lambda: module(AnyDtype(to), other_kinds()), 30),
    "captured-up-front": (lambda: captured_first(Alone(to)), 90),
    "captured-up-front-weights": (lambda: captured_first(Moves(later)), 90),
    "break": (image_break, 60),
    "used-on-the-cpu": (lambda: module(Reads(to)), 0),
    "train-step": (data_loader_step, 90),
    "pair": (pair, 60),
    "pair-overwritten": (overwritten_pair, 60),
    "generation": (generation, 1),
}
NEEDS_TRANSFORMERS = {"generation"}
# Reasons of eager calls that cost no speed for long.
SOON = {"first_call", "warmup", "proof", "batch_dim_unconfirmed", "output_shape_unknown", "switched_off"}
MORE_REASONS = {
    "copy": {"padding_shows"},  # padding rows go into the buffer, too
    "copy-later": {"padding_shows"},
    "other-kinds": {"empty_batch"},
    "used-on-the-cpu": {"wrong_device"},
    "list": {"wrong_device"},
    "lengths-draws": {"length_padding", "padding_shows", "size_not_captured"},
    "generation": {"wrong_device", "switched_off", "prefill", "too_short"},
}


def captured_first(model: nn.Module) -> Outcome:
    wrapped, calls = module(model)
    wrapped.capture_graphs(batch(4))
    return wrapped, calls


def check(name: str) -> None:
    """Run a case in a process of its own: answers are eager's, and graphs serve where they can."""
    line = [sys.executable, "-W", "ignore", "-m", "tests.gpu.host_inputs", name]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["apart"] <= 1e-4, found  # cuBLAS may round otherwise for another number of rows
    assert found["replays"] >= CASES[name][1], found
    assert found["eager"].keys() <= SOON | MORE_REASONS.get(name, set()), found


def main(name: str) -> None:
    """Run a case and print how it went."""
    torch.manual_seed(0)
    grad = name in ("train-step", "pair", "pair-overwritten")
    with contextlib.nullcontext() if grad else torch.inference_mode() if name == "issue" else torch.no_grad():
        by, calls = CASES[name][0]()
        apart = max(_apart(found, expected) for found, expected in calls)
    stats = getattr(by, "graph_stats", None) or by.stats
    print(json.dumps({"apart": apart, "replays": stats.replays, "eager": {str(k): n for k, n in stats.eager.items()}}))


def _apart(found: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0 if found.shape == wanted.shape else float("inf")
    if found.shape != wanted.shape or found.device != wanted.device:
        return float("inf")
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-3))


if __name__ == "__main__":
    main(*sys.argv[1:])
