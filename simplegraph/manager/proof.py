"""Proves a graph: replays what eager just ran, from the same start, and says how the effects differ, if they do."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.errors import BreakError, InputError, VerificationError
from simplegraph.base.nested import constant_key, flatten
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import is_wrapper, lies_at, storage_key, wait_collectives
from simplegraph.device.memory import SavedMemory, copy_limit, default_generator, drew, put_random_states, random_states
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.manager.lifecycle import CapturedGraph
from simplegraph.manager.stats import GraphCounters
from simplegraph.manager.table import CaptureJob, ProgramTable
from simplegraph.program.breaks.marks import breaking_operators, recording_breaks
from simplegraph.program.observe import WHOLE, MemoryObserver
from simplegraph.program.probes import Run, around

logger = logging.getLogger("simplegraph")


class Effects(NamedTuple):
    """The effects of one run: outputs, what is in the memory that it may write, and in the inputs that it writes."""

    outputs: Sequence[Any]
    memory: Sequence[Tensor]
    inputs: Sequence[Tensor]


class Verdict(NamedTuple):
    """Describes a difference: a sentence, the rank that found it if there are several, and how the results differ."""

    text: str
    where: str
    said: str


class ReplayProof(contextlib.ExitStack):
    """Runs a forward eagerly, once, replays its graph as often as needed from the very same start, and compares.

    When it is closed, memory and random generators are as eager left them. Every proof uses this class: the caller
    brings the forward, the inputs of replays, and which of the effects count.

    Args:
        table, graph: the graph to prove, and its table. The proof's replays are not counted; its time is.
        memory: all memory that the forward may write and does not make.
        generators: the random generators that it may draw from.

    Attributes:
        expected: the effects of the eager run.
        rounding: the tolerance for runs of other batch sizes; exact: that for runs of the same kernels.
        seconds: the time that the whole proof took, once there is a verdict.
        replay_seconds: the time that the fastest replay took.
        structure_mismatch: how the eager run's structure of results, or its breaks, differ from a replay's; empty if
            they do not.
        draws: True if the eager run drew random numbers.
        written_inputs: names of the inputs that it changed.
        repeats: True while replays are padded by repeating the real rows; results of breaks are padded so, too.
    """

    def __init__(
        self, table: ProgramTable, graph: CapturedGraph, memory: SavedMemory, generators: Sequence[torch.Generator]
    ) -> None:
        super().__init__()
        self._started = time.perf_counter()
        self._table = table
        self._graph = graph
        self._memory = memory
        self._generators = generators
        self._before = memory.copy()
        self._random = random_states(generators)
        self.draws, self.structure_mismatch, self.exact = False, "", EXACT
        self.seconds, self.replay_seconds = 0.0, float("inf")
        self.repeats = False
        self._padding = 0
        self.written_inputs: set[str] = set()

    def run_eager(self, run: Callable[[], Any], rows: int = 0) -> tuple[Any, MemoryObserver]:
        """Run the forward as the caller's own call; `close` restores its effects after the replays.

        Args:
            run: the forward.
            rows: its batch size, if known.

        Returns:
            Its result, and the observer of what it read and wrote.
        """
        observer, graph, program = MemoryObserver(rows=rows), self._graph, self._graph.program
        self._padding = graph.descriptor.num_tokens - rows if rows else 0
        tape = None
        if program.breaks:
            from simplegraph.program.breaks.eager import BreakTape, with_played_breaks  # not loaded for full graphs

            tape = BreakTape(breaking_operators(), observer, self._memory.copied)
        # The observer is asked first, as in a warmup: it sees reads that are served.
        with recording_breaks(tape), around(self._table.probes, Run(as_recorded=True)), observer:
            result = wait_collectives(run())
        self.rounding, self._regions = by_least_precise(OTHER_SIZE, observer.dtypes), observer.regions
        if observer.adds_in_any_order and not torch.are_deterministic_algorithms_enabled():
            self.exact = by_least_precise(OTHER_ORDER, observer.dtypes)
        self._after = after = self._memory.copy()
        self.callback(self._memory.put, after)
        self.draws = observer.may_draw and drew(self._generators, self._random)  # another thread may draw, too
        if self.draws:
            self.callback(put_random_states, self._generators, random_states(self._generators))
        leaves, spec = flatten(result)
        self.structure_mismatch = "eager returns a different structure"
        if spec == program.spec:
            self.structure_mismatch = _other_class(program.outputs, leaves)
        memory = self._memory
        self.expected = Effects(
            cloned(leaves), memory.seen_in(after, memory.tensors), memory.seen_in(after, memory.inputs)
        )
        inputs = zip(memory.inputs, memory.seen_in(self._before, memory.inputs), self.expected.inputs, strict=True)
        self.written_inputs = {name for (name, _), before, now in inputs if difference(now, before, tolerance=EXACT)}
        if tape is not None:
            try:
                program = with_played_breaks(program, tape.calls, self._differs, lambda: self.repeats)
            except BreakError as error:
                self.structure_mismatch = str(error)
        counters = GraphCounters(graph.counters.label, graph.mode.name, graph.descriptor.num_tokens, 0.0, 0)
        self._played = CapturedGraph(graph.mode, graph.descriptor, program, counters)  # whose replays do not count
        return result, observer

    def _differs(self, passed: Tensor, expected: Tensor) -> str | None:
        return difference(passed, expected, tolerance=self.rounding)

    def written_in_part(self) -> str | None:
        """Name memory that the forward may write and eager left unchanged in part; None if there is none.

        Padding rows may write values there that are there already, such as zeros to a cache's empty slot: no comparison
        shows such a write.
        """
        memory, regions = self._memory, self._regions
        whole = {WHOLE, *(lies_at(tensor) for _, tensor in memory.tensors)}
        tensors = [entry for entry in memory.tensors if storage_key(entry[1]) in regions]
        before, after = (memory.seen_in(copies, tensors) for copies in (self._before, self._after))
        for (name, tensor), was, now in zip(tensors, before, after, strict=True):
            written, same = regions[storage_key(tensor)], (was == now) | (was.isnan() & now.isnan())
            may_be_written = not written <= whole or (not written and not same.all())
            if may_be_written and same.any():
                return f"{name} is written in part, and no comparison shows if rows of padding write there, too"
        return None

    def replay(self, outputs: Sequence[Any], inputs: Sequence[Tensor] = ()) -> Effects:
        """Replay, and return the effects; call after `rewind`, and when the static inputs are filled.

        Args:
            outputs: views of what the graph writes.
            inputs: views of the static inputs, in the order of the caller's in `SavedMemory`.
        """
        for hooks in self._table.hooks:
            hooks.undo_step()
        self._table.device.synchronize()
        started = time.perf_counter()
        self._table.replay(self._played, self._padding)
        self._table.device.synchronize()
        self.replay_seconds = min(self.replay_seconds, time.perf_counter() - started)
        return self.effects(outputs, inputs)

    def rewind(self) -> None:
        """Restore memory and random generators to the start of the eager run, and let the stream use the pool."""
        self._table.order_streams()
        self._memory.put(self._before)
        if self.draws:
            put_random_states(self._generators, self._random)

    def effects(self, outputs: Sequence[Any], inputs: Sequence[Tensor] = ()) -> Effects:
        """Copy the effects of the run that just ended."""
        memory = self._memory
        return Effects(cloned(outputs), memory.seen_in(memory.copy(), memory.tensors), cloned(inputs))

    def difference(
        self,
        actual: Effects,
        expected: Effects,
        *,
        noise: Sequence[float] = (),
        rounded: bool = False,
        memory: bool = True,
    ) -> str | None:
        """Say how the effects of two runs differ, or None.

        Args:
            actual: of one run.
            expected: of another.
            noise: by how much each part of `actual` differs between equal replays; as much is allowed.
            rounded: True to allow the rounding of kernels for another batch size, to the least precise dtype that eager
                met; else every bit must be equal, except for sums in any order.
            memory: True to compare memory, too.
        """
        return first_difference(
            self._parts(actual, memory=memory),
            self._parts(expected, memory=memory),
            names=[
                *(f"output {index}" for index in range(len(expected.outputs))),
                *(name for name, _ in (self._memory.tensors if memory else ())),
                *(f"argument {name}" for name, _ in self._memory.inputs),
            ],
            noise=noise,
            tolerance=self.rounding if rounded else self.exact,
        )

    def compare(self, replay: Callable[[], Effects], *, alike: bool) -> str | None:
        """Say how a replay differs from eager, or that it fails; None if it is equal.

        Args:
            replay: replays from the start of the eager run.
            alike: True if eager runs the kernels of the graph, so that every bit must be equal.
        """
        try:
            effects = replay()
            return self.differs_beyond_noise(effects, self.expected, replay, rounded=not alike)
        except Exception as error:
            return self.failure(error)

    def failure(self, error: Exception) -> str:
        """Say that a replay failed."""
        logger.debug("a run of %s failed in its proof", self._graph.counters.label, exc_info=error)
        return f"a replay fails with {type(error).__name__}: {error}"

    def differs_beyond_noise(
        self,
        actual: Effects,
        expected: Effects,
        again: Callable[[], Effects],
        *,
        rounded: bool = False,
        memory: bool = True,
    ) -> str | None:
        """Say how a replay differs from another run by more than from equal replays; atomics make replays differ."""
        ranks, label = self._table.ranks, f"a difference in the proof of {self._graph.counters.label}"
        compare = functools.partial(self.difference, actual, expected, rounded=rounded, memory=memory)
        mismatch, replays, varies = compare(), 0, True
        noise: list[float] = []
        # On all ranks, or on none. Two replays of few numbers may be equal by chance.
        while ranks.any(label, mismatch is not None and varies and replays < _MOST_REPLAYS):
            other, replays = again(), replays + 1
            if mismatch is not None:
                spreads = map(_spread, self._parts(actual, memory=memory), self._parts(other, memory=memory))
                noise = list(map(max, spreads, noise or itertools.repeat(0.0)))
                mismatch, varies = compare(noise=noise), any(noise)
        return mismatch

    def _parts(self, effects: Effects, *, memory: bool) -> list[Any]:
        return [*effects.outputs, *(effects.memory if memory else ()), *effects.inputs]

    def agree(self, mismatch: str | None) -> Verdict | None:
        """Return what differs on any rank, given what differs on this one; None if all replays equal eager.

        Call it when the proof is closed.
        """
        self.seconds = time.perf_counter() - self._started
        self._graph.counters.proof_seconds += self.seconds
        label, ranks = self._graph.counters.label, self._table.ranks
        failure = ranks.failure(f"the proof of {label}", None if mismatch is None else VerificationError(mismatch))
        if failure is None:
            return None
        where = f" on rank {failure[0]}" if ranks.size > 1 else ""
        return Verdict(f"a replay of {label} does not equal eager{where}", where, failure[1])

    def fail(self, text: str, said: str, remedy: str) -> None:
        """Raise VerificationError if ``on_capture_failure`` is "raise"."""
        if self._table.config.on_capture_failure == "raise":
            raise VerificationError(f"{text}: {said}.\n  {remedy}")


def prove_batch(table: ProgramTable, job: CaptureJob, state: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """Run an engine's batch eagerly, and compare a replay of its graph with that.

    Args:
        table: has the graph, by the job's key.
        job: what the graph was captured from.
        state: all tensors that the forward writes and does not make.
        run: runs the forward eagerly on the same buffers.

    Returns:
        What the forward returned.

    Raises:
        InputError: `state` is not all that the forward writes, so that no replay can be undone, or too large to copy.
        VerificationError: the replay differs, and ``on_capture_failure`` is "raise"; else that size runs eagerly.
    """
    graph, ranks = table.graphs[job.key], table.ranks
    memory = SavedMemory([(f"state {index}", tensor) for index, tensor in enumerate(state)])
    if memory.nbytes > (limit := copy_limit(table.device.free_memory())):
        raise InputError(f"state has {memory.nbytes} bytes; at most {limit} can be copied for a proof.")
    with ranks.together(), CAPTURE_LOCK:
        table.stats.ran_eagerly(Reason.PROOF, size=graph.descriptor.num_tokens)
        generators = {default_generator(table.device.torch_device), torch.default_generator}
        with ReplayProof(table, graph, memory, tuple(generators)) as proof:
            result, observer = proof.run_eager(run)
            unknown = observer.written - memory.keys
            if ranks.any(f"unknown memory that {job.label} writes", bool(unknown)):
                shapes = [str(tuple(observer.external[key].shape)) for key in unknown if key in observer.external]
                raise InputError(
                    f"the forward of {job.label} writes to tensors that state does not name: {', '.join(shapes)}. Pass "
                    "every tensor that it writes and does not make in state, so that a replay starts where it did."
                )

            def replay() -> Effects:
                proof.rewind()
                return proof.replay(graph.program.outputs)

            mismatch = proof.structure_mismatch or proof.compare(replay, alike=True)
        verdict = proof.agree(mismatch)  # together
    if verdict is None:
        graph.prove(graph.descriptor.num_tokens)
    else:
        remedy = "Its buffers must be at the same addresses as at the capture."
        table.refuse([job], f"{verdict.text}: {verdict.said}", remedy)
        proof.fail(verdict.text, verdict.said, remedy)
    return result


Tolerance = Mapping[torch.dtype, float]

# The largest difference allowed, as a share of the largest value: for rounding, and other kernels at other sizes.
TOLERANCE: Tolerance = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
TOLERANCE = {**TOLERANCE, torch.complex128: 1e-9, torch.complex64: 1e-3}
EXACT: Tolerance = {}
# The same for a whole model: eager itself differs by as much from one batch size to another.
OTHER_SIZE: Tolerance = {torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
OTHER_SIZE = {**OTHER_SIZE, torch.complex128: 1e-6, torch.complex64: 5e-3}
# The same if another batch size runs other operators: such a branch may change little.
OTHER_OPERATORS: Tolerance = {**TOLERANCE, torch.float32: 1e-4, torch.complex64: 1e-4}
# The same if runs may add in another order: replays may all keep to one, and calls outside of graphs to another.
OTHER_ORDER: Tolerance = {dtype: min(16 * torch.finfo(dtype).eps, most) for dtype, most in TOLERANCE.items()}
_MOST_REPLAYS = 4  # to learn by how much equal replays differ
_SLACK = 4  # runs may differ by this many times the difference of two equal runs: two are a small sample
_CHUNK = 1 << 24  # elements that are compared in double precision at a time


def by_least_precise(tolerance: Tolerance, met: Iterable[torch.dtype]) -> Tolerance:
    """Widen a tolerance to that of the least precise dtype that a run met: its outputs were rounded to that dtype.

    Gradients stored in float32 are no more precise than the bfloat16 that autocast computed them in.
    """
    least = max((tolerance.get(dtype, 0.0) for dtype in met), default=0.0)
    return {dtype: max(allowed, least) for dtype, allowed in tolerance.items()}


def _spread(actual: Any, other: Any) -> float:
    """Return the largest difference of what two equal runs gave."""
    is_alike = isinstance(actual, Tensor) and isinstance(other, Tensor) and actual.shape == other.shape
    return gap(actual, other)[0] if is_alike and actual.dtype == other.dtype else 0.0


def difference(actual: Any, expected: Any, *, tolerance: Tolerance = TOLERANCE, noise: float = 0.0) -> str | None:
    """Say how two leaves differ beyond rounding, or None.

    Args:
        actual: a tensor, or a value with equality.
        expected: what eager gives.
        tolerance: by dtype, the difference allowed as a share of the largest value; others are equal or not.
        noise: by how much equal runs differ.
    """
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return (
            None
            if actual is expected or (type(actual) is type(expected) and constant_key(actual) == constant_key(expected))
            else f"is {actual!r}, eager gives {expected!r}"
        )
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"has shape {tuple(actual.shape)} and dtype {actual.dtype}, "
            f"eager gives {tuple(expected.shape)} and {expected.dtype}"
        )
    if torch.equal(actual, expected):
        return None
    worst, scale = gap(actual, expected)
    if worst <= max(tolerance.get(actual.dtype, 0.0) * scale, _SLACK * noise):
        return None
    return f"differs by up to {worst:.3g} (values up to {scale:.3g})"


def gap(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors of one shape and dtype, and the largest finite value expected.

    The difference is 0 only where all values are the same, NaN counting as itself, and infinite where one is NaN or
    they are infinite in another way.
    """
    worst = scale = 0.0
    wide = torch.complex128 if actual.is_complex() else torch.float64
    for one, other in zip(_chunks(actual), _chunks(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        distance = (one.to(wide) - other.to(wide)).abs().nan_to_num(nan=float("inf"))
        # Large integers that differ may look equal in double precision.
        distance = torch.where(distance == 0, torch.finfo(torch.float64).tiny, distance)
        worst = max(worst, torch.where(same, 0.0, distance).max().item())
        finite = other.to(wide).abs()
        scale = max(scale, torch.where(finite.isfinite(), finite, 0.0).max().item())
    return worst, scale


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().reshape(-1)
    return (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))


def first_difference(
    actual: Sequence[Any],
    expected: Sequence[Any],
    *,
    names: Sequence[str] = (),
    tolerance: Tolerance = TOLERANCE,
    noise: Sequence[float] = (),
) -> str | None:
    """Say how the first of several leaves that differs does, or None; see `difference`."""
    if len(actual) != len(expected):
        return f"{len(actual)} values, eager gives {len(expected)}"
    for index, pair in enumerate(zip(actual, expected, strict=True)):
        mismatch = difference(*pair, tolerance=tolerance, noise=noise[index] if noise else 0.0)
        if mismatch is not None:
            return f"{names[index] if names else f'output {index}'} {mismatch}"
    return None


def _other_class(outputs: Sequence[Any], expected: Sequence[Any]) -> str:
    """Say which output of a replay is not of the tensor class that eager returns; empty if all are."""
    for index, (output, leaf) in enumerate(zip(outputs, expected, strict=True)):
        kind = type(leaf)
        if type(output) is Tensor and kind is not Tensor and issubclass(kind, Tensor) and not is_wrapper(leaf):
            return f"output {index} is a Tensor, eager gives a {kind.__name__}: return a tensor"
    return ""


def cloned(leaves: Sequence[Any]) -> list[Any]:
    """Clone the tensors among leaves."""
    return [leaf.clone() if issubclass(type(leaf), Tensor) else leaf for leaf in leaves]
