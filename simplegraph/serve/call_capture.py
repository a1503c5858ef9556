"""Captures the graphs of one call, and undoes all that these runs change, except the effects of warmups."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Call
from simplegraph.call.inputs import InputSet
from simplegraph.call.rehearsals import Rehearsals
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.guard.carried import PlacesFoundError
from simplegraph.guard.python_effects import ModuleState
from simplegraph.guard.scripted import settling_runs
from simplegraph.manager.capture import GraphCapture
from simplegraph.manager.observation import Observation
from simplegraph.manager.stats import CaptureSummary
from simplegraph.manager.table import CaptureJob
from simplegraph.program.escapes import kept_by
from simplegraph.program.probes import Probe, Run
from simplegraph.serve.observed_runs import ObservedRuns

logger = logging.getLogger("simplegraph")

_COMPARE_REMEDY = (
    "Up to 1 GiB of inputs are compared before and after a run; pass less, or make that part an eager break."
)


class CallCapture(Probe):
    """One capture of the graphs of a call, and a probe that checks the call once more before them.

    Args:
        runs: runs the forward, and learns from it.
        call: the call, or an example of the largest size.
        inputs: the static inputs that the graphs read.
        jobs: what to capture.
        lazy: True inside a call, whose eager runs were the warmups.
        following: True for the largest size that is left, while serving.
    """

    def __init__(
        self,
        runs: ObservedRuns,
        call: Call,
        inputs: InputSet,
        jobs: Sequence[CaptureJob],
        *,
        lazy: bool,
        following: bool,
    ) -> None:
        manager = runs.manager
        self._runs, self._manager, self._call, self._inputs, self._jobs = runs, manager, call, inputs, jobs
        self._lazy, self._following = lazy, following
        self._repeated = call.binding.repeated_changes[call.padded]
        self._observation = Observation(manager.table)
        # Earlier calls may have run with fewer rows, or have taken other branches, as probes of extras note.
        own_size = not call.padding and (call.spec, call.batch) in call.binding.ran
        self._retry = not lazy or not own_size or bool(manager.table.constants.probe_counts)
        self._state = ModuleState(
            call.module,
            manager.device,
            manager.pool,
            self._repeated,
            inputs.storages,
            retry=self._retry,
            passes_carried=call.carried.enabled and not call.breaks and manager.ranks.size == 1,
        )
        self._rehearsals = Rehearsals(runs.seen, manager.table, call, self._observation.observers)

    def run(self) -> CaptureSummary:
        """Capture the graphs.

        A size runs eagerly if its recording leaves tensors of the graph in Python objects, where they are undefined.
        All sizes run eagerly if the forward changes Python state at every run.

        Raises:
            CannotBind: no graph can serve the call, or not yet.
        """
        jobs, table = self._jobs, self._manager.table
        capture, summary, kept = self._record()
        summary = capture.inspect(summary)
        if jobs and jobs[0].arguments is not None:  # all jobs share one `HostArguments`
            self._runs.learn_hosts(self._call, jobs[0].arguments)
        self._note_made()
        changed = (self._repeated.names or []) if len(summary.failed) < len(jobs) else []
        try:
            why = self._why_refused(kept, changed)
        except PlacesFoundError as error:
            raise self._pass_carried(error) from None
        if why is None:
            return summary
        return dataclasses.replace(summary, captured=0, failed=table.refuse(jobs, *why))

    def _record(self) -> tuple[GraphCapture, CaptureSummary, Sequence[str]]:
        """Record the graphs, and put Python state back.

        Returns:
            The capture, its summary, and the names of the places that would keep tensors of the graphs.

        Raises:
            CannotBind: other code changed what the call reads, or later calls must pass more.
        """
        call, manager = self._call, self._manager
        probes = [self._rehearsals, self._observation, self._state, self, *self._runs.probes]
        capture = manager.new_capture(self._jobs, lazy=self._lazy or self._following, retry=self._retry, probes=probes)
        # At the end, Python state is restored, and then the memory that the runs used is noted, even after an error.
        # Under the lock, since no other thread may draw random numbers before that.
        with CAPTURE_LOCK, contextlib.ExitStack() as afterwards:
            afterwards.callback(self._runs.note_seen, call, self._inputs, self._observation)
            try:
                summary = capture.run(*self._runs_before())
                _check_settings(call)
            except PlacesFoundError as error:
                raise self._pass_carried(error) from None
            finally:
                # Another thread may have set a number while the forward was recorded, before or after it was read.
                with call.plain.keeping_others(call.module) as others:
                    kept = self._state.put_back()
        for _, name, _ in others:
            raise CannotBind(Reason.WARMUP, f"{name}, which other code set during the capture")
        return capture, summary, kept

    def _pass_carried(self, error: PlacesFoundError) -> CannotBind:
        """Pass the places that were found as inputs of later calls; return the refusal of this call."""
        observers = self._observation.observers
        self._call.carried.adopt(error.places, {key for observer in observers for key in observer.external})
        return CannotBind(Reason.WARMUP, str(error))

    def _runs_before(self) -> tuple[int, int]:
        """Return the numbers of eager runs before the captures: whose effects stay, and whose effects are undone."""
        call, manager, jobs = self._call, self._manager, self._jobs
        watched = self._following and not manager.ranks.any("that no run was watched", not self._repeated.watched)
        num_warmups = manager.config.num_warmups
        rehearsals = 0 if self._lazy or num_warmups < 2 else num_warmups
        scripts = call.survey.scripted or call.plain.scripts
        if jobs and scripts and not jobs[0].trains:  # a training step's own calls were warmups of its size
            rehearsals = max(rehearsals, settling_runs())
        return 0 if self._lazy or watched else 1, rehearsals

    def before_captures(self, *, again: bool = False) -> None:
        """Check the call, after all runs whose effects stay, and before a second try not again. Raises CannotBind."""
        call, observers = self._call, self._observation.observers
        if again:
            return
        if call.binding.refusal is None:  # a refused run may have changed the shapes of static inputs
            # Shift the rows: the proof then shows a value that the capture computed once and froze.
            self._inputs.load(call.tensors, call.padded, first=1)
        if self._lazy:
            return
        _check_settings(call)
        if not any(observer.captures for observer in observers):  # in the first pass
            call.plain.refuse_changed_values(call.module)
        if torch.cuda.is_initialized() or call.layout.hosted:  # type: ignore[no-untyped-call]
            self._check_devices()
        self._observe_second_size()

    def _check_devices(self) -> None:
        """Refuse captures if a warmup showed that the call's devices were assumed wrongly.

        Raises:
            CannotBind: its kernels run on a GPU, but its inputs and graphs are on the CPU. Or it uses a small CPU
                tensor on the CPU that was assumed to be moved to the GPU, or the other way round.
        """
        runs, arguments = self._runs, self._jobs[0].arguments
        for observer in self._observation.observers:
            if observer.gpu is not None and self._manager.device.torch_device.type == "cpu":
                runs.ran_on = observer.gpu
                raise CannotBind(Reason.WRONG_DEVICE, f"inputs are on the CPU, and kernels run on {observer.gpu}")
        if arguments is not None and runs.learn_hosts(self._call, arguments):
            names = ", ".join(sorted({*arguments.moved, *arguments.read}))
            raise CannotBind(Reason.WRONG_DEVICE, f"{names} on the CPU")

    def _observe_second_size(self) -> None:
        """Run a second batch size eagerly and undo its effects, unless batch dimensions and outputs are known.

        Afterwards outputs can be cut to their rows, and batch dimensions are confirmed.
        """
        call, manager, reader = self._call, self._manager, self._runs.reader
        binding, confirmed = call.binding, call.confirmed(reader)
        sliced = binding.outputs.is_learnt or len({kind.num_tokens for _, kind in manager.descriptors()}) > 1
        for job in self._jobs if call.breaks else ():
            if (seen := manager.table.traces.get(job.key)) is not None:
                binding.note_trace(job.padded, seen)
        sliced = sliced and (not call.breaks or binding.break_rows is not None)
        if (sliced and confirmed) or binding.padding_refusal or binding.refusal or call.padded == 1:
            return
        other = next(rows for rows in (call.padded // 2, call.padded // 2 + 1) if rows != call.batch)
        args = call.layout.args
        leaves = self._inputs.passed(args, lambda static: static.copied_part(call.padded, other, reference=True))
        run = Run(rows=other, rehearsed=True)
        with self._rehearsals.around(run):
            try:
                result, observer, trace = self._runs.run_eagerly(
                    call, *call.spec.unflatten(leaves), rows=other, before_write=run.before_write
                )
            except Exception as error:  # the forward refuses such a batch: sizes without a graph run eagerly
                logger.debug("%s cannot run %d rows: %s", manager.stats.name, other, error)
                return
        self._state.release([observer])
        binding.learn_outputs(other, *flatten(result))
        binding.learn_numbers(manager.table, observer.numbers)
        reader.learn(other, leaves, call.spec)
        if trace is not None:
            binding.note_trace(other, trace)

    def _note_made(self) -> None:
        """Note the outputs whose memory observed runs made: they must be cloned."""
        graphs = self._manager.table.graphs
        programs = [graphs[job.key].program for job in self._jobs if job.key in graphs]
        outputs = (
            (at, leaf)
            for program in programs
            for at, leaf in enumerate(program.outputs)
            if issubclass(type(leaf), Tensor)
        )
        observers = self._observation.observers
        self._call.binding.made |= {at for at, leaf in outputs if any(observer.made(leaf) for observer in observers)}

    def _why_refused(self, kept: Sequence[str], changed: Sequence[str]) -> tuple[str, str] | None:
        """Return (cause, remedy) if no graph of the capture may serve; None if the graphs may.

        Args:
            kept: names of the places that would keep tensors of the graphs.
            changed: names of the places that the forward changes at every run.

        Raises:
            PlacesFoundError: calls can pass the tensors that the forward leaves in these places.
        """
        call = self._call
        if refused := kept or changed:
            self._state.check_carried(refused)
        if kept:
            return kept_by(kept), self._state.remedy(kept)
        is_unseen = any(observer.unseen for observer in self._observation.observers)
        if is_unseen and (unknown := call.never_compared()):
            return f"kernels that torch does not dispatch may write to {', '.join(unknown)}", _COMPARE_REMEDY
        return self._repeated.refusal(call.module) if changed else None


def _check_settings(call: Call) -> None:
    """Refuse captures if settings of torch changed since the call was read: no later call could use the graphs.

    Raises:
        CannotBind: the forward, or torch itself, changed a setting.
    """
    changed = call.layout.settings.difference()
    if changed:
        raise CannotBind(Reason.PYTHON_STATE, f"settings of torch: {changed}")
