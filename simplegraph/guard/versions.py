"""Versions of dicts, which say when to read a dict again, and a clock, which says when to read their versions."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

# The version changes whenever an entry is set, added or removed, in whatever way; it does not if the same object is set
# again, if an OrderedDict is reordered, or if an empty dict takes another dict's items. Private to torch: where it is
# absent, all dicts are read. Take versions before reading the dicts.
dict_version: Callable[[dict[Any, Any]], int] | None = getattr(
    getattr(torch._C._dynamo, "guards", None), "dict_version", None
)


class _Thing:
    """Has an attribute, set below."""

    number = 0


# Python 3.13 sets an object's attribute without telling those who watch its dict. Tried in a loop, since Python
# specialises a store that is made often.
_thing, _versions = _Thing(), set()
for _thing.number in range(64):
    _versions.add(dict_version(vars(_thing)) if dict_version is not None else 0)
if len(_versions) < 64:
    dict_version = None


class VersionClock:
    """Tells by the version of a new dict if any dict whose version was ever taken has changed since.

    Torch takes all versions from one counter, so a new dict's is the next one if none changed. The clock is read where
    it is used, so that a steady call enters no function for it:

        with clock.lock:
            before, clock.last = clock.last, dict_version({})
            clock.moment = clock.moment if clock.last == before + 1 else object()
            moment = clock.moment

    Attributes:
        lock: held while the clock is read.
        last: the version of the latest new dict.
        moment: the same object until a dict changes.
    """

    lock, last, moment = threading.Lock(), 0, object()


# Before Python 3.12 torch returns Python's own versions, whose counter every dict of the process advances.
clock = VersionClock() if dict_version is not None and sys.version_info >= (3, 12) else None
