"""Options and the machine's description for ``pytest bench/``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
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
from bench.tools.measure import Figures, device_of
from bench.tools.options import chosen, numbers

# Option, environment variable, how its text is read, help.
OPTIONS = (
    ("rounds", int, "processes per arm that compiles nothing"),
    ("compiled-rounds", int, "processes per arm that compiles"),
    ("model", str, "tiny, 8b, 70b, or a folder with a config.json"),
    ("sizes", numbers, "batch sizes, such as 1,2,4"),
    ("device", str, "cuda or cpu"),
    ("timeout", float, "seconds a process may take"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("startup benchmark")
    for name, _, help_text in OPTIONS:
        variable = _variable(name)
        group.addoption(f"--startup-{name}", default=os.environ.get(variable), help=f"{help_text} [{variable}]")
    group.addoption("--startup-arms", default=os.environ.get(_variable("arms")), help=f"of {','.join(ARMS)}")


def _variable(name: str) -> str:
    return f"BENCH_{name.upper().replace('-', '_')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        arms = metafunc.config.getoption("--startup-arms")
        chosen = runs.runs_of(arms.split(",") if arms else ALONE)
        metafunc.parametrize("run", chosen, ids=[run.label for run in chosen])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The processes have a time limit of their own."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """GPU, driver, torch, commit and libraries beside what pytest-benchmark notes itself."""
    machine_info.update(environment.describe())


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """The ratios the library is judged by, once for the whole file."""
    if _ledger(config):
        output_json["comparison"] = comparison(_ledger(config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _ledger(config):
        terminalreporter.section("startup")
        terminalreporter.write_line(table.render(_ledger(config)))


_LEDGER = pytest.StashKey[dict[str, Result]]()


def _ledger(config: pytest.Config) -> dict[str, Result]:
    return config.stash.setdefault(_LEDGER, {})


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> dict[str, Result]:
    """Results so far, by label."""
    return _ledger(request.config)


@pytest.fixture(scope="session")
def plan(request: pytest.FixtureRequest) -> runs.StartupPlan:
    """This machine's plan with the command line's changes."""
    given = {name: request.config.getoption(f"--startup-{name}") for name, _, _ in OPTIONS}
    read = {name: reader for name, reader, _ in OPTIONS}
    changes = {name.replace("-", "_"): read[name](text) for name, text in given.items() if text is not None}
    return dataclasses.replace(default_plan(changes.get("device")), **changes)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> CompileCaches:
    """The compile caches of this session."""
    return CompileCaches(Path(tmp_path_factory.mktemp("compile-caches")))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one."""
    return device_of()


@pytest.fixture
def record(benchmark: Any, device: torch.device) -> Callable[..., Figures]:
    """Measure once, keep every figure with the benchmark, and print them as a table."""

    def record(measure: Callable[[], Figures], render: Callable[[Figures], str]) -> Figures:
        figures: Figures = benchmark.pedantic(measure, rounds=1)
        graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
        benchmark.extra_info.update(figures | {"graphs": graphs})
        print(render(figures))
        return figures

    return record


@pytest.fixture
def record_chosen(record: Callable[..., Figures], device: torch.device) -> Callable[..., None]:
    """Record a module's figures of what the environment chooses; what had to work must have worked."""

    def record_chosen(module: Any, *, models: str, arms: str) -> None:
        changes = chosen(models=models, arms=arms, processes="BENCH_PROCESSES")
        plan = dataclasses.replace(module.default_plan(device), **changes)
        figures = record(lambda: module.measure(plan, device), module.render)
        assert not module.failures(figures)

    return record_chosen
