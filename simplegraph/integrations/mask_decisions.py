"""Makes captures decide on masks as eager does, once transformers is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

from simplegraph.base.extras import ProbeCounts
from simplegraph.program.probes import Probe, Run


@dataclasses.dataclass(eq=False)
class MaskDecisions(Probe):
    """Counts decisions on masks in eager runs, and answers the questions before them in recordings.

    Args:
        counts: of a table: how many decisions the recordings after an eager run must make.
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
