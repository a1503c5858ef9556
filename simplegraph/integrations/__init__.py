"""CUDA graphs for models of other libraries, one folder per library; the models' code is unchanged.

Answers what the core asks of extras, each of which is imported when it is first asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simplegraph.base import extras
from simplegraph.base.extras import Extras, ProbeCounts

if TYPE_CHECKING:
    from simplegraph.program.probes import Probe

_CLASS_REGISTRIES = {("transformers", "_registered_model_output_types"), ("transformers", "_CAN_RECORD_REGISTRY")}


class LateExtras(Extras):
    """Imports an extra when it is first asked."""

    def probes(self, counts: ProbeCounts) -> list[Probe]:
        """Make the probes that inspect what graphs touch, and that decide on masks as eager does."""
        from simplegraph.integrations.mask_decisions import MaskDecisions
        from simplegraph.manager.touched import Inspection

        return [Inspection(), MaskDecisions(counts)]

    def runner_kind(self, config: Any, module: Any) -> Any:
        """Return the runner of whole steps, or that of forward and backward graphs if the settings ask for these."""
        from simplegraph.guard.functions import FunctionModule

        if isinstance(module, FunctionModule) and module.computes_gradients:
            from simplegraph.training.step_runner import StepRunner

            return StepRunner
        if not config.training:
            return None
        from simplegraph.training.runner import TrainingRunner

        return TrainingRunner

    def register_libraries(self) -> None:
        """Register how TensorDicts, and modules of tensordict, TorchRL and transformers, are read."""
        import simplegraph.integrations.tensordict  # noqa: F401
        from simplegraph.base.walk import CLASS_REGISTRIES

        CLASS_REGISTRIES.update(_CLASS_REGISTRIES)

    def lengths(self, config: Any) -> Any:
        """Return buckets of lengths if the settings name some."""
        if not config.lengths:
            return None
        from simplegraph.integrations.lengths import LengthBuckets

        return LengthBuckets(config)

    def touched_lines(self, module: Any, manager: Any) -> tuple[str, ...]:
        """Say what the kernels of a module's graphs touch."""
        from simplegraph.doctor.touches import touched_lines

        return touched_lines(module, manager)

    def report_page(self, report: Any) -> str:
        """Return a report as a page of HTML."""
        from simplegraph.doctor.page import page

        return page(report)

    def sleeper(self) -> Any:
        """Return the module that puts holders of graphs to sleep."""
        from simplegraph.sleeping import sleeper

        return sleeper


def register() -> None:
    """Let the core ask these; called once, by the package's door."""
    extras.installed = LateExtras()
