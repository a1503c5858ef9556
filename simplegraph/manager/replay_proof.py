"""Prove a graph: run a batch eagerly, replay it from the same start, and compare the effects."""

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
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.saved_state import (
    SavedMemory,
    copy_limit,
    default_generator,
    drew,
    put_random_states,
    random_states,
)
from simplegraph.manager.lifecycle import CapturedGraph
from simplegraph.manager.stats import GraphCounters
from simplegraph.manager.table import CaptureJob, ProgramTable
from simplegraph.program.breaks.marks import breaking_operators, recording_breaks
from simplegraph.program.observe import WHOLE, MemoryObserver
from simplegraph.program.probes import Run, around

logger = logging.getLogger("simplegraph")


Tolerance = Mapping[torch.dtype, float]

# The allowed difference, as a share of the largest value, for rounding and for kernels of other sizes.
TOLERANCE: Tolerance = {
    **{torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2},
    **{torch.complex128: 1e-9, torch.complex64: 1e-3},
}
EXACT: Tolerance = {}
# The same for a whole model: eager results of two batch sizes differ by as much.
OTHER_SIZE: Tolerance = {
    **{torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1},
    **{torch.complex128: 1e-6, torch.complex64: 5e-3},
}
# The same if another batch size runs other operators: the effect of such a branch may be small.
OTHER_OPERATORS: Tolerance = {**TOLERANCE, torch.float32: 1e-4, torch.complex64: 1e-4}
# The same if runs may add in any order: replays may all use one order, and eager calls another.
OTHER_ORDER: Tolerance = {dtype: min(16 * torch.finfo(dtype).eps, most) for dtype, most in TOLERANCE.items()}
_MAX_REPLAYS = 4  # the most replays to measure how much equal replays differ
_SLACK = 4  # the allowed multiple of the difference of two equal runs, since two runs are a small sample
_CHUNK = 1 << 24  # the number of elements that are compared in double precision at a time


class Effects(NamedTuple):
    """The effects of one run: its outputs, and the contents of memory and of inputs that it may write."""

    outputs: Sequence[Any]
    memory: Sequence[Tensor]
    inputs: Sequence[Tensor]


class Mismatch(NamedTuple):
    """A replay that differs from eager.

    Attributes:
        text: which replay differs, as a sentence.
        where: the rank that found it, such as " on rank 1"; empty without ranks.
        difference: the difference.
    """

    text: str
    where: str
    difference: str


