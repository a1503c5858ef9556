"""One suite for both devices: `device` is a GPU where there is one and the CPU, hence the emulator, elsewhere.

With TESTS_DEVICE=cpu it is the CPU on a machine with a GPU, too. TESTS_SAMPLE=2000 runs so many of the tests, chosen by
TESTS_SEED (0 if it is not set): the emulator must not touch what lies on a GPU beside it. TESTS_SHARE=2/3 runs the
second of every three cases of the tests that take longest: CI runs one of the three shares with each commit.
"""

from __future__ import annotations

import collections
import gc
import importlib
import importlib.util
import os
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from seeds import leave_absent_devices_unseeded

from simplegraph.base.config import CudaGraphConfig
from simplegraph.device.select import graph_device
from simplegraph.guard import versions
from simplegraph.serve.runner import CudaGraphWrapper

TESTS = pathlib.Path(__file__).resolve().parent
GPU_TESTS = TESTS / "gpu"
# What takes long to import and holds many objects, and what it needs that is optional here.
LIBRARIES = {
    "torch._inductor.compile_fx": "torch",
    "tests.sweeps.entries": "expecttest",  # torch's databases of operators and modules
    "transformers.models.llama.modeling_llama": "transformers",
    "matplotlib.pyplot": "matplotlib",
}

# Folders, files and tests that take long: together half of the time of all tests. CI runs a share of their cases.
LONG = (
    "advising/test_advise.py",
    "attention/backends/test_flash_attention.py",
    "attention/backends/test_flashinfer.py",
    "bench/engine",
    "bench/model_table/test_table.py",
    "bench/serve",
    "bench/spec_decode",
    "bench/startup/test_suite.py::test_what_is_complete_when_a_run_is_interrupted_is_written",
    "bench/test_advise.py",
    "bench/tools/test_replays.py",
    "bench/transformers_generate",
    "distributed/test_bench.py",
    "distributed/test_capture.py",
    "distributed/test_consensus.py",
    "distributed/test_context_parallel.py",
    "distributed/test_lost_ranks.py",
    "docs/test_commands.py::test_a_command_of_the_readme_runs",
    "fused/test_kernels.py",
    "fused/test_norms.py",
    "fused/test_rotary.py",
    "fuzz",
    "graph/breaks/test_random_breaks.py",
    "graph/test_observer.py",
    "integrations/transformers",
    "module/test_fault_matrix.py",
    "module/test_filled_once.py",
    "module/test_fresh_processes.py",
    "module/test_habits.py",
    "mutants/test_mutants.py::test_a_mistake_is_seen_and_none_is_not",
    "spec_decode",
    "stress",
    "sweeps",
    "training/test_cover.py",
    "training/test_data_parallel.py",
    "training/test_stale_optimizers.py",
    "typing",
)

