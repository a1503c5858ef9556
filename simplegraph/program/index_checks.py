"""Stop a run at an index that is out of range, before a kernel reads there, which ends the process's use of the GPU.

The library runs forwards on fewer rows than a call has; indices that are valid for the call may be invalid there.
"""

from __future__ import annotations

from typing import Any

import torch

from simplegraph.base.operators import (
    INDICES,
    OperatorMode,
    facts_of,
    indices_of,
    strided_tensors,
    without_modes,
)


class IndexChecks(OperatorMode):  # type: ignore[no-untyped-call]
    """Checks the indices of each of torch's operators on the host before the operator runs. Raises IndexError."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the indices of an operator, and run it."""
        facts = facts_of(func)
        tensors = strided_tensors((*args, *kwargs.values()))
        if facts.is_composite and any(tensor.dtype in INDICES for tensor in tensors):
            return self.take_apart(func, args, kwargs)
        for index in indices_of(facts.name.rstrip("_"), args, kwargs):
            with without_modes():
                values = index.values if index.ignored is None else index.values[index.values != index.ignored]
                low, high = map(int, torch.aminmax(values)) if values.numel() else (index.first, index.first)
            if low < index.first or high >= index.size:
                wrong = low if low < index.first else high
                raise IndexError(f"{func} is passed the index {wrong}, and the dimension has size {index.size}")
        return self.leave(func, args, kwargs)
