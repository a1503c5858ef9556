"""Starts Triton beside other work: what its first kernel waits for, besides its own compilation. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class _Once:
    """Runs a function once in a process. Others that call it meanwhile wait; errors are for Triton to raise itself."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._done = False

    def __call__(self) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                with contextlib.suppress(Exception):
                    self._run()


def import_triton(module: str) -> Any:
    """Import Triton, then one of its modules, which import each other in circles.

    Threads that begin with different ones wait for each other, and Python ends that by an ImportError in one of them.

    Raises:
        ImportError: it is not installed, in a `ModuleNotFoundError` that names "triton", or cannot be imported.
    """
    importlib.import_module("triton")
    return importlib.import_module(f"triton.{module}")


def _build_driver() -> None:
    """Compile Triton's driver, a module in C that its start finds in its cache then."""
    import_triton("backends.nvidia.driver").CudaUtils()


def _read_compiler() -> None:
    """Compute Triton's part of its cache's keys, for which it reads all of itself, hundreds of megabytes."""
    try:
        keys = import_triton("runtime.cache").triton_key  # since 3.6
    except AttributeError:
        keys = import_triton("compiler.compiler").triton_key
    keys()


build_driver, read_compiler = _Once(_build_driver), _Once(_read_compiler)


@contextlib.contextmanager
def triton_starts() -> Iterator[None]:
    """Start Triton in two threads beside what runs in this context; both have ended when it ends."""
    with ThreadPoolExecutor(2, thread_name_prefix="simplegraph-triton") as threads:
        with contextlib.suppress(RuntimeError):  # no thread can be started: Triton does this where it needs it
            for part in (build_driver, read_compiler):
                threads.submit(part)
        yield
