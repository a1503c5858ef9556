"""Versions of dicts, which say when to look at what a dict holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The version moves whenever anybody stores, adds or removes an entry, in whatever way; where the same object is stored
# again, and where an OrderedDict is reordered, it does not. Private to torch: where it is absent, all dicts are read.
# Take versions before reading what the dicts hold.
dict_version: Callable[[dict[Any, Any]], int] | None = getattr(
    getattr(torch._C._dynamo, "guards", None), "dict_version", None
)
