"""The options of ``pytest bench/startup``, those of `python -m bench`, and what its JSON says of the machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bench.startup import merge
from bench.startup.__main__ import OPTIONS, plan_of, runs_of
from bench.startup.runs import CompileCaches, Processes, StartupPlan
from bench.startup.starts import starts_of
from bench.tools import environment, fresh
from bench.tools.measure import NOT_SPEED, device_of
from simplegraph.base.errors import install_command

# pytest-benchmark writes the JSON, pytest-timeout has an option of that name, and torchrun starts no pytest.
LEFT_OUT = ("--json", "--timeout", "--tp")
DESCRIBE_SECONDS = 120.0
PLAN = pytest.StashKey[StartupPlan]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    group = parser.getgroup("startup", "startup benchmarks")
    for name, settings in OPTIONS.items():
        if name not in LEFT_OUT:
            group.addoption(name, **settings)
    if not pluginmanager.hasplugin("benchmark"):
        group.addoption("--benchmark-only", action="store_true", help=_missing())


def _missing() -> str:
    return f"needs pytest-benchmark: {install_command('bench')}"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PLAN] = plan_of(_options(config))
    if not config.pluginmanager.hasplugin("benchmark"):
        config.addinivalue_line("markers", f"benchmark: {_missing()}")


def _options(config: pytest.Config) -> argparse.Namespace:
    """Return the options as `python -m bench` parses them; all are unset where pytest was given a folder above."""
    names = [name.removeprefix("--").replace("-", "_") for name in OPTIONS if name not in LEFT_OUT]
    return argparse.Namespace(tp=1, **{name: config.getoption(name, None) for name in names})


def pytest_report_header(config: pytest.Config) -> str:
    plan = config.stash[PLAN]
    heading = f"startup: {plan.model}, {len(plan.sizes)} sizes"
    return heading if device_of(plan.device).type == "cuda" else f"{heading}. {NOT_SPEED}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"arm", "start"} <= set(metafunc.fixturenames):
        found = [(start.run.arm, start.name) for start in starts_of(runs_of(_options(metafunc.config)))]
        metafunc.parametrize(("arm", "start"), found)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip without pytest-benchmark; else give a benchmark the time that all of its processes may take."""
    plan = config.stash[PLAN]
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if not config.pluginmanager.hasplugin("benchmark"):
            item.add_marker(pytest.mark.skip(reason=_missing()))
        elif config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(plan.timeout * (max(plan.rounds, plan.compiled_rounds) + 1)))


@pytest.fixture(scope="session")
def processes(pytestconfig: pytest.Config) -> Iterator[Processes]:
    """The processes of all benchmarks, each measured once."""
    plan = pytestconfig.stash[PLAN]
    fresh.preload(device_of(plan.device).type, "bench.startup.runs")
    with TemporaryDirectory(prefix="compile-caches-") as folder:
        yield Processes(plan, CompileCaches(Path(folder)))
    fresh.stop_server()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Add GPU, versions and commit, from a fresh process: this one starts no CUDA beside those that measure."""
    machine_info.update(fresh.call(environment.describe, seconds=DESCRIBE_SECONDS))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    """Name the commit that is measured, where BENCH_COMMIT names it since git does not know."""
    commit_info.update(merge.commit_info(environment.commit()))
