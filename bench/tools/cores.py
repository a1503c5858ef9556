"""Keeps the other cores of a machine busy, as its other work would."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time, or "max", and of the period
# Counts on one core until its parent is gone.
_SPIN = """
import os, sys
parent, core = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, {core})
print("ready", flush=True)
while os.getppid() == parent:
    for _ in range(1000000):
        pass
"""


def usable_cores() -> list[int]:
    """Return the cores that this process may use, as many as its quota lets it use at once."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, _QUOTA.read_text(encoding="ascii").split())
        return cores[: max(1, quota // period)]
    return cores


@contextlib.contextmanager
def busy_cores() -> Iterator[int]:
    """Keep all usable cores but the first busy, by a process each; yields their number."""
    command = [sys.executable, "-S", "-c", _SPIN, str(os.getpid())]
    others = [subprocess.Popen([*command, str(core)], stdout=subprocess.PIPE, text=True) for core in usable_cores()[1:]]
    try:
        for other in others:
            if other.stdout is None or other.stdout.readline() != "ready\n":
                raise RuntimeError(f"process {other.pid}, which keeps a core busy, did not start")
        yield len(others)
    finally:
        for other in others:
            other.kill()
            other.communicate()
