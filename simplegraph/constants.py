"""Values without an identity, and what tells one of them from another."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

import torch

ATOMS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, type, enum.Enum, slice, range)
ATOMS += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def constant_key(value: Any) -> Hashable:
    """What tells a value from others of its type: 0.0 from -0.0, and not one NaN from another."""
    return repr(value) if isinstance(value, (float, complex, slice)) else value


class ById:
    """An object as part of a key: equal to itself alone, and kept alive, so that no id is reused."""

    def __init__(self, value: Any) -> None:
        self.leaf = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.leaf is self.leaf

    def __hash__(self) -> int:
        return id(self.leaf)
