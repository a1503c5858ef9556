"""CUDA graphs for models of other libraries, one folder per library; the models' code is unchanged.

graphed_parts   graphs for parts of an object, in place
handle          what a user gets: undo and reset
diffusers       pipelines of diffusers
transformers    generation and encoders of transformers
tensordict      TensorDicts and their modules
prometheus      counters for Prometheus
lengths         pads the lengths of calls
rehearsal       runs a forward ahead, and undoes it
parts           `wrap_parts`: graphs for the largest submodules that can have them
advice          trials of `advise` for models of which only parts can have graphs
mypy            a plugin for mypy

`LateExtras` implements the interface through which the core calls extras, and imports each extra at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simplegraph.base import extras
from simplegraph.base.extras import Extras, ProbeCounts

if TYPE_CHECKING:
    from simplegraph.program.probes import Probe

_CACHE_REMEDY = "graph_generation serves generate(); in a loop of your own, let the module keep a StaticCache"
_CLASS_REGISTRIES = {("transformers", "_registered_model_output_types"), ("transformers", "_CAN_RECORD_REGISTRY")}


class LateExtras(Extras):
    """Calls extras for the core, and imports each at its first use."""

    def probes(self, counts: ProbeCounts) -> list[Probe]:
        """Make the probes that inspect the memory of graphs, and that decide on masks as eager does."""
        from simplegraph.integrations.transformers.masks import MaskDecisions
        from simplegraph.manager.touched import Inspection

        return [Inspection(), MaskDecisions(counts)]

    def runner_kind(self, config: Any, module: Any) -> Any:
        """Return the runner class of training steps, or of forward and backward graphs; None for other modules."""
        from simplegraph.guard.functions import FunctionModule

        if isinstance(module, FunctionModule) and module.computes_gradients:
            from simplegraph.training.step import StepRunner

            return StepRunner
        if not config.training:
            return None
        from simplegraph.training.runner import TrainingRunner

        return TrainingRunner

    def register_libraries(self) -> None:
        """Register how TensorDicts, and modules of tensordict, TorchRL and transformers, are read; and advice."""
        import simplegraph.integrations.tensordict  # noqa: F401
        from simplegraph.base.nested import ARGUMENT_REMEDIES, OUTPUT_REMEDIES
        from simplegraph.base.walk import CLASS_REGISTRIES

        CLASS_REGISTRIES.update(_CLASS_REGISTRIES)
        ARGUMENT_REMEDIES.update(dict.fromkeys(("cache", "past_key_values"), _CACHE_REMEDY))
        OUTPUT_REMEDIES["Cache"] = "pass use_cache=False"

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