class ReplayProof(contextlib.ExitStack):
    """Runs a forward eagerly once, replays its graph as often as needed from the same start, and compares.

    At its end, memory and random generators are as the eager run left them. Every proof uses this class: the caller
    provides the forward and the inputs of replays, and chooses the effects that count.

    Args:
        table, graph: the graph to prove, and its table. Replays of the proof are not counted; the time is.
        memory: all memory from before the run that the forward may write.
        generators: the random generators that the forward may draw from.

    Attributes:
        expected: the effects of the eager run.
        rounding: the tolerance for runs of other batch sizes; exact: the tolerance for runs of the same kernels.
        seconds: the time of the whole proof, once there is a verdict.
        replay_seconds: the time of the fastest replay.
        structure_mismatch: how the structure of the eager run's result, or its breaks, differ from a replay's; else
            empty.
        draws: True if the eager run drew random numbers.
        written_inputs: names of the inputs that the eager run changed.
        repeats: True while replays are padded by repeating the real rows; results of breaks are padded alike.
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
            Its result, and the observer of the run.
        """
        observer, graph, program = MemoryObserver(rows=rows), self._graph, self._graph.program
        self._padding = graph.descriptor.num_tokens - rows if rows else 0
        tape = None
        if program.breaks:
            from simplegraph.program.breaks.eager import BreakTape, with_played_breaks  # not loaded for full graphs

            tape = BreakTape(breaking_operators(), observer, self._memory.copied)
        # The observer sees operators first, as in a warmup: also reads that are answered by a remembered value.
        with recording_breaks(tape), around(self._table.probes, Run(as_recorded=True)), observer:
            result = wait_collectives(run())
        self.rounding, self._regions = by_least_precise(OTHER_SIZE, observer.dtypes), observer.regions
        if observer.adds_in_any_order and not torch.are_deterministic_algorithms_enabled():
            self.exact = by_least_precise(OTHER_ORDER, observer.dtypes)
        self._after = after = self._memory.copy()
        self.callback(self._memory.put, after)
        self.draws = observer.may_draw and drew(self._generators, self._random)  # not a draw of another thread
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
        self.written_inputs = {
            name for (name, _), before, now in inputs if leaf_difference(now, before, tolerance=EXACT)
        }
        if tape is not None:
            try:
                program = with_played_breaks(program, tape.calls, self._differs, lambda: self.repeats)
            except BreakError as error:
                self.structure_mismatch = str(error)
        counters = GraphCounters(graph.counters.label, graph.mode.name, graph.descriptor.num_tokens, 0.0, 0)
        self._played = CapturedGraph(graph.mode, graph.descriptor, program, counters)  # its replays are not counted
        return result, observer

    def _differs(self, passed: Tensor, expected: Tensor) -> str | None:
        return leaf_difference(passed, expected, tolerance=self.rounding)

    def written_in_part(self) -> str | None:
        """Describe memory of which the eager run left a part unchanged, and that padding rows may write; None if none.

        A comparison does not show writes of values that are there already, such as zeros to an empty slot of a cache.
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
        """Replay, and return the effects. Call it after `rewind`, with the static inputs filled.

        Args:
            outputs: views of the graph's outputs.
            inputs: views of the static inputs, in the order of the inputs of `SavedMemory`.
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
        """Restore memory and random generators to the start of the eager run, and order the stream after the pool's."""
        self._table.order_streams()
        self._memory.put(self._before)
        if self.draws:
            put_random_states(self._generators, self._random)

    def effects(self, outputs: Sequence[Any], inputs: Sequence[Tensor] = ()) -> Effects:
        """Copy the effects of the latest run."""
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
        """Describe how the effects of two runs differ; None if they do not.

        Args:
            actual: the effects of one run.
            expected: the effects of the other run.
            noise: the difference of each part of `actual` between equal replays, which is allowed.
            rounded: True to allow the rounding of kernels for another batch size, to the least precise dtype of the
                eager run. With False every bit must be equal, except for sums in any order.
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

    def compare(self, replay: Callable[[], Effects], *, same_kernels: bool) -> str | None:
        """Describe how a replay differs from eager, or its error; None if it is equal.

        Args:
            replay: replays from the start of the eager run.
            same_kernels: True if eager runs the same kernels as the graph, so that every bit must be equal.
        """
        try:
            effects = replay()
            return self.differs_beyond_noise(effects, self.expected, replay, rounded=not same_kernels)
        except Exception as error:
            return self.describe_error(error)

    def describe_error(self, error: Exception) -> str:
        """Describe the error of a replay."""
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
        """Describe how a replay differs from another run by more than equal replays differ, as after atomics."""
        ranks, label = self._table.ranks, f"a difference in the proof of {self._graph.counters.label}"
        compare = functools.partial(self.difference, actual, expected, rounded=rounded, memory=memory)
        mismatch, replays, varies = compare(), 0, True
        noise: list[float] = []
        # All ranks replay, or none does. Several replays, since two with few numbers may be equal by chance.
        while ranks.any(label, mismatch is not None and varies and replays < _MAX_REPLAYS):
            other, replays = again(), replays + 1
            if mismatch is not None:
                spreads = map(_spread, self._parts(actual, memory=memory), self._parts(other, memory=memory))
                noise = list(map(max, spreads, noise or itertools.repeat(0.0)))
                mismatch, varies = compare(noise=noise), any(noise)
        return mismatch

    def _parts(self, effects: Effects, *, memory: bool) -> list[Any]:
        return [*effects.outputs, *(effects.memory if memory else ()), *effects.inputs]

    def agree(self, mismatch: str | None) -> Mismatch | None:
        """Return the verdict of all ranks, given the difference on this rank; None if all replays equal eager.

        Call it after the end of the proof.
        """
        self.seconds = time.perf_counter() - self._started
        self._graph.counters.proof_seconds += self.seconds
        label, ranks = self._graph.counters.label, self._table.ranks
        failure = ranks.failure(f"the proof of {label}", None if mismatch is None else VerificationError(mismatch))
        if failure is None:
            return None
        where = f" on rank {failure[0]}" if ranks.size > 1 else ""
        return Mismatch(f"a replay of {label} does not equal eager{where}", where, failure[1])

    def raise_if_configured(self, text: str, difference: str, remedy: str) -> None:
        """Raise VerificationError if ``on_capture_failure`` is "raise"."""
        if self._table.config.on_capture_failure == "raise":
            raise VerificationError(f"{text}: {difference}.\n  {remedy}")


def prove_batch(table: ProgramTable, job: CaptureJob, state: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """Run an engine's batch eagerly, and compare it with a replay of its graph.

    Args:
        table: the table of the graph.
        job: the job that the graph was captured from.
        state: all tensors from before the run that the forward writes.
        run: runs the forward eagerly on the same buffers.

    Returns:
        The result of the forward.

    Raises:
        InputError: the forward writes tensors that are not in `state`, so that no replay can be undone; or `state` is
            too large to copy.
        VerificationError: the replay differs, and ``on_capture_failure`` is "raise". Otherwise the size runs eagerly.
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

            mismatch = proof.structure_mismatch or proof.compare(replay, same_kernels=True)
        verdict = proof.agree(mismatch)  # inside `together`, since ranks exchange their results
    if verdict is None:
        graph.note_proven(graph.descriptor.num_tokens)
    else:
        remedy = "Its buffers must be at the same addresses as at the capture."
        table.refuse([job], f"{verdict.text}: {verdict.difference}", remedy)
        proof.raise_if_configured(verdict.text, verdict.difference, remedy)
    return result


