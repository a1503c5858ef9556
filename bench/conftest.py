"""Options and the machine's description for ``pytest bench/``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.arms import ALONE, ARMS
from bench.startup import runs, table
from bench.startup.__main__ import default_plan
from bench.startup.processes import CompileCaches
from bench.startup.results import Result, comparison
from bench.tools import environment
from bench.tools.clock import CLOCK
from bench.tools.measure import Figures, device_of
from bench.tools.options import SHAPES, count, listed, model, names, numbers, positive
from bench.tools.options import device as device_name

# Option, how its text is read, help; each can also be set in the environment, --startup-rounds as BENCH_ROUNDS.
OPTIONS = (
    ("arms", names(ARMS), f"of {listed(ARMS)}"),
    ("rounds", count, "processes per arm that compiles nothing"),
    ("compiled-rounds", count, "processes per arm that compiles"),
    ("model", model(), f"{listed(SHAPES)}, or a folder with a config.json"),
    ("sizes", numbers, "batch sizes, such as 1,2,4"),
    ("device", device_name, "cuda or cpu"),
    ("timeout", positive, "seconds a process may take"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("startup benchmark")
    for name, read, help_text in OPTIONS:
        variable = f"BENCH_{name.upper().replace('-', '_')}"
        text = os.environ.get(variable)
        group.addoption(f"--startup-{name}", type=read, default=text, help=f"{help_text} [{variable}]")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        chosen = runs.runs_of(metafunc.config.getoption("--startup-arms") or ALONE)
        metafunc.parametrize("run", chosen, ids=[run.label for run in chosen])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Disable pytest-timeout, since processes have their own limit; show recorded seconds, grouped by suite."""
    for item in items:
        if config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(0))
        if "record_seconds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK, group=getattr(item, "originalname", None)))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add GPU, driver, torch, commit and libraries to pytest-benchmark's machine info."""
    machine_info.update(environment.describe())


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """Add the ratios the library is judged by, and what has no seconds, once for the whole file."""
    if _ledger(config):
        output_json["comparison"] = comparison(_ledger(config))
    output_json.update(config.stash.get(_UNTIMED, {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _ledger(config):
        terminalreporter.section("startup")
        terminalreporter.write_line(table.render(_ledger(config)))


_LEDGER = pytest.StashKey[dict[str, Result]]()
_UNTIMED = pytest.StashKey[dict[str, Figures]]()


def _ledger(config: pytest.Config) -> dict[str, Result]:
    return config.stash.setdefault(_LEDGER, {})


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> dict[str, Result]:
    """Return the results so far, by label."""
    return _ledger(request.config)


@pytest.fixture(scope="session")
def plan(request: pytest.FixtureRequest) -> runs.StartupPlan:
    """Return this machine's plan with the command line's changes."""
    given = {name: request.config.getoption(f"--startup-{name}") for name, _, _ in OPTIONS}
    changes = {name.replace("-", "_"): value for name, value in given.items() if value is not None and name != "arms"}
    return dataclasses.replace(default_plan(changes.get("device")), **changes)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> CompileCaches:
    """Make the compile caches of this session."""
    return CompileCaches(Path(tmp_path_factory.mktemp("compile-caches")))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return device_of()


@pytest.fixture(scope="session")
def shown(request: pytest.FixtureRequest) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which printed text is shown at once, even without ``-s``: measuring takes minutes."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    return contextlib.nullcontext if capture is None else capture.global_and_fixture_disabled


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest, device: torch.device, shown: Any) -> Figures:
    """Return the figures of the module's `measure`, run once for all its benchmarks, and print its `render`."""
    with shown():
        found: Figures = request.module.measure(device)
        print(f"\n{request.module.render(found)}")
    return found


@pytest.fixture
def record_seconds(benchmark: Any, device: torch.device, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record seconds that were measured elsewhere as the benchmark's rounds.

    The module's first benchmark keeps all figures of the module, the others what they are given.
    """

    def record(seconds: Sequence[float], row: Figures) -> None:
        CLOCK.record(benchmark, seconds)
        whole = request.getfixturevalue("figures") if "figures" in request.fixturenames else {}
        first = request.config.stash.setdefault(_MODULES, {}).setdefault(request.module, request.node) is request.node
        graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
        benchmark.extra_info.update({"graphs": graphs} | (whole if first else {}) | row)

    return record


_MODULES = pytest.StashKey[dict[Any, pytest.Item]]()


@pytest.fixture
def keep_untimed(request: pytest.FixtureRequest) -> Callable[[str, Figures], None]:
    """Add figures that are not times to the JSON, next to the benchmarks."""
    return request.config.stash.setdefault(_UNTIMED, {}).__setitem__
