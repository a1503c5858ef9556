"""The fast path of a call: replay if a plan for it exists, and do nothing otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from simplegraph.base.context import CallContext
from simplegraph.base.extras import StateKey
from simplegraph.base.modes import ANY_AUTOCAST, autocast_dtype
from simplegraph.base.reasons import CannotBind
from simplegraph.call.call import CallLayout
from simplegraph.call.plan import Plan
from simplegraph.guard.guards import any_requires_grad
from simplegraph.guard.torch_state import (
    GLOBAL_HOOKS,
    GLOBAL_PRE_HOOKS,
    function_modes,
    num_function_modes,
    num_operator_modes,
)

MISS = object()
_grad_enabled = torch.is_grad_enabled  # looked up once


def try_replay(
    module: Any,
    layout: CallLayout,
    state_key: StateKey | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: CallContext | None,
) -> Any:
    """Replay if this call is one that a plan exists for; otherwise return MISS, with nothing done.

    Raises:
        CannotBind: such calls are known to run eagerly.
    """
    leaves: Any = args if layout.positional == len(args) and not kwargs else layout.leaves(args, kwargs)
    try:
        anchor = layout.anchor
        size = leaves[anchor].shape[layout.anchor_dim] if anchor >= 0 else int(leaves is not None)
    except (TypeError, AttributeError, IndexError):
        return MISS
    if module.training is not layout.training:
        return MISS
    key = size if context is None else (size, context.batch)
    plan: Plan | None = layout.plans.get(key)
    if plan is None:
        refusal = layout.refusals.get(key)
        if refusal is not None and refusal.holds(leaves) and same_around(module, layout, state_key):
            raise CannotBind(*refusal.why)
        return MISS
    copies = plan.bind(leaves)
    if copies is None:
        return MISS
    if not plan.differentiable and _grad_enabled() and (plan.state.wants_grad() or any_requires_grad(leaves)):
        return MISS
    state, is_capturing = plan.state, plan.is_capturing
    if not same_around(module, layout, state_key):
        return MISS
    with plan.pool.lock:
        if state.moved() or not plan.graph.left or is_capturing():
            return MISS
        return plan.replay(leaves, copies)


def same_around(module: Any, layout: CallLayout, state_key: StateKey | None) -> bool:
    """True if autocast, settings, modes, hooks on all modules and Python state are those of the calls of a layout."""
    autocast = autocast_dtype(layout.device_type) if ANY_AUTOCAST() else None
    if autocast is not layout.autocast:
        return False
    if forward_ad._current_level >= 0 or num_operator_modes():
        return False
    if GLOBAL_HOOKS or GLOBAL_PRE_HOOKS or parametrize._cache_enabled:
        return False
    if not layout.settings.hold():
        return False
    if (num_function_modes() or layout.modes) and function_modes() != layout.modes:
        return False
    return state_key is None or state_key(module) == layout.state
