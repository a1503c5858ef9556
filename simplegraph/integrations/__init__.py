"""CUDA graphs for models of other libraries, one folder per library; the models' code is unchanged.

`LateExtras` implements the interface through which the core calls extras, and imports each extra at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simplegraph.base import extras
from simplegraph.base.extras import Extras, ProbeCounts

if TYPE_CHECKING:
    from simplegraph.program.probes import Probe

_CLASS_REGISTRIES = {("transformers", "_registered_model_output_types"), ("transformers", "_CAN_RECORD_REGISTRY")}


class LateExtras(Extras):
    """Calls extras for the core, and imports each at its first use."""

    def probes(self, counts: ProbeCounts) -> list[Probe]:
        """Make the probes that inspect the memory of graphs, and that decide on masks as eager does."""
        from simplegraph.integrations.mask_decisions import MaskDecisions
        from simplegraph.manager.touched import Inspection

        return [Inspection(), MaskDecisions(counts)]

    def runner_kind(self, config: Any, module: Any) -> Any:
        """Return the runner class of training steps, or of forward and backward graphs; None for other modules."""
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
        """Return `LengthBuckets` if the settings have lengths."""
        if not config.lengths:
            return None
        from simplegraph.integrations.lengths import LengthBuckets

        return LengthBuckets(config)

    def touched_lines(self, module: Any, manager: Any) -> tuple[str, ...]:
        """Describe the memory that the kernels of a module's graphs touch."""
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
    """Install `LateExtras` in the core; called once, when the package is imported."""
    extras.installed = LateExtras()
