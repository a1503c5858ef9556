"""Checks if steps of a speculating engine were padded, since products of other shapes are rounded differently."""

from __future__ import annotations

from typing import Any

from bench.engine.spec import SpecEngine
from simplegraph.base.reasons import Reason


def sizes_of_steps(served: SpecEngine) -> dict[str, set[int]]:
    """The settings that capture what an engine runs from now on: requests, and tokens of its mixed steps."""
    found: dict[str, set[int]] = {"capture_sizes": set(), "mixed_capture_sizes": set()}
    launch_prompts, launch_round = served.runner.launch_prompts, served.runner.launch_round

    def prompts_seen(plan: Any, beside: Any) -> Any:
        rounds = [] if beside is None else beside.requests
        found["capture_sizes"].add(len(plan.requests) + len(rounds))  # the drafts after the first are decode steps
        found["mixed_capture_sizes"].add(len(plan.ids) + len(rounds) * (served.num_draft_tokens + 1))
        return launch_prompts(plan, beside)

    def round_seen(plan: Any) -> Any:
        found["capture_sizes"].add(len(plan.requests))
        found["mixed_capture_sizes"].add(len(plan.requests) * (plan.num_draft_tokens + 1))
        return launch_round(plan)

    served.runner.launch_prompts, served.runner.launch_round = prompts_seen, round_seen  # type: ignore[method-assign]
    return found


def assert_nothing_was_padded(served: SpecEngine) -> None:
    """Every step ran in a graph of its own size, or was a step of prompts in a mode that has no graphs for those."""
    for count, drafter in served.runner.drafters.items():
        for manager in (served.runner.managers[count], drafter.prefill_manager, drafter.decode_manager):
            assert manager is not None
            assert manager.stats.padded_tokens == 0
            assert manager.stats.replays > 0
            expected = set() if "PIECEWISE" in served.config.mode else {Reason.MIXED_BATCH}
            assert set(manager.stats.eager) <= expected, manager.stats.name
