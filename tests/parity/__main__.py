"""Verdicts of a device: ``python -m tests.parity --device cuda --json cuda.json``; ``--compare cpu.json cuda.json``.

Forwards of this folder and samples of torch's databases (which need ``expecttest``) go through `simplegraph.wrap`:
captured, or refused with a reason, and compared with their own eager. Findings are written after each forward; the same
command goes on where a run was cut, behind a forward that ended its process.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

import torch

from tests.parity.compare import differences, summary
from tests.parity.forwards import expected
from tests.parity.verdicts import Finding, all_forwards, find
from tests.sweeps.counts import write
from tests.sweeps.sweep import MODES

SAY_EVERY = 10.0  # seconds
MAX_DIFFERING = 0.02


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="no_grad", choices=MODES)
    parser.add_argument("--only", default="", help="named forwards, operators and modules whose name holds this")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no forward after so many")
    parser.add_argument("--json", type=pathlib.Path, help="write the findings there")
    parser.add_argument("--compare", nargs=2, type=pathlib.Path, metavar="FILE", help="compare two devices' findings")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Try the forwards that the options name and that the file has no finding of."""
    device, started = torch.device(options.device), time.perf_counter()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (emulator)"
    found: dict[str, Any] = {"torch": torch.__version__, "device": name, "mode": options.mode, "findings": []}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))
    if found.get("running"):
        found["findings"].append(vars(Finding(found["running"], "defect", differs="its process ended")))
    done, said = {each["name"] for each in found["findings"]}, started
    for name, entry in all_forwards(device, options.only):
        if name in done:
            continue
        if time.perf_counter() - started > options.seconds:
            print("the time is over; the same command goes on", flush=True)
            break
        if time.perf_counter() - said > SAY_EVERY:
            said = time.perf_counter()
            print(f"{len(found['findings'])} forwards, {said - started:.0f} s", flush=True)
        _save(found | {"running": name}, options.json)
        finding = find(name, entry, options.mode, device)
        if device.type == "cuda":
            torch.cuda.synchronize()  # what ends the device ends the process here, and the file names the forward
        found["findings"].append(dataclasses.asdict(finding))
        _say(finding)
    found.pop("running", None)
    found["seconds"] = found.get("seconds", 0) + round(time.perf_counter() - started)
    _save(found, options.json)
    return found


def _save(found: dict[str, Any], path: pathlib.Path | None) -> None:
    if path is not None:
        write(found, path)


def _say(finding: Finding) -> None:
    known = expected(finding.name)
    if known not in (None, finding.verdict):
        print(f"{finding.name}: {finding.verdict}, expected {known}; {finding.cause}", flush=True)
    if finding.verdict == "defect":
        print(f"{finding.name}: {finding.differs}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Find the verdicts, or compare; 1 if answers are wrong, named verdicts unexpected or too many differ."""
    options = parsed(argv)
    if options.compare:
        first, second = (json.loads(path.read_text(encoding="utf-8")) for path in options.compare)
        print(summary(first, second))
        count, other, wrong = differences(first, second)
        return 1 if wrong or len(other) > MAX_DIFFERING * count else 0
    found = run(options)
    findings = found["findings"]
    print(f"{len(findings)} forwards: {dict(collections.Counter(each['verdict'] for each in findings))}")
    unexpected = [each for each in findings if expected(each["name"]) not in (None, each["verdict"])]
    return 1 if unexpected or any(each["verdict"] == "defect" for each in findings) else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a device that broke would end the interpreter otherwise
