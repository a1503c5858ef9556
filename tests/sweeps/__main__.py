"""Run the sweeps: ``python -m tests.sweeps --device cuda --chunk 1/4 --out results.json``; needs ``expecttest``.

Every entry of torch's databases of operators and modules goes through `simplegraph.wrap` and through eager. Counts are
printed as a table, and written as JSON with every defect; several chunks' files are put together by ``--merge``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

import torch

from tests.sweeps import entries
from tests.sweeps.sweep import MODES, sweep

KINDS = {
    "operators": entries.operators,
    "in_place": functools.partial(entries.operators, in_place=True),
    "modules": entries.modules,
}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sweeps", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of entries (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=0, help="at most so many of an entry, evenly spread; 0 for all")
    parser.add_argument("--chunk", default="1/1", help="i/n: every n-th entry from the i-th on")
    parser.add_argument("--out", type=pathlib.Path, help="write the counts there, as JSON, and a table beside")
    parser.add_argument("--merge", nargs="+", type=pathlib.Path, metavar="FILE", help="put chunks' files together")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Sweep what the options name; the counts by kind and mode."""
    device, started = torch.device(options.device), time.perf_counter()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)
    index, count = map(int, options.chunk.split("/"))
    results = []
    for kind in options.kinds.split(","):
        chosen = KINDS[kind]()[index - 1 :: count]
        for mode in options.modes.split(","):
            results.append(counted(kind, mode, [sweep(entry, mode, device, options.samples) for entry in chosen]))
            print(f"{kind}, {mode}: {results[-1]['entries']}", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (emulator)"
    seconds = round(time.perf_counter() - started)
    return {"torch": torch.__version__, "device": name, "seconds": seconds, "results": results}


def counted(kind: str, mode: str, verdicts: Sequence[Any]) -> dict[str, Any]:
    """Counts of entries and samples, and the defects by entry."""
    reasons: collections.Counter[str] = collections.Counter()
    for verdict in verdicts:
        reasons.update(verdict.eager)
    numbers = [field.name for field in dataclasses.fields(verdicts[0]) if field.type == "int"] if verdicts else []
    return {
        "kind": kind,
        "mode": mode,
        "entries": dict(collections.Counter(verdict.kind for verdict in verdicts)),
        "samples": {name: sum(getattr(verdict, name) for verdict in verdicts) for name in numbers},
        "eager": dict(reasons),
        "defects": {verdict.name: _shown(verdict.defects) for verdict in verdicts if verdict.defects},
    }


def _shown(defects: dict[str, str]) -> dict[str, str]:
    """The first three of many."""
    return dict(list(defects.items())[:3])


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several chunks' counts as one."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for result in (result for part in parts for result in part["results"]):
        total = found.setdefault((result["kind"], result["mode"]), {"kind": result["kind"], "mode": result["mode"]})
        for name in ("entries", "samples", "eager"):
            total[name] = dict(collections.Counter(total.get(name, {})) + collections.Counter(result[name]))
        total["defects"] = total.get("defects", {}) | result["defects"]
    return parts[0] | {"seconds": sum(part["seconds"] for part in parts), "results": list(found.values())}


def table(counts: dict[str, Any]) -> str:
    """The counts as a table in Markdown: entries, then samples that ran eagerly by their reasons."""
    kinds = ("replayed", "eager", "raised", "unstable", "no sample", "defect")
    lines = [f"torch {counts['torch']}, {counts['device']}, {counts['seconds']} s", ""]
    lines += [f"| entries | mode | {' | '.join(kinds)} | samples replayed | to the bit | eager samples by reason |"]
    lines += ["|" + "---|" * (len(kinds) + 5)]
    for result in counts["results"]:
        entries_of, samples = result["entries"], result["samples"]
        reasons = sorted(result["eager"].items(), key=lambda item: -item[1])
        cells = [result["kind"], result["mode"], *(entries_of.get(kind, 0) for kind in kinds)]
        replayed = samples.get("replayed", 0)
        cells += [replayed, replayed - samples.get("rounded", 0)]
        cells += [", ".join(f"{reason} {count}" for reason, count in reasons)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    causes = collections.Counter(
        _cause(text) for result in counts["results"] for found in result["defects"].values() for text in found.values()
    )
    lines += ["", *(f"- {count} samples: {cause}" for cause, count in causes.most_common())]
    return "\n".join(lines) + "\n"


def _cause(defect: str) -> str:
    """A defect without its numbers, names and shapes."""
    text = re.sub(r"^call \d+: ", "", defect)
    text = re.sub(r" as \{.*", "", text)
    return re.sub(r"\([^)]*\)|\[[^\]]*\]|\d[\d.e+-]*", "..", text)[:90]


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep or merge; 1 if anything differs from eager without a reason."""
    options = parsed(argv)
    counts = merged([json.loads(path.read_text()) for path in options.merge]) if options.merge else run(options)
    if options.out:
        options.out.write_text(json.dumps(counts, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(counts))
    print(table(counts))
    defects = {name: found for result in counts["results"] for name, found in result["defects"].items()}
    for name, found in defects.items():
        print(f"{name}: {next(iter(found.values()))}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
