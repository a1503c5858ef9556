"""Run the sweeps: ``python -m tests.sweeps --device cuda --workers 8 --seconds 240 --out results.json``.

Every entry of torch's databases of operators and modules goes through `simplegraph.wrap` and through eager; this needs
``expecttest``. Counts are printed as a table, and written as JSON with every defect, after each entry; files of several
chunks are put together by ``--merge``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

import torch

from tests.sweeps import entries
from tests.sweeps.counts import add, counted, merged, not_reached, table, write
from tests.sweeps.sweep import MODES, Verdict, sweep

KINDS = {
    "operators": entries.operators,
    "in_place": functools.partial(entries.operators, in_place=True),
    "modules": entries.modules,
}
SAY_EVERY = 10.0  # seconds
GRACE = 60.0  # seconds to begin, and to end the entry under way


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sweeps", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of entries (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=0, help="at most so many of an entry, evenly spread; 0 for all")
    parser.add_argument("--only", default="", help="entries whose name holds this")
    parser.add_argument("--chunk", default="1/1", help="i/n: every n-th entry from the i-th on")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a part of the chunk")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no entry after so many")
    parser.add_argument("--out", type=pathlib.Path, help="write the counts there, as JSON, and a table beside")
    parser.add_argument("--merge", nargs="+", type=pathlib.Path, metavar="FILE", help="put chunks' files together")
    parser.add_argument("--crashed", type=int, help="go on with --out behind the entry that ended a process so")
    parser.add_argument("--quiet", action="store_true", help="print no table")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Sweep what the options name, in this process; return the counts by kind and mode."""
    device, started = torch.device(options.device), time.perf_counter()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)
    index, count = map(int, options.chunk.split("/"))
    kinds = {kind: [e for e in KINDS[kind]() if options.only in e.name] for kind in options.kinds.split(",")}
    modes = options.modes.split(",")  # inside, so that what there is no time for is the same in each
    work = [(kind, entry, mode) for kind, all_ in kinds.items() for entry in all_[index - 1 :: count] for mode in modes]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (emulator)"
    counts = {"torch": torch.__version__, "device": name, "seconds": 0, "done": 0, "of": len(work), "results": []}
    if options.crashed is not None:
        counts = json.loads(options.out.read_text(encoding="utf-8"))
        for kind, entry, mode in work[counts["done"] :][:1]:
            verdict = Verdict(entry.name, defects={"process": f"ended as {options.crashed}"})
            _count(counts, counted(kind, mode, verdict))
    if options.out:
        write(counts, options.out)
    before, said = counts["seconds"], started
    for kind, entry, mode in work[counts["done"] :]:
        now = time.perf_counter()
        if now - said > SAY_EVERY:
            print(f"chunk {options.chunk}: {counts['done']} of {len(work)}, {now - started:.0f} s", flush=True)
            said = now
        late = now - started > options.seconds
        _count(counts, not_reached(kind, mode) if late else _swept(kind, entry, mode, device, options.samples))
        counts["seconds"] = before + round(time.perf_counter() - started)
        if options.out and not late:
            write(counts, options.out)
    return counts


def _count(counts: dict[str, Any], more: dict[str, Any]) -> None:
    add(counts["results"], more)
    counts["done"] += 1


def _swept(kind: str, entry: entries.Entry, mode: str, device: torch.device, samples: int) -> dict[str, Any]:
    result = counted(kind, mode, sweep(entry, mode, device, samples))
    for name, defects in result["defects"].items():
        print(f"{kind}, {mode}, {name}: {next(iter(defects.values()))}", flush=True)
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # nothing runs in this process any more
            print(f"{kind}, {mode}, {entry.name}: {error}", flush=True)
            os._exit(3)
    return result


def fan_out(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Sweep in several processes, and begin another one behind an entry that ends its process or never ends."""
    started, end = time.perf_counter(), time.perf_counter() + options.seconds
    index, count = map(int, options.chunk.split("/"))
    chunks = [f"{index + place * count}/{count * options.workers}" for place in range(options.workers)]
    files = {chunk: folder / f"{chunk.replace('/', '-')}.json" for chunk in chunks}
    running = {chunk: _started(options, chunk, files[chunk], options.seconds) for chunk in chunks}
    killed: set[str] = set()
    while running:
        time.sleep(0.2)
        for chunk, process in list(running.items()):
            code = process.poll()
            if code is None:
                if time.perf_counter() > end + GRACE and chunk not in killed:
                    killed.add(chunk)
                    process.kill()
                continue
            del running[chunk]
            if code not in (0, 1):
                print(f"chunk {chunk}: the process ended as {code}", flush=True)
                if files[chunk].exists():
                    running[chunk] = _started(options, chunk, files[chunk], end - time.perf_counter(), code)
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in files.values() if path.exists()]
        if options.out and parts:
            write(merged(parts), options.out)
    if len(parts) < len(chunks):
        raise SystemExit(f"{len(chunks) - len(parts)} of {len(chunks)} processes ended before their first entry did.")
    return merged(parts) | {"seconds": round(time.perf_counter() - started)}


def _started(
    options: argparse.Namespace, chunk: str, out: pathlib.Path, seconds: float, crashed: int | None = None
) -> subprocess.Popen[bytes]:
    named = {name: getattr(options, name) for name in ("device", "kinds", "modes", "samples", "only")}
    named |= {"chunk": chunk, "out": out, "seconds": seconds}
    named |= {} if crashed is None else {"crashed": crashed}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sweeps", "--quiet", *(f"--{name}={value}" for name, value in named.items())]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep or merge; 1 if anything differs from eager without a reason."""
    options = parsed(argv)
    if options.merge:
        counts = merged(json.loads(path.read_text(encoding="utf-8")) for path in options.merge)
    elif options.workers > 1:
        with tempfile.TemporaryDirectory() as folder:
            counts = fan_out(options, pathlib.Path(folder))
    else:
        counts = run(options)
    if options.out:
        write(counts, options.out)
    defects = {name: found for result in counts["results"] for name, found in result["defects"].items()}
    if not options.quiet:
        print(table(counts))
        for name, found in defects.items():
            print(f"{name}: {next(iter(found.values()))}")
        if options.out:
            options.out.with_suffix(".md").write_text(table(counts), encoding="utf-8")
    missing = counts["of"] - counts["done"]
    if missing:
        print(f"{missing} of {counts['of']} entries were not tried: their process failed.", flush=True)
    return 1 if defects or missing else 0


if __name__ == "__main__":
    sys.exit(main())
