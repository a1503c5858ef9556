"""The starts that ``pytest bench/startup`` measures: their names, their figures, and the clock of their rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.arms import load_arm
from bench.arms.base import NotAvailable
from bench.startup.runs import Result, Run, StartupPlan, combine, medians
from bench.tools.measure import Figures, device_of

FIRST, SECOND = "first", "second"
CLOCK_SAYS = (
    "seconds from the built model until every size is ready, by time.perf_counter in the process that started it, "
    "the device synchronised at both ends"
)


class ReportedSeconds:
    """A timer for pytest-benchmark that moves only by the seconds that processes report.

    A round lasts as long as its process measured: launching it, imports and weights are left out.
    """

    __name__ = "seconds_of_processes"  # how pytest-benchmark calls it in the JSON

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Move on by what a process measured."""
        self._seconds += seconds


CLOCK = ReportedSeconds()


class Start(NamedTuple):
    """One start of a run's processes: the first, with a cold or a warm cache for arms that compile, or the second."""

    run: Run
    name: str


def starts_of(runs: Iterable[Run]) -> Iterator[Start]:
    """Yield every start of some runs; a second one is another figure of the same processes."""
    for run in runs:
        yield Start(run, run.cache or FIRST)
        if run.cache is None and load_arm(run.arm).restartable:
            yield Start(run, SECOND)


def reported(start: Start, result: Result) -> Result:
    """Return what a process reported of a start.

    Raises:
        NotAvailable: the arm cannot run here.
        RuntimeError: the process failed.
    """
    if result["status"] == "not available":
        raise NotAvailable(result["error"])
    if result["status"] != "ok":
        raise RuntimeError(result["error"])
    if start.name != SECOND:
        return result
    return {key: value for key, value in result.items() if key != "primed"} | result["primed"]


def extra_info(start: Start, results: Sequence[Result]) -> Figures:
    """Return the figures of a start over its processes: medians as `python -m bench` has them, and each process's."""
    named = {"label": start.run.label, "start": start.name, "clock": CLOCK_SAYS}
    return combine(results) | named | {"processes": [{"pid": one["pid"], **floats(one)} for one in results]}


def joined(infos: Sequence[Figures]) -> Figures:
    """Return the figures of one start over the processes of several calls; what is no float is the first call's."""
    processes = [process for info in infos for process in info["processes"]]
    rounds = [seconds for info in infos for seconds in info["rounds"]]
    over_all = overlaid(infos[0], medians([floats(process) for process in processes]))
    return over_all | {"rounds": rounds, "processes": processes}


def floats(figures: Figures) -> Figures:
    """Return what differs from process to process: the floats, nested as they are."""
    nested = {name: floats(value) for name, value in figures.items() if isinstance(value, dict)}
    own = {name: value for name, value in figures.items() if isinstance(value, float)}
    return own | {name: value for name, value in nested.items() if value}


def overlaid(figures: Figures, others: Figures) -> Figures:
    """Return figures with others in the place of those of the same names, at any depth."""
    found: dict[str, Any] = dict(figures)
    for name, value in others.items():
        found[name] = overlaid(found.get(name, {}), value) if isinstance(value, dict) else value
    return found


def group(start: Start, plan: StartupPlan) -> str:
    """Name the starts that may be compared with this one: first or second ones, of one shape on one kind of device."""
    kind = SECOND if start.name == SECOND else FIRST
    where = "cuda" if device_of(plan.device).type == "cuda" else "emulator, no speed"
    return f"{kind} start: {plan.model}, {len(plan.sizes)} sizes, {where}"
