"""Mutants of the library: one line changed as a mistake would change it, and the tests that must notice."""

from __future__ import annotations

import dataclasses

STALE = ("tests/module/test_staleness.py", "tests/module/test_state.py", "tests/module/test_stale_doors.py")
INPUTS = ("tests/module/test_static_inputs.py", "tests/module/test_inputs.py", "tests/module/test_written_inputs.py")
FAULTS = ("tests/manager/test_failures.py", "tests/module/test_fault_matrix.py", "tests/module/test_effects.py")
UNSEEN = ("tests/module/test_unseen_kernels.py",)
ESCAPES = ("tests/module/test_escapes.py",)
PROOFS = ("tests/module/test_proofs.py",)
HOST = ("tests/graph/host/test_modes.py", "tests/module/test_host_values.py")
SLEEP = ("tests/sleeping/test_sleep.py", "tests/sleeping/test_parts_of_programs.py")
NUMBERS = ("tests/module/test_batch_numbers.py",)
EAGER = ("tests/module/test_refusals.py",)
ANSWERS = ("tests/module/test_padding.py", "tests/module/test_replay.py", "tests/module/test_outputs.py")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        name: the mistake; file: where.
        old: text that the file holds once; new: what stands there instead.
        tests: tried in this order, until one fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "padding is not set where the caller holds static inputs",
        "call/plan.py",
        "if self.inputs.handed_out or self.inputs.dirty > self.rows:",
        "if self.inputs.dirty > self.rows:",
        (*INPUTS, *ANSWERS),
    ),
    Mutant(
        "padding rows that a forward wrote are taken for clean",
        "call/plan.py",
        "        self.inputs.dirty = self.inputs.rows  # the forward may have written padding rows too\n",
        "",
        (*INPUTS, *ANSWERS),
    ),
    Mutant(
        "padding rows are taken for clean after a replay that raised",
        "call/plan.py",
        "self.inputs.dirty = self.inputs.rows  # what wrote to padding rows was not followed by a write-back",
        "pass",
        (*ANSWERS, *INPUTS, *FAULTS),
    ),
    Mutant(
        "sources in static inputs are not copied before they are overwritten",
        "call/plan.py",
        "(self.inputs.detached(sources) if self.inputs.handed_out else sources), targets",
        "sources, targets",
        INPUTS,
    ),
    Mutant(
        "what a forward wrote into its inputs is not given to the caller",
        "call/plan.py",
        "        if self.written_back:\n            self.write_back(leaves)\n",
        "",
        INPUTS,
    ),
    Mutant(
        "outputs are not cloned",
        "call/plan.py",
        "self._clone = sorted(clone)",
        "self._clone = []",
        ANSWERS,
    ),
    Mutant(
        "padding rows are never set",
        "call/plan.py",
        "self._pads = _pads(numbers)",
        "self._pads = _pads([])",
        (*ANSWERS, *INPUTS),
    ),
    Mutant(
        "inputs that share memory are written nevertheless",
        "call/plan.py",
        "if self.written_back and self._aliased(leaves):",
        "if False:",
        INPUTS,
    ),
    Mutant(
        "autocast is not looked at before a replay",
        "serve/runner.py",
        "if autocast is not layout.autocast:",
        "if False:",
        ("tests/module/test_grad_modes.py", "tests/module/test_signature.py", "tests/fuzz"),
    ),
    Mutant(
        "gradients are not asked for before a replay",
        "serve/runner.py",
        "if wants and (plan.state.wants_grad() or any_requires_grad(leaves)):",
        "if False:",
        ("tests/module/test_grad_modes.py",),
    ),
    Mutant(
        "addresses of weights are not compared before a replay",
        "guard/survey.py",
        "if list(map(Tensor.data_ptr, tensors)) != self._addresses:",
        "if False:",
        STALE,
    ),
    Mutant(
        "shapes and strides of weights are not compared before a replay",
        "guard/survey.py",
        "(check.check(*tensors) if check is not None else self._same_layouts(tensors))\n                and ",
        "",
        STALE,
    ),
    Mutant(
        "what stands in slots is not compared before a replay",
        "guard/survey.py",
        " or list(map(id, self._others_at(values))) != self._ids",
        "",
        STALE,
    ),
    Mutant(
        "lengths of containers are not compared before a replay",
        "guard/survey.py",
        "if lengths != self._lengths or list(",
        "if list(",
        STALE,
    ),
    Mutant(
        "hooks that were removed are not noticed before a replay",
        "guard/survey.py",
        " or self._hooks != self._hooks_before",
        "",
        STALE,
    ),
    Mutant(
        "a submodule's end is not noticed",
        "guard/survey.py",
        "lambda _: held.clear()",
        "lambda _: None",
        ("tests/module/test_old_memory.py",),
    ),
    Mutant(
        "settings of torch are not compared before a replay",
        "serve/runner.py",
        "                if not layout.settings.hold():\n                    continue\n",
        "",
        ("tests/module/test_torch_state.py", "tests/module/test_settings_of_the_recording.py"),
    ),
    Mutant(
        "graphs are captured under other settings than calls are read under",
        "serve/builder.py",
        '        raise CannotBind(Reason.PYTHON_STATE, f"settings of torch: {changed}")',
        "        pass",
        ("tests/module/test_settings_of_the_recording.py",),
    ),
    Mutant(
        "tensors in plain attributes are not compared before a replay",
        "guard/guards.py",
        "(*held, *survey.links)",
        "survey.links",
        STALE,
    ),
    Mutant(
        "segments of a failed capture are not dropped",
        "program/session.py",
        "            recorder.drop()\n",
        "",
        (*FAULTS, "tests/graph/breaks", "tests/graph/test_session.py"),
    ),
    Mutant(
        "a broken capture is not ended",
        "program/session.py",
        "                refused = self.device.abandon()\n",
        "                refused = None\n",
        FAULTS,
    ),
    Mutant(
        "generators keep the seed of a capture",
        "program/session.py",
        "            generator.set_state(state)\n",
        "            pass\n",
        FAULTS,
    ),
    Mutant(
        "what a capture changed in Python is not put back",
        "serve/builder.py",
        "            undo.callback(lambda: kept.extend(state.put_back()))\n",
        "",
        FAULTS,
    ),
    Mutant(
        "programs are kept whose reads were not noted",
        "serve/builder.py",
        "        except BaseException:\n            self.manager.table.forget(jobs)\n            raise\n",
        "        except ZeroDivisionError:\n            raise\n",
        FAULTS,
    ),
    Mutant(
        "a program that the table does not take is not dropped",
        "manager/capture.py",
        "                program.drop()  # nothing else knows of it\n",
        "                pass\n",
        FAULTS,
    ),
    Mutant(
        "the verdict of a proof is that nothing differs",
        "serve/proof.py",
        "error = None if found is None else VerificationError(found)",
        "error = None",
        PROOFS,
    ),
    Mutant(
        "runs beside the calls leave their effects",
        "serve/builder.py",
        "            undo.callback(rehearsed.close)\n",
        "",
        ("tests/module/test_capture_graphs.py", "tests/module/test_proofs.py", *FAULTS),
    ),
    Mutant(
        "another stream replays without waiting",
        "manager/table.py",
        "            self.device.wait_for(self.pool.stream)\n",
        "",
        ("tests/manager/test_threads.py", "tests/manager/test_shared_pools.py", "tests/manager/test_manager.py"),
    ),
    Mutant(
        "constants of another value are taken for the captured ones",
        "call/inputs.py",
        "return leaf is self.leaf or (type(leaf) is self.kind and bool(self.key == constant_key(leaf)))",
        "return True",
        ("tests/module/test_signature.py", "tests/module/test_nested_arguments.py"),
    ),
    Mutant(
        "tensors that a capture leaves in Python are not looked for",
        "program/session.py",
        "refuse_escapes(self.device, self.pool, label, own=own, state=state, observed=observed)",
        "pass",
        ESCAPES,
    ),
    Mutant(
        "memory of a running capture belongs to no one",
        "device/emulator/device.py",
        "return made or self._memories.get(address)",
        "return self._memories.get(address)",
        ESCAPES,
    ),
    Mutant(
        "empty memory is taken for memory that a capture left",
        "device/emulator/recording.py",
        "if not memory.reusable()} - {0}",
        "if not memory.reusable()}",
        ESCAPES,
    ),
    Mutant(
        "what every run changes in Python is frozen",
        "guard/effects.py",
        "if complete or names:",
        "if False:",
        FAULTS,
    ),
    Mutant(
        "a random generator that was replaced is drawn from",
        "guard/guards.py",
        "drawn = [name for name in before | after if before.get(name) is not after.get(name)]",
        "drawn: list[str] = []",
        STALE,
    ),
    Mutant(
        "a proof compares one padding with itself",
        "serve/proof.py",
        "other = self._replay(proof, repeat_rows=True)",
        "other = self._replay(proof, repeat_rows=False)",
        PROOFS,
    ),
    Mutant(
        "one batch size proves all",
        "manager/table.py",
        "self.rows is not None and rows not in self.rows",
        "self.rows is not None and not self.rows",
        PROOFS,
    ),
    Mutant(
        "no call is compared again",
        "manager/table.py",
        "        graph.left -= 1\n",
        "",
        PROOFS,
    ),
    Mutant(
        "distances between comparisons stay as they are",
        "manager/table.py",
        "self.distance = 2 * self.distance or distance",
        "self.distance = distance",
        PROOFS,
    ),
    Mutant(
        "a capture again forgets the batch sizes that were proven",
        "serve/proof.py",
        "call.binding.proven.setdefault(call.dispatch[:2], set()) if alone else None",
        "set() if alone else None",
        PROOFS,
    ),
    Mutant(
        "half of the rows is not compared",
        "serve/proof.py",
        "found = found or first_difference(eager.outputs, expected, tolerance=proof.rounding)",
        "pass",
        PROOFS,
    ),
    Mutant(
        "a first padded replay is compared up to rounding alone",
        "serve/proof.py",
        "            if not graph.rows:\n",
        "            if False:\n",
        PROOFS,
    ),
    Mutant(
        "attributes keep what half of the rows did",
        "serve/proof.py",
        "snapshot.put_back(snapshot.changes())",
        "pass",
        PROOFS,
    ),
    Mutant(
        "how eager nests its outputs does not count",
        "manager/proof.py",
        '"" if spec == program.spec else "eager nests its outputs otherwise"',
        '""',
        PROOFS,
    ),
    Mutant(
        "memory keeps what the replays of a proof wrote",
        "manager/proof.py",
        "self._closing.callback(self._memory.put, after)",
        "pass",
        PROOFS,
    ),
    Mutant(
        "what replays pass to breaks is not compared",
        "program/breaks/eager.py",
        "if found is not None:",
        "if False:",
        PROOFS,
    ),
    Mutant(
        "torch's switch for lifting is left on",
        "program/host_modes.py",
        "        _set_lifting(before)\n",
        "        pass\n",
        HOST,
    ),
    Mutant(
        "values on the CPU are not watched",
        "guard/guards.py",
        "            and all(map(WatchedValue.is_same, self._values.values()))\n",
        "",
        ("tests/module/test_watched_bytes.py", *HOST),
    ),
    Mutant(
        "a constant of another value is served",
        "base/constants.py",
        "return tensor.dtype, tuple(tensor.shape), tensor.stride(), value",
        "return tensor.dtype, tuple(tensor.shape), tensor.stride()",
        HOST,
    ),
    Mutant(
        "random numbers on the CPU are captured",
        "program/host_modes.py",
        "if on_host and _draws_on_cpu(func, kwargs):",
        "if False and _draws_on_cpu(func, kwargs):",
        HOST,
    ),
    Mutant(
        "a choice among all rows is not noticed",
        "program/observe.py",
        "if facts_of(func).name in _PICKING:",
        "if False:",
        PROOFS,
    ),
    Mutant(
        "calls run eagerly for a reason that is gone",
        "call/call.py",
        "self._reader.lessons != self._lessons or ",
        "",
        EAGER,
    ),
    Mutant(
        "a call that no graph serves is taken for one of another argument",
        "call/call.py",
        "if not arg.holds(leaf):",
        "if False:",
        EAGER,
    ),
    Mutant(
        "errors that are remembered keep the arguments of calls",
        "base/reasons.py",
        "        return CannotBind(self.reason, self.detail, self.size)\n",
        "        return self\n",
        ("tests/module/test_lifetimes.py",),
    ),
    Mutant(
        "numbers that follow the batch size are padded",
        "program/observe.py",
        "if repr(pair[0].numbers) != repr(pair[1].numbers):",
        "if False:",
        NUMBERS,
    ),
    Mutant(
        "what a proof's eager run computes from the batch size is not compared with the capture",
        "serve/proof.py",
        "found = (number if plan.padding else None) or found",
        "pass",
        NUMBERS,
    ),
    Mutant(
        "a capture that shows a number of the batch size serves its padded call",
        "serve/builder.py",
        "        call.check()  # as was learnt meanwhile\n",
        "",
        NUMBERS,
    ),
    Mutant(
        "numbers are remembered of a model that was changed",
        "call/call.py",
        "binding.numbers.clear()",
        "pass",
        NUMBERS,
    ),
    Mutant(
        "gradients are handed out in their graph's memory, which the next replay writes",
        "training/pair.py",
        "torch._foreach_mul(path.made, 1)",
        "path.made",
        ("tests/training/test_kept_gradients.py",),
    ),
    Mutant(
        "outputs are handed out in their graph's memory, which the next replay writes",
        "training/pair.py",
        "[output.clone() for output in plan.program.outputs]",
        "[output.detach() for output in plan.program.outputs]",
        ("tests/training/test_kept_outputs.py",),
    ),
    Mutant(
        "a kernel of Triton that may be passed an address is taken to read its tensors alone",
        "program/observe.py",
        "return strided_tensors(args) if own or all(map(_holds_no_address, args)) else None",
        "return strided_tensors(args)",
        UNSEEN,
    ),
    Mutant(
        "what a kernel of Triton is passed is not noted",
        "program/observe.py",
        "for tensor in strided_tensors(tensors or ())}",
        "for tensor in ()}",
        UNSEEN,
    ),
    Mutant(
        "a launch by Triton hides the work before it",
        "program/observe.py",
        "        self._look_for_unseen(device)\n        given = {",
        "        given = {",
        UNSEEN,
    ),
    Mutant(
        "a kernel of Triton is taken to write to nothing",
        "program/observe.py",
        "        elif self._records_more(device):\n            self.unseen = device",
        "        elif self._records_more(device):\n            device",
        UNSEEN,
    ),
    Mutant(
        "ranks agree on a graph of fewer LoRA adapters than one has",
        "batch/dispatch.py",
        "if case >= num_active_loras)",
        "if case >= 0)",
        ("tests/batch/test_dispatch.py",),
    ),
    Mutant(
        "failures of other settings are kept",
        "serve/runner.py",
        "            self.stats.failures.clear()\n",
        "",
        EAGER,
    ),
    Mutant(
        "one length is compared before others are served",
        "integrations/lengths.py",
        "_COMPARED = 2 ",
        "_COMPARED = 1 ",
        ("tests/module/test_lengths.py",),
    ),
    Mutant(
        "the stream is not handed over after a session",
        "program/session.py",
        "            stack.callback(self._hand_over)\n",
        "",
        ("tests/graph/test_session.py",),
    ),
    Mutant(
        "what two eager runs in a row advance is recorded",
        "guard/effects.py",
        "self._always = before & self.advanced",
        "self._always = set()",
        ("tests/module/test_host_state.py",),
    ),
    Mutant(
        "what launches write is not taken back",
        "call/memory.py",
        "key in self.written | self.launched",
        "key in self.written",
        UNSEEN,
    ),
    Mutant(
        "what breaks returned is padded by zeros alone in a proof",
        "program/breaks/eager.py",
        "if self._repeats() and copy.numel():",
        "if False:",
        PROOFS,
    ),
    Mutant(
        "what the second warmup of a failed capture counted stays",
        "guard/effects.py",
        "return () if self.names == [] else {*(self._changed or ()), *(self.names or ())}",
        "return self.names or ()",
        ("tests/module/test_failed_captures.py",),
    ),
    Mutant(
        "a call that waited for the pool's lock takes its sleep for a change of the module",
        "sleeping/sleeper.py",
        'self._close(state, ["moved"])',
        "self._close(state, [])",
        SLEEP,
    ),
    Mutant(
        "weights that no checkpoint has are discarded, too",
        "sleeping/sleeper.py",
        'span.address in loaded if part == "weights"',
        'bool(loaded) if part == "weights"',
        SLEEP,
    ),
    Mutant(
        "a model sleeps though another reads its memory",
        "sleeping/sleeper.py",
        "not places.of(other).isdisjoint(nap.regions)",
        "False",
        SLEEP,
    ),
    Mutant(
        "a model wakes where there is no memory",
        "sleeping/regions.py",
        "if not region.map(block):",
        "if region.map(block) is None:",
        SLEEP,
    ),
    Mutant(
        "a rank wakes though another cannot",
        "sleeping/sleeper.py",
        'with _agreed(self.ranks, "waking"):',
        "with contextlib.nullcontext():",
        ("tests/distributed/test_sleep.py",),
    ),
    Mutant(
        "a module inside its wrapper runs on memory that sleeps",
        "sleeping/sleeper.py",
        'self._close(module, ["forward"])',
        "self._close(module, [])",
        SLEEP,
    ),
]
