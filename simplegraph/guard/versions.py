"""Versions of dicts, which say when to read a dict again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The version changes whenever an entry is set, added or removed, in whatever way; it does not if the same object is set
# again, or if an OrderedDict is reordered. Private to torch: where it is absent, all dicts are read.
# Take versions before reading the dicts.
dict_version: Callable[[dict[Any, Any]], int] | None = getattr(
    getattr(torch._C._dynamo, "guards", None), "dict_version", None
)
