"""Kernels are compiled side by side, each once, and Triton starts beside other work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import TRIALS, Device, Kernels, move_to_devices, stand_in_kernels

from simplegraph.fused import choice, first_use
from simplegraph.fused.choice import operators_for
from simplegraph.fused.torch_operators import KernelTrial


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    move_to_devices(monkeypatch)


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    stand_in_kernels(monkeypatch, kernels)
    return kernels


def test_kernels_are_compiled_side_by_side_and_each_by_one_thread(
    stands_in: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = [KernelTrial("rms_norm", (64, 1)), KernelTrial("add_layer_norm", (64,))]
    gates = [KernelTrial("gated", (64, kind)) for kind in ("silu", "gelu")]
    threads: dict[str, list[Any]] = {"norm": [], "gated": []}
    both = threading.Barrier(2, timeout=20)  # passed only if both kernels run at once
    here = threading.current_thread()
    for name, seen in threads.items():
        kernel = getattr(stands_in, name)

        def run(*args: Any, kernel: Any = kernel, seen: Any = seen, **settings: Any) -> Any:
            if not seen:
                both.wait()
            seen.append(threading.current_thread())
            return kernel(*args, **settings)

        monkeypatch.setattr(stands_in, name, run, raising=False)
    device, alive = Device(), threading.active_count()
    for _ in range(2):  # the second time nothing is new
        assert operators_for(device, torch.float16, [*norms, *gates, *norms]).triton
    assert threading.active_count() == alive
    compiled = {name: [each for each in seen if each is not here] for name, seen in threads.items()}
    assert {name: len(each) for name, each in compiled.items()} == {"norm": 2, "gated": 2}
    assert len(set(compiled["gated"])) == 1  # one variant: the second trial finds it
    assert compiled["norm"][0] is not compiled["gated"][0]


def test_without_threads_kernels_are_tried_one_after_the_other(
    stands_in: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    trials = [KernelTrial(*each) for each in TRIALS.items()]
    assert operators_for(Device(), torch.float16, trials).triton


def test_triton_starts_once_beside_other_work_and_a_failure_is_left_to_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def fail() -> None:
        ran.append("driver")
        raise RuntimeError("Failed to find C compiler")

    release = threading.Event()

    def read() -> None:
        release.wait(20)
        ran.append("compiler")

    monkeypatch.setattr(first_use, "build_driver", first_use._Once(fail))
    monkeypatch.setattr(first_use, "read_compiler", first_use._Once(read))
    for _ in range(2):
        with first_use.triton_starts():
            release.set()  # the threads run beside this
        assert sorted(ran) == ["compiler", "driver"]


# Triton's modules as they import each other; with pauses, so that threads meet.
CIRCULAR = {
    "__init__": "from triton import runtime",
    "runtime/__init__": "from triton.runtime.driver import driver",
    "runtime/driver": (
        "import types, triton.backends\n"
        "driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_device=lambda: 0))"
    ),
    "runtime/cache": "import time; time.sleep(0.05)\ndef triton_key(): print('read')\ndef get_cache_manager(): pass",
    "backends/__init__": "import importlib; importlib.import_module('triton.backends.nvidia.driver')",
    "backends/nvidia/__init__": "",
    "backends/nvidia/driver": (
        "import time; time.sleep(0.05)\nfrom triton.runtime.cache import get_cache_manager\n"
        "class CudaUtils:\n    def __init__(self): print('built')"
    ),
}
STARTS = """
from simplegraph.fused import choice
print(choice._has_launcher())
"""


def test_threads_that_start_triton_import_it_one_after_the_other(tmp_path: Path) -> None:
    for name, text in CIRCULAR.items():
        file = tmp_path / "triton" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    # The first try, by threads, did all: where one of them fails, nothing of its part is printed.
    # Threads that print at once may share a line.
    assert (sorted(re.findall("True|built|read", done.stdout)), done.stderr) == (["True", "built", "read"], "")


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_in_the_way_of_triton_once_is_tried_again(
    times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problems = [ImportError("cannot import name 'driver' from partially initialized module")] * times

    def start(module: str) -> Any:
        if problems:
            raise problems.pop()
        return SimpleNamespace(driver=SimpleNamespace(active=object()))

    monkeypatch.setattr(choice, "import_triton", start)
    monkeypatch.setattr(choice, "build_driver", lambda: None)
    choice._has_launcher.cache_clear()
    try:
        assert choice._has_launcher() is (times == 1)
    finally:
        choice._has_launcher.cache_clear()
    assert ["partially initialized" in record.message for record in caplog.records] == [True] * (times - 1)
