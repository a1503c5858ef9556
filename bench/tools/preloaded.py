"""Imports the modules that a benchmark's processes need, as far as they are installed, before they are forked."""

from __future__ import annotations

import contextlib
import importlib
import os

from tqdm.std import TRLock, tqdm

# Processes share tqdm's default lock, and benchmark processes, which are killed, leave it behind.
tqdm.set_lock(TRLock())
for module in filter(None, os.environ.get("BENCH_PRELOADED_MODULES", "").split(",")):
    # Not installed, or built for another torch: what needs it says so.
    with contextlib.suppress(Exception):
        importlib.import_module(module)
