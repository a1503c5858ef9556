"""Memory beside its arguments that a forward uses, and arguments that lie in it: a copy of those would miss writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import parts, storage_key
from simplegraph.call.args import TensorArg
from simplegraph.call.call import Call
from simplegraph.call.inputs import Spans
from simplegraph.guard.guards import MemoryRead
from simplegraph.guard.survey import Survey
from simplegraph.program.held import has_address
from simplegraph.program.observe import MemoryObserver


@dataclasses.dataclass(eq=False)
class MemoryInUse:
    """The memory that a module's forward was seen to use beside its arguments.

    Attributes:
        read: what it reads or writes; written: storage keys of what it writes to.
        launched: those of what Triton's launches were passed, and may write to.
    """

    read: MemoryRead = dataclasses.field(default_factory=MemoryRead)
    written: set[int] = dataclasses.field(default_factory=set)
    launched: set[int] = dataclasses.field(default_factory=set)

    def add(self, survey: Survey, observers: Sequence[MemoryObserver], inputs: set[int]) -> None:
        """Take in what runs were seen to use; `inputs` are the keys of their inputs, `survey` is of their module."""
        self.read.add(survey, observers, inputs)
        held = {key for each in survey.tensors.values() for key in each.memory}
        for observer in observers:  # an argument may be the module's own memory
            self.launched |= observer.launched
            self.written |= {key for key in observer.written if key in held or key not in inputs}

    def check(self, call: Call) -> None:
        """Refuse arguments that lie in memory which the forward writes to, or through which it writes to what it reads.

        Raises:
            CannotBind: there are such.
        """
        written, names = call.binding.written, []
        copied = {arg.name for arg in call.layout.args if isinstance(arg, TensorArg) and arg.batch_dim != "reference"}
        for name, key in call.memory.items():
            if name in copied and (key in self.written or (name in written and key in self.read.keys)):
                names.append(name)
        if names:
            raise CannotBind(Reason.ALIASED, f"{', '.join(names)} and memory of the module")

    def guards(self, call: Call) -> list[tuple[int, Spans]]:
        """Return, by the index of an argument, where a replayed call's may not lie; see `check`."""
        known = dict(self.read.elsewhere)
        held = (part for each in Survey(call.module).tensors.values() for part in parts(each.tensor))
        known |= {storage_key(part): part for part in held if has_address(part)}
        everything = Spans(known[key] for key in self.read.keys | self.written if key in known)
        written = Spans(known[key] for key in self.written if key in known)
        guards = []
        for index, arg in enumerate(call.layout.args):
            spans = everything if arg.name in call.binding.written else written
            if isinstance(arg, TensorArg) and arg.batch_dim != "reference" and spans:
                guards.append((index, spans))
        return guards
