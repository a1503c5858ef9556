"""``python -m bench.serve.http_load``: minutes of load on ``python -m bench.serve --http`` by locust, and what it left.

Callers ask, read streams, leave early and misbehave (`bench.serve.locustfile`). Fails if the server ends, an answer's
tokens are not ``bench.generate``'s, a request is neither answered nor refused, or tasks, pages or memory grow.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench.tools.files import OUT, save_figures
from bench.tools.measure import Figures, say
from bench.tools.options import add_json, count, positive

GAUGES = ("in_flight", "free_pages", "tasks")
MODEL = "bench/data/eagle/target"
_GROWTH_MIB = 32  # of the second half of the load: allocators and counters settle


def main(arguments: list[str] | None = None) -> int:
    """Run the load; return 1 if something was lost or grew."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.http_load", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=10.0)
    parser.add_argument("--callers", type=count, default=24, help="more than --most, so that some are refused")
    parser.add_argument("--most", type=count, default=16, help="requests that the server lets in at once")
    parser.add_argument("--port", type=count, default=8765)
    add_json(parser, OUT / "http_load.json")
    options = parser.parse_args(arguments)
    address = f"127.0.0.1:{options.port}"
    command = [sys.executable, "-m", "bench.serve", "--http", address, "--model", MODEL, "--most", str(options.most)]
    with subprocess.Popen(command) as server:
        try:
            figures = _loaded(server, f"http://{address}", options)
        finally:
            server.terminate()
    save_figures(options.json, {"load": vars(options) | {"json": None}, "results": figures})
    for problem in figures["problems"]:
        print(f"python -m bench.serve.http_load: {problem}", file=sys.stderr)
    return int(bool(figures["problems"]))


def _loaded(server: subprocess.Popen[bytes], url: str, options: argparse.Namespace) -> Figures:
    while server.poll() is None and not _answers(url):
        time.sleep(0.2)
    idle = _sample(server, url)
    load = [
        "locust",
        "-f",
        str(Path(__file__).with_name("locustfile.py")),
        "--headless",
        "--host",
        url,
        "--only-summary",
    ]
    load += ["-u", str(options.callers), "-r", "8", "-t", f"{int(options.minutes * 60)}s", "--stop-timeout", "20"]
    samples = []
    with subprocess.Popen(
        [sys.executable, "-m", *load], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as locust:
        while locust.poll() is None and server.poll() is None:
            samples.append(_sample(server, url))
            say(f"http_load: {samples[-1]}")
            time.sleep(min(10.0, options.minutes * 6))
        printed = locust.communicate()[0]
    print(printed)
    if server.poll() is not None:
        return {"problems": [f"the server ended with {server.returncode}"], "samples": samples}
    time.sleep(2)
    after = _sample(server, url)
    middle = samples[len(samples) // 2]
    problems = [
        f"{name}: {idle[name]} before the load, {after[name]} after it" for name in GAUGES if idle[name] != after[name]
    ]
    if after["memory_mib"] > middle["memory_mib"] + _GROWTH_MIB:
        problems.append(f"memory: {middle['memory_mib']:.0f} MiB half-way, {after['memory_mib']:.0f} at the end")
    if locust.returncode:
        problems.append(f"locust ended with {locust.returncode}: requests failed, see its table")
    return {"problems": problems, "before": idle, "after": after, "samples": samples, "locust": printed.splitlines()}


def _answers(url: str) -> bool:
    try:
        return bool(_get(f"{url}/health"))
    except urllib.error.URLError:
        return False


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def _sample(server: subprocess.Popen[bytes], url: str) -> Figures:
    """Read the server's gauges, and its resident memory."""
    metrics = _get(f"{url}/metrics")
    status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
    found = {name: float(re.search(rf"^bench_{name} (\S+)", metrics, re.MULTILINE)[1]) for name in GAUGES}  # type: ignore[index]
    return found | {"memory_mib": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024}  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
