"""``python -m bench.startup.merge OUT FILE [FILE ...]``: merges the rounds of several ``pytest bench/startup``.

The files are those of ``--benchmark-json``, of one commit and one kind of GPU. Statistics are pytest-benchmark's own
over all rounds, in their order. It prints the table of `python -m bench` over them. As bench/results/h200_startup.json,
OUT becomes a table of docs/figures.md by `python -m docs.tools`.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.startup import table
from bench.startup.runs import Result, comparison
from bench.startup.starts import SECOND, joined
from bench.tools.files import save_figures

Call = dict[str, Any]

MACHINE = ("gpu", "torch", "cuda", "python", "commit", "versions", "kernels")
SHAPE = ("model", "layers", "parameters", "dtype", "device", "sizes", "context", "lm_head", "attention", "preloaded")


class DoNotBelongTogether(ValueError):
    """Calls whose rounds are no rounds of one benchmark; the message says what differs."""


def main(arguments: list[str] | None = None) -> int:
    """Merge, print and write; files that do not belong together are refused."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup.merge", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the file that is written")
    parser.add_argument("files", type=_call, nargs="+", metavar="FILE", help="written by --benchmark-json")
    options = parser.parse_args(arguments)
    names, calls = zip(*options.files, strict=True)
    try:
        found = merged(calls, names)
    except DoNotBelongTogether as error:
        parser.error(str(error))
    print(table.render(results_of(found)))
    save_figures(options.out, found, found["machine_info"])
    rounds = ", ".join(f"{one['param']} {one['stats']['rounds']}" for one in found["benchmarks"])
    print(f"\n{options.out}: rounds of {len(calls)} calls: {rounds}")
    return 0


def _call(text: str) -> tuple[str, Call]:
    """Read a file that pytest-benchmark wrote."""
    try:
        found = json.loads(Path(text).read_text(encoding="utf-8"))
        if all("processes" in one["extra_info"] for one in found["benchmarks"]):
            return Path(text).name, found
    except (OSError, ValueError, KeyError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no file that pytest-benchmark wrote of bench/startup")


def results_of(call: Call) -> dict[str, Result]:
    """Return the results of a file as `python -m bench` has them: of the first starts, which hold the second ones."""
    infos = [one["extra_info"] for one in call["benchmarks"] if one["params"]["start"] != SECOND]
    return {info["label"]: info for info in infos}


def merged(calls: Sequence[Call], names: Sequence[str] = ()) -> Call:
    """Merge calls into one.

    Args:
        calls: as pytest-benchmark writes them.
        names: of their files, for the error; their numbers by default.

    Raises:
        DoNotBelongTogether: they are of several commits, kinds of GPU, versions or shapes.
    """
    names = names or [str(number) for number in range(len(calls))]
    _check("", MACHINE, [_of_the_kind(call["machine_info"]) for call in calls], names)
    found = copy.copy(calls[0])
    starts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, call in zip(names, calls, strict=True):
        for one in call["benchmarks"]:
            starts.setdefault(one["fullname"], []).append((name, one))
    found["benchmarks"] = [_joined(*zip(*same, strict=True)) for same in starts.values()]
    found["calls"] = [{"datetime": call["datetime"], **_host(call["machine_info"])} for call in calls]
    found["comparison"] = comparison(results_of(found))
    found["commit_info"] = commit_info(str(found["machine_info"].get("commit", "unknown")))
    return found


def commit_info(commit: str) -> dict[str, Any]:
    """Return what pytest-benchmark says of a commit, for a host whose git has another one, or none."""
    number, modified = commit.partition(" ")[::2]
    return {"id": number, "dirty": bool(modified)}


def _host(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: machine.get(key) for key in ("node", "cores", "gpu")}


def _of_the_kind(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {**machine, "gpu": (machine.get("gpu") or {}).get("name")}  # hosts of one kind may differ in the driver


def _joined(names: Sequence[str], same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    from pytest_benchmark.stats import Stats

    infos = [one["extra_info"] for one in same]
    _check(f"{same[0]['name']}, ", SHAPE, infos, names)
    stats = Stats()
    for one in same:
        for seconds in one["stats"]["data"]:
            stats.update(seconds)
    over_all = {**stats.as_dict(), "data": stats.data, "iterations": 1}
    return {**same[0], "extra_info": joined(infos), "stats": over_all}


def _check(what: str, keys: Sequence[str], found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for name, one in zip(names, found, strict=True):
        for key in keys:
            if one.get(key) != found[0].get(key):
                raise DoNotBelongTogether(f"{what}{key}: {found[0].get(key)} in {names[0]}, {one.get(key)} in {name}")


if __name__ == "__main__":
    sys.exit(main())