def by_least_precise(tolerance: Tolerance, met: Iterable[torch.dtype]) -> Tolerance:
    """Widen a tolerance to that of the least precise dtype in a run, to which its outputs were rounded.

    Gradients stored in float32 are no more precise than the bfloat16 that autocast computed them in.
    """
    least = max((tolerance.get(dtype, 0.0) for dtype in met), default=0.0)
    return {dtype: max(allowed, least) for dtype, allowed in tolerance.items()}


def _spread(actual: Any, other: Any) -> float:
    """Return the largest difference of a leaf between two equal runs."""
    is_alike = isinstance(actual, Tensor) and isinstance(other, Tensor) and actual.shape == other.shape
    return gap(actual, other)[0] if is_alike and actual.dtype == other.dtype else 0.0


def leaf_difference(actual: Any, expected: Any, *, tolerance: Tolerance = TOLERANCE, noise: float = 0.0) -> str | None:
    """Describe how two leaves differ beyond rounding; None if they do not.

    Args:
        actual: a tensor, or a value with equality.
        expected: the leaf of the eager run.
        tolerance: dtype -> allowed difference, as a share of the largest value; values of other dtypes must be equal.
        noise: the difference of equal runs.
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
    """Return the largest difference of two tensors of one shape and dtype, and the largest finite expected value.

    The difference is 0 only if all values are the same, with NaN equal to NaN. It is infinite if a value is NaN or
    infinite and the other value is not the same.
    """
    worst = scale = 0.0
    wide = torch.complex128 if actual.is_complex() else torch.float64
    for one, other in zip(_chunks(actual), _chunks(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        distance = (one.to(wide) - other.to(wide)).abs().nan_to_num(nan=float("inf"))
        # Large integers may differ and be equal in double precision.
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
    """Describe the first difference between two lists of leaves; None if there is none. See `leaf_difference`."""
    if len(actual) != len(expected):
        return f"{len(actual)} values, eager gives {len(expected)}"
    for index, pair in enumerate(zip(actual, expected, strict=True)):
        mismatch = leaf_difference(*pair, tolerance=tolerance, noise=noise[index] if noise else 0.0)
        if mismatch is not None:
            return f"{names[index] if names else f'output {index}'} {mismatch}"
    return None


def _other_class(outputs: Sequence[Any], expected: Sequence[Any]) -> str:
    """Describe the first output of a replay that is not of eager's tensor class; empty if there is none."""
    for index, (output, leaf) in enumerate(zip(outputs, expected, strict=True)):
        kind = type(leaf)
        if type(output) is Tensor and kind is not Tensor and issubclass(kind, Tensor) and not is_wrapper(leaf):
            return f"output {index} is a Tensor, eager gives a {kind.__name__}: return a tensor"
    return ""


def cloned(leaves: Sequence[Any]) -> list[Any]:
    """Return leaves with the tensors cloned."""
    return [leaf.clone() if issubclass(type(leaf), Tensor) else leaf for leaf in leaves]