if importlib.util.find_spec("hypothesis"):  # optional here
    import hypothesis

    # A first example pays for imports and captures, so time says nothing about a test here.
    hypothesis.settings.register_profile("simplegraph", deadline=None)
    hypothesis.settings.load_profile("simplegraph")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and os.environ.get("TESTS_SPREAD"):
        # One GPU for each worker, in turn, of those that are named.
        named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = named[int(config.workerinput["workerid"][2:]) % len(named)]
    leave_absent_devices_unseeded()
    if not torch.cuda.is_available():
        # Operators are small here: more threads only wait for each other, busily, and longest where cores are shared.
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if getattr(config.option, "dist", None) == "load":  # of pytest-xdist, where -n says no more
        # A worker keeps to its half, hence to a file's fixtures and one server of ranks, until the other has none left.
        config.option.dist = "worksteal"
    if hasattr(config, "workerinput"):
        del os.environ["PYTEST_XDIST_WORKER"]  # a pytest that a test starts is no worker of pytest-xdist
    else:
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """Prints each failure as it comes, and at the end what was running and what remains: a cut run has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._running: set[str] = set()
        self._total = self._ended = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = max(self._total, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._total = max(self._total, len(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.discard(nodeid)
        self._ended += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = (crash.message if crash is not None else str(report.longrepr)).strip().partition("\n")[0]
            kind = "ERROR" if report.when in ("setup", "teardown") else "FAILED"
            self._write(f"{kind} {report.nodeid} - {reason[:200]}")
            self._running.discard(report.nodeid)  # of a worker that crashed, nothing more comes

    def pytest_unconfigure(self) -> None:
        for nodeid in sorted(self._running):
            self._write(f"RUNNING {nodeid}")
        if self._ended < self._total and not self._config.option.collectonly:
            self._write(f"REMAINING {self._total - self._ended} of {self._total} tests")

    def _write(self, line: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write(f"\n{line}\n", flush=True)  # behind dots


def pytest_collection(session: pytest.Session) -> None:
    """Leave libraries out of garbage collections and searches, while tests' own modules are imported, too.

    Where all tests run, that is what they import, too: collections visited three times as many objects with it.
    """
    if any(pathlib.Path(argument).resolve() == TESTS for argument in session.config.args):
        for library, needed in LIBRARIES.items():
            if importlib.util.find_spec(needed):
                importlib.import_module(library)
    _freeze()


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave out what a file's tests left behind, such as caches of libraries: it doubles in a run of all tests."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Leave everything there is out of later garbage collections, which captures that fail begin."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Resolve ``-n auto``: no worker beside a GPU, whose memory tests measure; else one per core, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if tests_device() == "cuda" else min(cores, 8)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if most := int(os.environ.get("TESTS_SAMPLE", "0")):
        chosen = random.Random(int(os.environ.get("TESTS_SEED", "0"))).sample(range(len(items)), min(most, len(items)))
        items[:] = [items[at] for at in sorted(chosen)]
    left_out = outside_of_share(items, *map(int, os.environ.get("TESTS_SHARE", "1/1").split("/")))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def outside_of_share(items: Sequence[pytest.Item], share: int, shares: int) -> set[pytest.Item]:
    """Find the cases of tests in `LONG` that are in other shares; a test's first case may be in any of them."""
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(LONG):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for test, group in cases.items():
        first = (share + random.Random(test).randrange(shares)) % shares
        left_out.update(item for at, item in enumerate(group) if at % shares != first)
    return left_out


def tests_device() -> str:
    """Return the type of the device that tests run on."""
    return os.environ.get("TESTS_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> torch.device:
    return torch.device(tests_device())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _dispatch_as_before() -> Iterator[None]:
    """A test may not leave dispatch keys included or excluded: later ones in the process would compute otherwise."""
    before = _dispatch_keys()
    yield
    if _dispatch_keys() != before:
        gc.collect()  # a guard of torch may hang in the traceback of an error that the test caught
    assert _dispatch_keys() == before


def _dispatch_keys() -> tuple[str, str]:
    return str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())


@pytest.fixture(autouse=True)
def _proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove graphs by default only where a test says `proofs`: tests of one mechanism count runs and replays."""
    if not request.node.get_closest_marker("proofs"):
        monkeypatch.setitem(CudaGraphConfig.__init__.__kwdefaults__, "verify", 0)
        monkeypatch.setattr(CudaGraphWrapper, "cuda_graph_config", CudaGraphConfig())


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def nothing_left_behind(device: torch.device, no_grad: None) -> Iterator[None]:
    """The test runs without gradients, and no capture, stream or mode of it may outlive it."""
    graphs = graph_device(device)
    stream = graphs.current_stream()
    yield
    assert graphs.current_stream() == stream
    assert not graphs.is_capturing()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert gc.isenabled()


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def with_versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with a torch that has versions of dicts, and as with one that has none."""
    if not request.param:
        monkeypatch.setattr(versions, "dict_version", None)
