"""``python -m bench.serve.http_load``: minutes of load on ``python -m bench.serve --http`` by locust, and what it left.

Callers ask, read streams, leave early and misbehave (`bench.serve.locustfile`). Fails if the server ends or does not
obey SIGTERM, an answer's tokens are not ``bench.generate``'s, with and without seeds, a request is neither answered nor
refused, or tasks, pages or memory grow.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench.tools.files import OUT, save_figures
from bench.tools.measure import Figures, say
from bench.tools.options import Options, command_line, count, json_file, positive

FLAT = ("in_flight", "free_pages", "tasks")  # the same after the load as before
TOTALS = ("accepted", "answered", "cancelled")
# Of callers, as the locustfile names them.
KINDS = ("/v1/completions", "seeded", "extreme", "stream", "left early", "bad", "no HTTP", "half open")
MODEL = "bench/data/eagle/target"
_SETTLE = 40  # seconds after the load: half-open requests are closed by then
_PATIENCE = 60  # seconds, for the server's end
_GROWTH_MIB = 32  # of the second half of the load: allocators and counters settle


OPTIONS: Options = {
    "--minutes": {"type": positive, "default": 10.0},
    "--callers": {"type": count, "default": 24, "help": "more than --most, so that some are refused"},
    "--most": {"type": count, "default": 16, "help": "requests that the server lets in at once"},
    "--port": {"type": count, "default": 8765},
    **json_file(OUT / "http_load.json"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the load; return 1 if something was lost or grew."""
    options = command_line("bench.serve.http_load", __doc__, OPTIONS).parse_args(arguments)
    address = f"127.0.0.1:{options.port}"
    command = [sys.executable, "-m", "bench.serve", "--http", address, "--model", MODEL, "--most", str(options.most)]
    with subprocess.Popen(command) as server:
        try:
            figures = _loaded(server, f"http://{address}", options)
        finally:
            ended = _ended(server)
    if not ended:
        figures["problems"].append(f"the server has not ended {_PATIENCE} s after SIGTERM")
    save_figures(options.json, {"load": vars(options) | {"json": None}, "results": figures})
    for problem in figures["problems"]:
        print(f"python -m bench.serve.http_load: {problem}", file=sys.stderr)
    return int(bool(figures["problems"]))


def _loaded(server: subprocess.Popen[bytes], url: str, options: argparse.Namespace) -> Figures:
    while server.poll() is None and not _answers(url):
        time.sleep(0.2)
    idle, samples = _sample(server, url), []
    load = ["-f", str(Path(__file__).with_name("locustfile.py")), "--host", url, "--headless", "--json"]
    load += ["-u", str(options.callers), "-r", "8", "-t", f"{int(options.minutes * 60)}s", "--stop-timeout", "20"]
    with tempfile.TemporaryFile("w+") as printed:  # not a pipe, which would be full before it is read
        with subprocess.Popen([sys.executable, "-m", "locust", *load, "-L", "WARNING"], stdout=printed) as locust:
            while locust.poll() is None and server.poll() is None:
                samples.append(_sample(server, url))
                say(f"http_load: {samples[-1]}")
                time.sleep(min(10.0, options.minutes * 6))
        printed.seek(0)
        rows = json.loads(printed.read() or "[]")
    callers = {row["name"]: {"requests": row["num_requests"], "failures": row["num_failures"]} for row in rows}
    for name, counts in callers.items():
        print(f"{name:16} {counts['requests']:>7} requests, {counts['failures']} failures")
    if server.poll() is not None:
        return {"problems": [f"the server ended with {server.returncode}"], "samples": samples, "callers": callers}
    after, middle, end = _sample(server, url), samples[len(samples) // 2], time.monotonic() + _SETTLE
    while any(idle[name] != after[name] for name in FLAT) and time.monotonic() < end:
        time.sleep(1)
        after = _sample(server, url)
    print(f"before {idle}\nafter  {after}")
    statuses = dict(re.findall(r'^bench_answers_total{status="(\d+)"} (\d+)', _get(f"{url}/metrics"), re.MULTILINE))
    problems = [
        f"{name}: {idle[name]} before the load, {after[name]} after it" for name in FLAT if idle[name] != after[name]
    ]
    problems += [f"{name}: no caller was served" for name in KINDS if not callers.get(name, {}).get("requests")]
    if after["accepted"] != after["answered"] + after["cancelled"] or not after["cancelled"]:
        problems.append(f"of {after['accepted']} requests {after['answered']} and {after['cancelled']} ended")
    if after["memory_mib"] > middle["memory_mib"] + _GROWTH_MIB:
        problems.append(f"memory: {middle['memory_mib']:.0f} MiB half-way, {after['memory_mib']:.0f} at the end")
    if locust.returncode:
        problems.append(f"locust ended with {locust.returncode}: requests failed, see what it printed")
    figures = {"problems": problems, "callers": callers, "statuses": {key: int(n) for key, n in statuses.items()}}
    return figures | {"before": idle, "after": after, "samples": samples}


def _ended(server: subprocess.Popen[bytes]) -> bool:
    """End the server by SIGTERM; True if it obeys."""
    server.terminate()
    try:
        server.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        return False
    return True


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
    found = {name: float(re.search(rf"^bench_{name} (\S+)", metrics, re.MULTILINE)[1]) for name in (*FLAT, *TOTALS)}  # type: ignore[index]
    return found | {"memory_mib": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024}  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
