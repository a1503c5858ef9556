"""Nothing heavy is imported before it is used, and what CUDA loads lazily can be loaded in a thread."""

from __future__ import annotations

import ctypes
import gc
import json
import pathlib
import subprocess
import sys
import threading
import types
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph.fused import first_use

ROOT = pathlib.Path(__file__).parents[3]
# Packages that take long to import, and that a first call does not need. torch itself imports some of the others.
HEAVY = (
    *("triton", "transformers", "flashinfer", "vllm", "pytest", "matplotlib", "sympy", "pandas", "scipy"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.onnx"),
)
STARTS = """
import json, sys
heavy = json.loads(sys.argv[1])
import simplegraph as sg
found = {"import": [name for name in ("torch", "numpy", *heavy) if name in sys.modules]}
sg.preload("cpu").wait()
found["torch"] = "torch" in sys.modules
import torch
brought = set(sys.modules)
model = sg.wrap(torch.nn.Linear(4, 4, device="cpu").eval(), capture_sizes=[2])
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(2, 4))
found["replays"] = model.graph_stats.replays
found["call"] = [name for name in heavy if name in sys.modules and name not in brought]
print(json.dumps(found))
"""


def test_nothing_heavy_is_imported_for_a_call_that_is_replayed() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STARTS, json.dumps(HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.pop("replays") > 0
    assert found == {"import": [], "torch": True, "call": []}


def test_on_a_cpu_torch_is_imported_and_nothing_is_loaded() -> None:
    loading = sg.preload("cpu")
    loading.wait()
    assert list(loading.seconds) == ["torch"]
    assert loading.done


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        sg.preload("cpu").wait()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_what_is_called_at_last_is_waited_for_and_its_error_raised_once(caplog: pytest.LogCaptureFixture) -> None:
    done = sg.preload("cpu", then=lambda: None)
    done.wait()
    assert list(done.seconds) == ["torch", "then"]
    failing = sg.preload("cpu", then=lambda: {}["layer"])
    with pytest.raises(KeyError, match="layer"):
        failing.wait()
    assert "what preload was to call raised KeyError: 'layer'" in caplog.text
    failing.wait()
    assert "then" not in failing.seconds


def test_a_capture_waits_until_everything_is_loaded() -> None:
    release, loaded = threading.Event(), []

    def load() -> None:
        release.wait(20)
        loaded.append(True)

    model = sg.wrap(torch.nn.Linear(2, 2).eval(), capture_sizes=[1])
    loading = sg.preload("cpu", then=load)
    threading.Timer(0.2, release.set).start()
    with torch.no_grad():
        model.capture_graphs(torch.ones(1, 2))
    assert loaded == [True]
    loading.wait()
    assert model.graph_stats.captures == 1


class Driver:
    """Stands for the CUDA driver; `failing` is the call that it refuses."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.calls = failing, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, args))
            return 100 if name == self.failing else 0

        return call


@pytest.mark.parametrize("failing", ["", "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_the_context_is_that_of_the_device(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    assert first_use._create_context(3) is (failing == "")
    names = [name for name, _ in driver.calls]
    every = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert names == every[: every.index(failing) + 1 if failing else 3]
    assert failing == "cuInit" or driver.calls[1][1][1] == 3


@pytest.mark.parametrize(
    "problem",
    [
        ModuleNotFoundError("No module named 'triton'"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["gcc"]),
        FileNotFoundError("/sbin/ldconfig"),
    ],
    ids=["not installed", "no compiler", "a compiler that fails", "no linker"],
)
def test_a_machine_where_triton_does_not_run_goes_without(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(problem, monkeypatch)
    assert not first_use._load_triton()


def test_an_error_in_triton_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(TypeError("a defect"), monkeypatch)
    with pytest.raises(TypeError, match="a defect"):
        first_use._load_triton()


def use_triton(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a Triton in place whose driver fails when it is asked for a device."""

    def fail() -> None:
        raise problem

    active = types.SimpleNamespace(get_current_device=fail)
    for name in ("triton", "triton.runtime", "triton.runtime.driver"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["triton.runtime.driver"], "driver", types.SimpleNamespace(active=active), False)


def test_the_context_is_created_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    created = threading.Event()
    monkeypatch.setattr(first_use, "_create_context", lambda index: created.set() or True)
    loading = first_use.Preload("cuda:0", None, None)
    loading._thread.start()  # without the import, which the rest waits for
    assert created.wait(20)
    assert not loading.done
    loading._imported.set()
    loading.wait()
    assert next(iter(loading.seconds)) == "context"


@pytest.mark.parametrize("has_gpu", [True, False])
def test_triton_is_read_while_torch_is_imported_if_there_is_a_gpu(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, read = [], threading.Event()
    monkeypatch.setattr(first_use, "_create_context", lambda index: has_gpu)
    monkeypatch.setattr(first_use, "build_driver", lambda: ran.append("driver"))
    monkeypatch.setattr(first_use, "read_compiler", lambda: (ran.append("compiler"), read.set()))
    loading = first_use.Preload("cuda:0", None, None)
    loading._thread.start()  # without the import, which the rest waits for
    assert read.wait(20 if has_gpu else 0.05) is has_gpu
    loading._imported.set()
    loading.wait()
    assert ran == (["driver", "compiler"] if has_gpu else [])


def test_a_machine_without_a_driver_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not first_use._create_context(0)


@pytest.mark.parametrize(
    ("device", "place"),
    [
        (None, (True, 0)),
        (2, (True, 2)),
        ("cuda:1", (True, 1)),
        (torch.device("cuda", 3), (True, 3)),
        ("cpu", (False, 0)),
        ("mps", (False, 0)),
        (torch.device("cpu"), (False, 0)),
    ],
)
def test_a_device_is_read_without_torch(device: Any, place: tuple[bool, int]) -> None:
    assert first_use._ordinal(device) == place


@pytest.mark.parametrize("device", ["gpu", "gpu:0", "cuda:x", "cuda:-1", -1, True, 1.5])
def test_a_device_that_is_none_is_refused_at_once(device: Any) -> None:
    with pytest.raises(sg.ConfigError, match="preload was given the device"):
        sg.preload(device)


def test_a_gpu_that_is_not_there_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_use, "_create_context", lambda index: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    loading = sg.preload("cuda:2")
    loading.wait()
    assert list(loading.seconds) == ["torch"]
    assert (
        "preload stopped at device, which is loaded at its first use instead: there is no GPU 2, only 2" in caplog.text
    )


def test_what_would_leave_the_program_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(SystemExit, match="no checkpoint"):
        sg.preload("cpu", then=lambda: sys.exit("no checkpoint")).wait()


def test_captures_go_on_where_no_thread_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            sg.preload("cpu")
    model = sg.wrap(torch.nn.Linear(2, 2).eval(), capture_sizes=[1])
    with torch.no_grad():
        model.capture_graphs(torch.ones(1, 2))
    assert model.graph_stats.captures == 1
