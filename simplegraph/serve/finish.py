"""Decide if a call can be finished eagerly after an eager break stopped its replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from simplegraph.base.errors import BreakError
from simplegraph.base.nested import ATOMS, flatten
from simplegraph.base.tensors import storage_key
from simplegraph.call.call import Call
from simplegraph.call.inputs import PLAIN_TENSORS
from simplegraph.program.breaks.break_calls import HOLD_MORE, Break, ReplayStopped, StateChanged, shown
from simplegraph.program.breaks.eager import FinishedBreaks
from simplegraph.program.breaks.marks import breaking_operators
from simplegraph.serve.call_proof import GraphOwner


def breaks_to_finish(owner: GraphOwner, call: Call, error: ReplayStopped) -> FinishedBreaks:
    """Return the breaks that ran in the replay, for an eager run.

    The eager run starts the forward again for this call. Each break runs only once: a break that ran in the replay
    returns its result from the replay. After a result of another form, the call's size runs eagerly from now on.

    Raises:
        BreakError: an eager run would repeat other effects of the replay, or ``on_capture_failure`` is "raise".
    """
    table, graph = owner.manager.table, error.graph
    if table.graphs.get(call.key) is not graph:
        call = call.at_exact_size()
    replayed = table.graphs.get(call.key)
    if replayed is None or replayed is not graph:  # the graph of a submodule
        raise error
    every = replayed.program.breaks
    steps = every[: every.index(error.step) + 1]
    returned = error.returned[: len(steps)]
    found = error.found if isinstance(error, StateChanged) else None
    why = _hindrance(owner, call, steps, returned)
    error.graph, error.returned = None, ()  # a kept error must not keep memory alive
    if found is None and table.ranks.size == 1:  # other ranks would wait for this rank
        table.device.synchronize()  # a segment still running must not lose its memory
        owner.refuse(call, error.cause, f"{HOLD_MORE}.")
    if found is None and table.config.on_capture_failure == "raise":
        raise error
    if why:
        raise unfinished(error, why) from None
    calls = zip([step.function for step in steps], returned, strict=True)
    return FinishedBreaks(breaking_operators(), calls, None if found is None else found.redo)


def unfinished(error: ReplayStopped, why: str) -> BreakError:
    """Return the error of a call that cannot be finished."""
    return BreakError(f"{error.cause}.\n  This call cannot be finished eagerly: {why}.\n  {error.remedy}.")


def _hindrance(owner: GraphOwner, call: Call, steps: Sequence[Break], returned: Sequence[Any]) -> str:
    """Say why an eager run cannot finish the call in place of the replay; empty if it can."""
    table = owner.manager.table
    if call.padding and any(step.dims is None for step in steps):
        return "the batch was padded, and the break was passed the padding rows"
    if call.binding.draws:
        return "the forward draws random numbers"
    if call.computes_gradients:
        return "it is a training step"
    if table.hooks or table.ranks.size > 1:
        return "a backend, or another rank, takes part in it"
    if owner.seen.read.reads_anything:
        return "kernels that torch does not dispatch ran before the break, and may have written anywhere"
    for step in steps:
        if step.effects is None:
            return (
                f"no call was compared with eager (verify=0), which shows what {step.name} and the code before it write"
            )
        if step.effects:
            return f"at the end of {step.name}, {step.effects}"
    if not steps[0].keeps and len(steps) > 1:
        return f"{steps[0].name} ran before, whose result is too large to be kept"
    inputs = owner.inputs_of[call.key].storages
    for leaf in (leaf for result in returned for leaf in flatten(result)[0] if not isinstance(leaf, ATOMS)):
        if type(leaf) not in PLAIN_TENSORS or leaf.layout is not torch.strided:
            return f"a break returned {shown(leaf)}, which may hold what the break was passed"
        if table.device.in_pool(table.pool, leaf) or storage_key(leaf) in inputs:
            return "a break returned what it was passed, or a view of it"
        if leaf.requires_grad:
            return "a break returned a tensor that requires grad"
    return ""
