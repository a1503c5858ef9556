"""What CUDA loads at its first use is loaded beside the imports, and the program then runs as without that."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import subprocess
import sys

import torch

import simplegraph as sg
from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.start import load_kernels
from bench.models.workload import Workload

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import json
import simplegraph as sg
loading = sg.preload()
import torch
weights = [torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(50)]  # beside the thread
model = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16).eval()
x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
wrapped = sg.wrap(model, capture_sizes=[4])
with torch.no_grad():
    found = [wrapped(x) for _ in range(5)]
    equal = all(torch.equal(one, found[0]) for one in found)
loading.wait()
torch.cuda.synchronize()
total = float(sum(weight.float().abs().sum() for weight in weights))
print(json.dumps({"seconds": loading.seconds, "equal": equal, "replays": wrapped.graph_stats.replays, "total": total}))
"""

COLD = """
import json, threading
import torch, triton
from simplegraph.fused.choice import operators_for
from simplegraph.fused.torch_operators import KernelTrial
compiled = []
triton.knobs.compilation.listener = lambda **told: compiled.append((told["src"].name, told["src"].hash()))
sizes = {"rms_norm": (256,), "add_rms_norm": (256,), "gated": (256, "silu"), "rotate": (64,), "finish": ("silu", 1)}
sizes["linears"] = (256, 0)
trials = [KernelTrial(name, each) for name, each in sizes.items()]
trials += [KernelTrial("depthwise", (size,)) for size in (3, 5)] + [KernelTrial("finish", ("relu", 0))]
with torch.cuda.stream(torch.cuda.Stream()):
    operators = operators_for(torch.device("cuda", 0), torch.bfloat16, trials)
found = {
    "triton": operators.triton, "threads": threading.active_count(), "compiled": sorted(name for name, _ in compiled),
    "different": len(set(compiled)),
}
many = torch.ones(512, 256, device="cuda", dtype=torch.bfloat16)
operators.linears(many[:1], [many, many[:128], many[:128]], [None] * 3)
operators.gated(*torch.ones(5, 2048, device="cuda", dtype=torch.bfloat16).chunk(2, dim=-1), "silu")
operators.add_rms_norm(many, many, many[0], 1e-5)
print(json.dumps(found | {"later": len(compiled) - len(found["compiled"])}))
"""


def test_cold_kernels_are_compiled_in_threads_and_each_variant_once(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COLD],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    names = ["_depthwise"] * 2 + ["_finish", "_gate", "_linear"] + ["_norm"] * 2 + ["_rotate"]
    # Later: what models of other sizes run are the variants that were tried.
    assert found == {"triton": True, "threads": 1, "compiled": names, "different": 8, "later": 0}


def test_a_program_that_preloads_captures_and_replays() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = found["seconds"]
    print(seconds)  # "context" comes beside "torch", not after it
    assert {"context", "torch", "device", "cublas", "kernels"} <= seconds.keys()
    assert max(seconds["context"], seconds["torch"]) <= seconds["device"] <= seconds["cublas"] <= seconds["kernels"]
    assert found["equal"]
    assert found["replays"] > 0
    assert found["total"] > 0


def test_kernels_are_loaded_without_a_trace_in_memory_or_tokens() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    llama = Workload("tiny", (1,), device, lm_head=True).build(windows=True)
    config = EngineConfig(max_model_len=512, num_pages=64, max_num_seqs=4, fused=True)
    prompt = list(range(1, 33))

    def tokens() -> list[list[int]]:
        return Engine(llama, config).generate([prompt], SamplingParams(max_tokens=8))

    expected, state = tokens(), torch.cuda.get_rng_state(device)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    loading = sg.preload(device, torch.float32, then=lambda: load_kernels(llama.config, config, device, len(prompt)))
    loading.wait()
    gc.collect()
    assert "then" in loading.seconds
    # A stream's workspace of cuBLAS is kept.
    assert torch.cuda.memory_allocated(device) - before <= 64 << 20
    assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert tokens() == expected


def test_a_capture_beside_a_preload_waits_and_equals_eager() -> None:
    model = torch.nn.Linear(64, 64, device="cuda").eval()
    x = torch.randn(4, 64, device="cuda")
    ran: list[int] = []

    def load() -> None:
        ran.append(int(torch.ones(8, device="cuda").sum()))

    with torch.no_grad():
        expected = model(x)
        wrapped = sg.wrap(model, capture_sizes=[4])
        loading = sg.preload(then=load)
        wrapped.capture_graphs(x)
        assert ran == [8]
        assert torch.equal(wrapped(x), expected)
    loading.wait()
