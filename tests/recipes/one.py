"""Run one recipe in this process, as `python RECIPE` does, and write how long its calls take."""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pathlib
import re
import runpy
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

CALLS, LEAST, SECONDS = 50, 5, 10.0  # calls that are timed: fewer where they take longer than that


def declare_torchvision() -> torch.library.Library | None:
    """Declare torchvision's own operators where its wheels, built for GPUs, cannot load them.

    torchvision is not imported without them. Calling one still fails.
    """
    found = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or found is None or found.origin is None:
        return None
    text = (pathlib.Path(found.origin).parent / "_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(
        {"nms", *re.findall(r'register_meta\("(\w+)"', text), *re.findall(r'"torchvision::(\w+)"', text)}
    ):
        library.define(f"{name}(Tensor x) -> Tensor")
    return library


def can_import(package: str) -> bool:
    """True if a package is installed and loads; one of another torch, or without its libraries, does not."""
    try:
        importlib.import_module(package)
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        return False
    return True


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds mocks for packages that are imported, but not called: of sound files, videos, tables.

    Installed packages are not mocked, since others that are installed may need them, as scikit-learn needs SciPy.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        found = name.split(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return mock.MagicMock(spec=None, __path__=[], __version__="0")

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: a mock answers everything."""


def waited(call: Callable[[], object]) -> float:
    """Return ms of one call and of the wait for its answer: the median of some."""
    times: list[float] = []
    while len(times) < CALLS and not (len(times) >= LEAST and sum(times) > 1e3 * SECONDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[len(times) // 5 :])


def main() -> None:
    """Run the recipe's `main`, which compares, and time what it returns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=pathlib.Path)
    parser.add_argument("times", type=pathlib.Path)
    parser.add_argument("--absent", nargs="*", default=[], metavar="PACKAGE")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    sys.meta_path.insert(0, Absent([package for package in options.absent if not can_import(package)]))
    kept = declare_torchvision()
    calls = runpy.run_path(str(options.recipe))["main"]()
    times = {kind: waited(call) for kind, call in calls.items()} if options.time else {}
    options.times.write_text(json.dumps(times), encoding="utf-8")
    del kept


if __name__ == "__main__":
    main()
