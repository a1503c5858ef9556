"""Captures as the first work of a process, and prints how the calls after it ran.

``python -m tests.gpu.fresh_process CASE {cuda,cpu}``: torch and CUDA's libraries choose kernels, and settings, at their
first use. A graph that is captured there has to be found by every later call. On a CPU graphs are emulated.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg

ORDER = torch._C._get_sdp_priority_order()  # before any attention
ROOT = pathlib.Path(__file__).parents[2]
ROWS = (4, 1, 2, 3)  # of calls, of which three are padded to four
TOKENS, WIDTH = 64, 256  # heads of 64 elements, for which SDPA may choose cuDNN's kernels

Pass = Callable[[], Iterator[tuple[Any, Any]]]


class Attention(nn.Module):
    """One layer of `scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, WIDTH // 64, 64)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return out


class ChangesSetting(nn.Module):
    """Changes a setting of torch in its first forward, as torch itself may at the first attention of a process."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._get_sdp_priority_order() == ORDER:
            torch._C._set_sdp_priority_order(ORDER[::-1])
        out: Tensor = self.attention(x)
        return out


class Case:
    """Something that is captured.

    Args:
        by: the wrapper, training step, manager or handle with the counters.
        calls: runs a pass of calls, and yields each answer beside eager's, or None where eager's cannot be had.
        replays: of a pass, at least.
    """

    def __init__(self, by: Any, calls: Pass, replays: int = len(ROWS)) -> None:
        self._stats = getattr(by, "graph_stats", None) or by.stats
        self._calls, self._replays = calls, replays

    def run(self) -> dict[str, Any]:
        """Run a pass of calls, whose first ones are proofs, and another one."""
        first = self._pass()
        return {"first": first, "later": self._pass(), "replays": self._replays, "graphs": len(self._stats.graphs)}

    def _pass(self) -> dict[str, Any]:
        replays, eager = self._stats.replays, self._stats.eager.copy()
        apart = [_apart(found, wanted) for found, wanted in self._calls() if wanted is not None]
        found = self._stats.eager - eager
        found.pop(sg.Reason.SWITCHED_OFF, None)  # of the comparisons
        return {"eager": found, "replays": self._stats.replays - replays, "apart": max(apart, default=0.0)}


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def _module(model: nn.Module, inputs: Callable[[int], Tensor], device: torch.device, **fixed: Any) -> Case:
    """Wrap and capture a module of one input."""
    wrapped: Any = sg.wrap(model.to(device, _dtype(device)).eval(), capture_sizes=[1, 2, 4], progress=False)

    def given(rows: int) -> Tensor:
        found = inputs(rows)
        return found.to(device, _dtype(device) if found.is_floating_point() else found.dtype)

    def first(output: Any) -> Tensor:
        found: Tensor = output if isinstance(output, Tensor) else output[0]
        return found

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in ROWS:
            x = given(rows)
            found = first(wrapped(x, **fixed)).clone()
            with sg.eager():
                yield found, first(wrapped(x, **fixed))

    wrapped.capture_graphs(given(4), **fixed)
    return Case(wrapped, calls)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _sequences(rows: int) -> Tensor:
    return torch.randn(rows, TOKENS, WIDTH)


def _images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 32, 32)


def _ids(rows: int) -> Tensor:
    return torch.randint(1, 100, (rows, TOKENS))


_SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": WIDTH}
_WORDS = {"vocab_size": 100, "max_position_embeddings": 128}


def readme(device: torch.device) -> Case:
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(block, names)
    model = names["model"]
    if names["device"] != device.type:
        raise RuntimeError(f"the snippet ran on {names['device']}")

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in ROWS:
            x = torch.randn(rows, 64, device=device)
            found = model(x).clone()
            with sg.eager():
                yield found, model(x)

    return Case(model, calls)


def bert(device: torch.device) -> Case:
    from transformers import BertConfig, BertModel

    return _module(BertModel(BertConfig(**_SHAPE, **_WORDS)), _ids, device)


def llama_without_cache(device: torch.device) -> Case:
    from transformers import LlamaConfig, LlamaModel

    return _module(LlamaModel(LlamaConfig(**_SHAPE, **_WORDS)), _ids, device, use_cache=False)


def vit(device: torch.device, attention: str) -> Case:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(**_SHAPE, image_size=32, patch_size=8, attn_implementation=attention)
    return _module(ViTModel(config), _images, device)


def generation(device: torch.device) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    from simplegraph.integrations.transformers import graph_generation

    config = LlamaConfig(**_SHAPE, **_WORDS, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(device).eval()
    handle = graph_generation(model, max_batch_size=2, max_length=64)
    prompts = [_ids(rows)[:, :8].to(device) for rows in (2, 1)]

    def calls() -> Iterator[tuple[Tensor, None]]:
        for ids in prompts:
            yield model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False), None

    return Case(handle, calls, replays=2 * 7)


def train_step(device: torch.device) -> Case:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = sg.train_step(step, optimizers=optimizer, modules=[model])

    def calls() -> Iterator[tuple[Tensor, None]]:
        with torch.enable_grad():
            for _ in range(8):
                yield graphed(torch.randn(16, WIDTH, device=device), torch.randn(16, 8, device=device)), None

    return Case(graphed, calls, replays=8)


def manager(device: torch.device) -> Case:
    model = Attention().to(device, _dtype(device)).eval()
    static = torch.zeros(4, TOKENS, WIDTH, device=device, dtype=_dtype(device))
    made = sg.CudaGraphManager(device=device, mode="FULL", capture_sizes=[1, 2, 4], max_num_seqs=4, progress=False)

    def forward(mode: sg.CudaGraphMode, descriptor: sg.BatchDescriptor) -> Tensor:
        out: Tensor = model(static[: descriptor.num_tokens])
        return out

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in ROWS:
            static[:rows].copy_(_sequences(rows))
            found = made.run(made.dispatch(rows, rows, 1), forward)[:rows].clone()
            yield found, model(static)[:rows]

    made.capture(forward)
    return Case(made, calls)


CASES: dict[str, Callable[[torch.device], Case]] = {
    "readme": readme,
    "sdpa": lambda device: _module(Attention(), _sequences, device),
    "lstm": lambda device: _module(nn.LSTM(WIDTH, 64, batch_first=True), _sequences, device),
    "convolution": lambda device: _module(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2)), _images, device
    ),
    "bert": bert,
    "llama-without-cache": llama_without_cache,
    "vit-sdpa": lambda device: vit(device, "sdpa"),
    "vit-eager": lambda device: vit(device, "eager"),
    "graph-generation": generation,
    "train-step": train_step,
    "manager": manager,
    "changes-a-setting": lambda device: _module(ChangesSetting(), _sequences, device),
}


# What captures as calls come, and needs some eager ones first.
AS_CALLS_COME = {"graph-generation", "train-step"}
NEEDS_TRANSFORMERS = {"bert", "llama-without-cache", "vit-sdpa", "vit-eager", "graph-generation"}


def check(name: str, kind: str) -> None:
    """Run a case in a process of its own: no call is eager but to prove a graph, and later ones are all replayed."""
    line = [sys.executable, "-W", "ignore", "-m", "tests.gpu.fresh_process", name, kind]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["first"]["eager"].keys() <= {"proof", *(("first_call", "warmup") if name in AS_CALLS_COME else ())}, (
        found
    )
    assert not found["later"]["eager"], found
    assert found["later"]["replays"] >= found["replays"], found
    rounding = 0.05 if kind == "cuda" else 1e-5  # bfloat16, and kernels of other sizes
    assert max(found["first"]["apart"], found["later"]["apart"]) <= rounding, found


def main(name: str, kind: str) -> None:
    """Run a case and print what `Case.run` returns."""
    torch.manual_seed(0)
    with torch.inference_mode() if name == "manager" else torch.no_grad():
        print(json.dumps(CASES[name](torch.device(kind)).run()))


if __name__ == "__main__":
    main(*sys.argv[1:])
