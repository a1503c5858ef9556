"""A probe that lets captures decide on masks as eager does, if transformers is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

from simplegraph.base.extras import ProbeCounts
from simplegraph.program.probes import Probe, Run


@dataclasses.dataclass(eq=False)
class MaskDecisions(Probe):
    """Counts decisions on masks in eager runs, and makes the same decisions in recordings.

    Args:
        counts: the probe counts of a table: the number of decisions of an eager run, which recordings must make, too.
    """

    counts: ProbeCounts

    @contextlib.contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Count decisions in an eager run that belongs to a graph; answer where a recording would be answered."""
        if "transformers" not in sys.modules:
            yield
            return
        from simplegraph.integrations.transformers.masks import answering, counting

        counted = run.key is not None and not run.recorded
        with (
            counting(self.counts) if counted else contextlib.nullcontext(),
            answering(self.counts) if run.as_recorded else contextlib.nullcontext(),
        ):
            yield
