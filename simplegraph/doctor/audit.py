"""`audit`: reads all graphs that any code of this process captures, and checks their memory at replays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from simplegraph.base.errors import ConfigError
from simplegraph.device.kernel_names import readable
from simplegraph.doctor.attach import CaptureReading, graph_source
from simplegraph.doctor.owners import Blocks, MemoryOwner, MemorySurvey, State, Use, credible, judge
from simplegraph.manager.stats import counted

logger = logging.getLogger("simplegraph")

VARIABLE, EVERY = "SIMPLEGRAPH_AUDIT", "SIMPLEGRAPH_AUDIT_EVERY"
KINDS = {
    "freed": "the graph uses memory that was given back",
    "unmapped": "the graph uses memory that the device no longer has",
    "taken": "the graph uses memory that now belongs to another tensor",
    "stale": "a module's tensor moved, and the graph uses its old memory",
    "nan": "an output holds NaN after a replay",
}
FOUND: collections.Counter[str] = collections.Counter()  # by kind, of every audit of this process
_AT_ONCE = 10  # the number of surveys for a first replay that are not delayed
_REST = 100  # the pause after a survey, as a multiple of its duration
_INSIDE = (contextlib.__file__, *(str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent)))


@dataclasses.dataclass
class AuditFinding:
    """A fault of memory that graphs use.

    Attributes:
        kind: one of `KINDS`.
        address: the address that the kernel uses.
        then: the owner of the memory at the capture; now: the present owner.
        kernel: the name of the kernel.
        allocated: the line that allocated the memory before the capture, if torch's memory history was on.
        graphs: the numbers of the graphs with this fault.
    """

    kind: str
    address: int
    then: str
    now: str
    kernel: str
    allocated: str = ""
    graphs: list[int] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        where = f", allocated at {self.allocated}" if self.allocated else ""
        graphs = f"graph {self.graphs[0]}" + (f" and {len(self.graphs) - 1} more" if self.graphs[1:] else "")
        return f"{self.kind}: {self.kernel} in {graphs} uses {self.address:#x}, then {self.then}{where}; now {self.now}"


@dataclasses.dataclass(eq=False, repr=False)
class AuditedGraph:
    """One captured graph.

    Attributes:
        number: its number, in order of capture; captured_at: the line that captured it.
        reading: its nodes, and notes of unreadable parts.
        seconds: the time of the capture, reading included.
        modules: index of a node -> the module whose tensor it uses.
        pools: the allocator's pools that it uses.
        replays: the number of watched replays; due: the number of the next replay to check.
        uses: the memory that it uses; watched: tensors of its modules, if it has kernels that could not be read.
        fresh: the survey of memory from before its capture, until the owners are known.
        addresses: address without a known owner -> the first node that uses it; words: the same for possible addresses.
        settled: True once the owners of the addresses are known.
        dropped: True once it was reset, or is gone.
    """

    number: int
    captured_at: str
    reading: CaptureReading
    seconds: float
    modules: dict[int, str] = dataclasses.field(default_factory=dict)
    pools: set[str] = dataclasses.field(default_factory=set)
    replays: int = 0
    due: int = 1
    uses: dict[tuple[MemoryOwner, Any], Use] = dataclasses.field(default_factory=dict)
    watched: dict[int, Sequence[Use]] = dataclasses.field(default_factory=dict)
    fresh: MemorySurvey | None = None
    settled: bool = False
    dropped: bool = False
    reference: weakref.ref[Any] | None = None

    def __repr__(self) -> str:
        """Return the number of the graph, the module whose tensors it uses, and the line that captured it."""
        whose = next((f" of {name.partition('.')[0]}" for name in self.modules.values()), "")
        where, replays = Path(self.captured_at).name, "dropped" if self.dropped else counted(self.replays, "replay")
        return f"<{type(self).__name__} {self.number}{whose}, captured at {where}, {replays}>"

    @property
    def nodes(self) -> list[tuple[str, str, str]]:
        """Return name, shape of launch and module of each node."""
        return [(node.name, node.shape, self.modules.get(at, "")) for at, node in enumerate(self.reading.nodes)]

    def settle(self, survey: MemorySurvey) -> None:
        """Find the owners of the addresses, in the survey from before the capture or in `survey` from after it."""
        nodes, self.settled = self.reading.nodes, True
        for certain in (True, False):
            first: dict[int, int] = {}
            for index in reversed(range(len(nodes))):
                first.update(dict.fromkeys(nodes[index].addresses if certain else nodes[index].words, index))
            for address, node in first.items():
                self._settle(address, node, survey, certain=certain)
        if self.reading.unread >= 0:
            modules = (self.fresh or survey).modules
            roots = {slot.root for _, slot in self.uses if slot is not None}
            self.watched = {root: modules[root] for root in roots & set(modules)}
        self.fresh = None

    def _settle(self, address: int, node: int, survey: MemorySurvey, *, certain: bool) -> None:
        fresh_owner, owner = None if self.fresh is None else self.fresh.find(address), survey.find(address)
        # Memory of the pool is newer than the first survey, which also lacks tensors if gc.freeze() was called.
        unseen = owner is not None and owner.state is State.TENSOR
        if fresh_owner is not None and (
            fresh_owner.state is State.TENSOR or (fresh_owner.state is State.WORKSPACE and not unseen)
        ):
            owner = fresh_owner
        if owner is not None and not (owner.state is State.FREED and self._is_end(address, node, survey)):
            self._use(owner, address, node, certain)

    def _is_end(self, address: int, node: int, survey: MemorySurvey) -> bool:
        """True if the address is the end of memory that contains another address of the node."""
        blocks = map(survey.blocks.find, self.reading.nodes[node].addresses)
        return any(block is not None and block.end == address for block in blocks)

    def _use(self, owner: MemoryOwner, address: int, node: int, certain: bool) -> None:
        if owner.state is State.POOL and owner.block is not None:
            self.pools.add(str(owner.block.pool))
        slot = owner.slot(address)
        if slot is not None:
            self.modules.setdefault(node, slot.name.rpartition(".")[0])
        if (owner, slot) not in self.uses and credible(owner, address, self.reading.nodes[node].name, certain=certain):
            self.uses[owner, slot] = Use(owner, slot, address, node)


class Audit:
    """Reads every graph that any code of this process captures from now on, and checks the graphs at replays.

    Graphs, results and memory of the program do not change. A finding is logged as a warning, and the replay goes on.
    At most one audit is attached at a time.

        with sg.audit(every=1) as audit:
            serve()
        print(audit)
        audit.save("report.html")

    Args:
        every: the number of replays from one check of a graph to the next; the first replay is always checked. With 0
            no other replay is, and ``replay`` is torch's own method afterwards.
        nan: True to look for NaN in the outputs of checked replays, which waits for the device.
        path: the path of a report, written at the end and at every new finding. A child process writes a file of its
            own, with the process's name in the file's name.

    Attributes:
        graphs: all captured graphs, in order.
        findings: the faults that were found.
        checks: the number of checks of graphs so far.
        saved: the path of the last report; None before the first.

    Raises:
        ConfigError: another audit is attached, `every` is negative, no file can be written at `path`, or the driver
            lacks what it takes.
    """

    attached: Audit | None = None  # the one of this process

    def __init__(self, every: int = 100, *, nan: bool = False, path: str | os.PathLike[str] | None = None) -> None:
        if every < 0:
            raise ConfigError(f"every is {every}; expected a number of replays, or 0 for none.")
        self.every, self.nan, self.path = every, nan, _own_path(path)
        self.graphs: list[AuditedGraph] = []
        self.findings: list[AuditFinding] = []
        self.checks = 0
        self.saved: Path | None = None
        self.survey_seconds = 0.0
        self._source = graph_source(self)
        self._by_id: dict[int, AuditedGraph] = {}
        self._by_place: dict[tuple[str, int, str], AuditFinding] = {}
        self._begun: dict[int, tuple[float, MemorySurvey | None]] = {}
        self._survey: MemorySurvey | None = None
        self._next_survey, self._hurried = 0.0, 0
        self._watching = False
        # One by process: a thread that holds the lock when another one forks does not exist in the child, to release
        # it.
        self._locks: collections.defaultdict[int, Any] = collections.defaultdict(threading.RLock)
        self._process = os.getpid()
        self._checked: AuditedGraph | None = None

    @classmethod
    def start(cls, every: int = 100, *, nan: bool = False, path: str | os.PathLike[str] | None = None) -> Audit:
        """Attach an audit until its `stop`, or the end of the process; see the class for arguments."""
        return cls(every, nan=nan, path=path).__enter__()

    def __enter__(self) -> Audit:
        other = Audit.attached
        if other is self:
            return self
        if other is not None and other._process == os.getpid():
            raise ConfigError(
                "another audit is attached to this process; stop it first, or use simplegraph.audit.attached."
            )
        if other is not None:  # of the process that this one was forked from
            other._source.detach()
        self._by_id.clear()  # of an earlier attachment: since then they may have been captured into again
        self._source.attach()
        Audit.attached = self
        # At the end of worker processes, too, which run no functions of `atexit`.
        self._finalize = multiprocessing.util.Finalize(None, Audit.stop, (self,), exitpriority=100)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Detach, and write the report if there is a path; does nothing the second time."""
        if Audit.attached is not self or self._process != os.getpid():
            return
        with self._locks[os.getpid()]:
            self._source.detach()
            Audit.attached, self._watching = None, False
        self._finalize.cancel()
        if self.path is not None and (self.graphs or self.findings):
            with self._telling("its report could not be written"):
                self.save(self.path)

    def check(self) -> list[AuditFinding]:
        """Check all graphs that can be replayed now, and return the findings."""
        with self._locks[os.getpid()]:
            survey = self._settle()
            by_graph = [self._check(graph, survey.blocks) for graph in list(self._by_id.values())]
        return [finding for findings in by_graph for finding in findings]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as a self-contained HTML file, and as JSON beside it; return the path of the HTML file."""
        from simplegraph.doctor.audit_page import write_report

        self.saved = None
        self.saved = write_report(self.to_dict(), Path(path))
        return self.saved

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        names = {
            name: at for at, name in enumerate(dict.fromkeys(part for g in self.graphs for n in g.nodes for part in n))
        }
        graphs = [
            {
                "number": graph.number,
                "captured_at": graph.captured_at,
                "pools": sorted(graph.pools),
                "seconds": round(graph.seconds, 6),
                "reading_seconds": round(graph.reading.seconds, 6),
                "replays": graph.replays,
                "dropped": graph.dropped,
                "nodes": [[names[part] for part in node] for node in graph.nodes],
                "notes": dict(graph.reading.notes),
                "memory": dict(collections.Counter(use.owner.state.name.lower() for use in graph.uses.values())),
            }
            for graph in self.graphs
        ]
        return {
            "torch": torch.__version__,
            "process": f"{multiprocessing.process.current_process().name} ({self._process})",
            "device": torch.cuda.get_device_name() if self._source.device == "cuda" else "emulated",
            "every": self.every,
            "checks": self.checks,
            "survey_seconds": self.survey_seconds,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "pools": self._pools(),
            "names": list(names),
            "graphs": graphs,
        }

    def _pools(self) -> dict[str, int]:
        sizes: collections.Counter[str] = collections.Counter()
        for block in self._survey.blocks.all if self._survey is not None else ():
            sizes[str(block.pool)] += block.end - block.start
        used = {pool for graph in self.graphs for pool in graph.pools}
        return {pool: size for pool, size in sizes.items() if pool in used}

    def __str__(self) -> str:
        nodes = sum(len(graph.reading.nodes) for graph in self.graphs)
        counts = {"graph": len(self.graphs), "node": nodes, "check": self.checks, "finding": len(self.findings)}
        head = ", ".join(counted(number, noun) for noun, number in counts.items())
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])

    # Events of graphs; see `attach.Watcher`.

    def capture_begins(self, graph: Any) -> None:
        with self._telling():
            fresh = None
            if self._survey is None or time.perf_counter() > self._next_survey:
                fresh = self._look_around()
            self._begun[threading.get_ident()] = time.perf_counter(), fresh

    def capture_ended(self, graph: Any, reading: CaptureReading) -> None:
        with self._telling():
            now = time.perf_counter()
            begun, fresh = self._begun.pop(threading.get_ident(), (now, None))
            new = AuditedGraph(len(self.graphs) + 1, _capturing_line(), reading, now - begun, fresh=fresh)
            self.graphs.append(new)
            key = id(graph)
            self.graph_dropped(key)  # an object that is captured into again
            self._by_id[key] = new
            new.reference = weakref.ref(graph, lambda _: self.graph_dropped(key))
            if not self._watching and Audit.attached is self:
                self._watching = True
                self._source.watch_replays(True)

    def graph_dropped(self, key: int) -> None:
        graph = self._by_id.pop(key, None)
        if graph is not None:
            graph.dropped = True
            if not sys.is_finalizing():
                with self._telling():
                    _ = graph.reading.nodes  # before a library unloads its kernels

    def replay_begins(self, key: Any) -> None:
        graph = self._by_id.get(id(key))
        if graph is not None:
            graph.replays += 1
            if graph.replays >= graph.due:
                with self._telling():
                    self._check_before(graph)

    def replay_ended(self, key: Any) -> None:
        if self._checked is not None and self._checked is self._by_id.get(id(key)):
            checked, self._checked = self._checked, None
            with self._telling():
                self._look_for_nan(checked)

    def _check_before(self, graph: AuditedGraph) -> None:
        before = len(self.findings)
        if not graph.settled:
            if self.every != 1 and self._hurried >= _AT_ONCE and time.perf_counter() < self._next_survey:
                return  # at a later replay
            self._hurried += 1
            self._settle()
        blocks = self._blocks()
        for other in list(self._by_id.values()) if not self.every else [graph]:
            self._check(other, blocks)
        if self.every:
            # The first intervals differ, so that not all graphs are checked at one time.
            graph.due += self.every - (graph.number % self.every if graph.due == 1 else 0)
            self._checked = graph if self.nan else None
        elif self._watching:
            self._watching = False
            self._source.watch_replays(False)
        # A forked process has no report: the path is its parent's.
        if self.path is not None and len(self.findings) > before and self._process == os.getpid():
            self.save(self.path)

    @contextlib.contextmanager
    def _telling(self, failure: str = "a graph could not be audited") -> Iterator[None]:
        """Let one thread in at a time; log errors of the audit itself, which must not stop the program."""
        try:
            with self._locks[os.getpid()]:
                yield
        except Exception:
            logger.exception("simplegraph audit: %s; the program goes on", failure)

    def _blocks(self) -> Blocks:
        return Blocks(self._source.segments(), self._source.is_device_memory)

    def _look_around(self) -> MemorySurvey:
        """Survey the memory. Calls are rare enough for surveys to take a small part of the time."""
        started = time.perf_counter()
        self._survey = self._survey_now()
        taken = time.perf_counter() - started
        self.survey_seconds += taken
        self._next_survey = started + (1 + _REST) * taken
        return self._survey

    def _settle(self) -> MemorySurvey:
        """Find the owners of the addresses of new graphs."""
        survey = self._look_around()
        for graph in list(self._by_id.values()):
            if not graph.settled:
                graph.settle(survey)
        return survey

    def _check(self, graph: AuditedGraph, blocks: Blocks) -> list[AuditFinding]:
        self.checks += 1
        findings, survey = [], functools.cache(self._survey_now)
        for use in graph.uses.values():
            verdict = judge(use, blocks, survey)
            if verdict is not None:
                findings.append(self._report(graph, use, *verdict))
        for use in (use for uses in graph.watched.values() for use in uses if (use.owner, use.slot) not in graph.uses):
            verdict = judge(use, blocks, survey)
            if verdict is not None and verdict[0] == "stale":
                findings.append(self._report(graph, use._replace(node=graph.reading.unread), *verdict))
        return findings

    def _survey_now(self) -> MemorySurvey:
        return MemorySurvey(self._blocks(), self._source.device)

    def _report(self, graph: AuditedGraph, use: Use, kind: str, now: str) -> AuditFinding:
        former_owner = use.owner.described(use.address)
        place = kind, use.owner.block.start if use.owner.block is not None else use.address, former_owner
        finding = self._by_place.get(place)
        if finding is None:
            shown = readable(graph.reading.nodes[use.node].name)
            if use.node == graph.reading.unread:
                shown = f"a kernel whose parameters cannot be read, such as {shown},"
            elif use.node in graph.modules:
                shown += f" of {graph.modules[use.node]}"
            where = use.owner.block.where if use.owner.block is not None else ""
            finding = AuditFinding(kind, use.address, former_owner, now, shown, where, [graph.number])
            self._by_place[place] = finding
            self.findings.append(finding)
            FOUND[kind] += 1
            logger.warning("simplegraph audit: %s", finding)
        elif graph.number not in finding.graphs:
            finding.graphs.append(graph.number)
        return finding

    def _look_for_nan(self, graph: AuditedGraph) -> None:
        for use in graph.uses.values():
            tensors = (reference() for reference in use.owner.floating) if use.owner.state is State.POOL else ()
            if any(tensor is not None and bool(tensor.isnan().any()) for tensor in tensors):
                self._report(graph, use, "nan", "holds NaN")


audit = Audit


def start_from_environment() -> None:
    """Attach an audit if an environment variable is set; called in every process of an engine that loads plugins."""
    path, every, other = os.environ.get(VARIABLE), os.environ.get(EVERY, "100"), Audit.attached
    if not path or (other is not None and other._process == os.getpid()):
        return
    try:
        if not every.isdecimal():
            raise ConfigError(f"{EVERY} is {every!r}; expected a number of replays, or 0 for none.")
        Audit.start(int(every), path=path)
    except ConfigError as error:
        logger.warning("simplegraph audit: %s", error)


def _own_path(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of this process's report: a child's file has the child's name in its name."""
    if path is None:
        return None
    report_path, name = Path(path), multiprocessing.process.current_process().name.replace(os.sep, "_")
    if report_path.suffix == ".json" or report_path.is_dir() or not os.access(report_path.parent, os.W_OK):
        raise ConfigError(f"the report's path is {str(path)!r}; expected an HTML file in a folder that can be written.")
    return report_path if name == "MainProcess" else report_path.with_stem(f"{report_path.stem}.{name}")


def _capturing_line() -> str:
    """Return the innermost line of the stack that is neither torch's nor this library's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
