"""Runs measurements in fresh processes, with given compile caches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.tools.environment import ROOT
from bench.tools.measure import Figures

ERROR_LINES = 15
POLL_SECONDS = 0.2


class CompileCaches:
    """Folders for compile caches: a new one for each cold run; a warm run uses that of its arm's last cold run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._filled: dict[str, Path] = {}

    def folder(self, arm: str, cache: str | None) -> Path:
        """Return the folder of the compile caches of this arm's process.

        Raises:
            RuntimeError: a warm run comes before its cold one.
        """
        if cache != "warm":
            self._filled[arm] = Path(tempfile.mkdtemp(prefix=f"{arm}-", dir=self._root))
        if arm not in self._filled:
            raise RuntimeError(f"{arm} (warm) needs the cache of {arm} (cold), which has not run.")
        return self._filled[arm]


def cache_environment(folder: Path) -> dict[str, str]:
    """Return the process environment with all of torch's compile caches enabled, in this folder only."""
    switches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    return {**os.environ, **switches}


def run_worker(line: list[str], environment: dict[str, str], timeout: float) -> Figures:
    """Run a worker, showing its stderr as it comes; return the figures that it writes to its ``--json`` file.

    Its stderr goes through a file, not a pipe: compilers leave processes behind that would hold a pipe open.

    Raises:
        RuntimeError: the worker wrote no figures, or took too long.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "stderr"
        with log.open("w") as written, log.open(errors="replace") as read:
            line = [*line, "--json", str(out)]
            process = subprocess.Popen(line, stderr=written, env=environment, start_new_session=True)
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                    sys.stderr.write(read.read())
            finally:
                late = process.poll() is None
                if late:
                    os.killpg(process.pid, signal.SIGKILL)
            sys.stderr.write(read.read())
        if out.is_file() and not late:
            figures: Figures = json.loads(out.read_text())
            return figures
        tail = "\n".join(log.read_text().splitlines()[-ERROR_LINES:])
    if late:
        raise RuntimeError(f"no result within {timeout:.0f} s; last lines:\n{tail}")
    raise RuntimeError(f"the process ended with status {process.wait()} and no result:\n{tail}")
