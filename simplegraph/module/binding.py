"""One signature of a module's calls: its static inputs, and what has been learnt about it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from simplegraph.batch.reasons import Reason
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.tensors import storage_key
from simplegraph.module.inputs import InputSet, shared_rows
from simplegraph.module.outputs import OutputShapes, unreturnable
from simplegraph.module.signature import Arg, CannotBind, Signature
from simplegraph.nested import TreeSpec


@dataclasses.dataclass(eq=False)
class Binding:
    """One signature: its static inputs, and what has been learnt about its calls.

    Attributes:
        inputs: static inputs, one set unless sizes have their own.
        outputs: how outputs follow the batch size; unsliceable: why they do not.
        called: whether a call went through eagerly, as it was.
        warm: warmup runs by padded size.
        writes: whether the forward was seen to write to an input; written: the names of those it writes to.
    """

    signature: Signature
    inputs: list[InputSet] = dataclasses.field(default_factory=list)
    outputs: OutputShapes = dataclasses.field(default_factory=OutputShapes)
    unsliceable: CannotBind | None = None
    unsupported: CannotBind | None = None
    called: bool = False
    warm: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    writes: bool = False
    written: set[str] = dataclasses.field(default_factory=set)

    def inputs_for(self, padded: int, largest: int, args: Sequence[Arg], leaves: Sequence[Any]) -> InputSet:
        """The static inputs of a padded size; `args` and `leaves` in the order of the call that asks."""
        for known in self.inputs:
            if known.rows >= padded:
                return known
        made = InputSet(args, shared_rows(args, largest, padded), leaves)
        self.inputs.append(made)
        return made

    def note_written(self, observer: MemoryObserver, inputs: InputSet) -> None:
        """Remember which static inputs a run wrote to."""
        memory = {name: storage_key(item.view(inputs.rows)) for name, item in inputs.inputs.items()}
        self.written |= {name for name, key in memory.items() if key in observer.written}
        self.writes = self.writes or bool(self.written)

    def learn_outputs(self, size: int, leaves: Sequence[Any], spec: TreeSpec) -> None:
        """Remember how the output looks at a size; what cannot be returned from a replay is noted for good."""
        detail = unreturnable(leaves)
        if detail is not None:
            self.unsupported = CannotBind(Reason.UNSUPPORTED_OUTPUT, detail)
            return
        try:
            self.outputs.learn(size, leaves, spec)
        except CannotBind as error:
            self.unsliceable = error
