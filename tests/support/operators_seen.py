"""A dispatch mode that notes which operators ran."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorRecorder(TorchDispatchMode):
    """The operators that ran, and the largest result that is not a view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(result, Tensor) and not any(alias.alias_info for alias in func._schema.returns):
            self.largest = max(self.largest, result.numel())
        return result
