"""Versions of dicts, which change if a dict does; and a clock, which shows if any version changed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

# The version changes whenever an entry is set, added or removed. It does not change if the same object is set again, if
# an OrderedDict is reordered, or if an empty dict takes over another dict's items. Private to torch; without it, all
# dicts are read at every call. Take the version of a dict before reading the dict.
dict_version: Callable[[dict[Any, Any]], int] | None = getattr(
    getattr(torch._C._dynamo, "guards", None), "dict_version", None
)


class _Thing:
    """Has an attribute that is set below."""

    number = 0


# Python 3.13 sets an object's attribute without a new version of its dict. Tested in a loop, since Python specialises
# stores that are made often.
_thing, _versions = _Thing(), set()
for _thing.number in range(64):
    _versions.add(dict_version(vars(_thing)) if dict_version is not None else 0)
if len(_versions) < 64:
    dict_version = None


class VersionClock:
    """Shows, by the version of a new dict, if any dict whose version was ever taken has changed since.

    Torch takes all versions from one counter: if no dict changed, the version of a new dict is the next number. The
    clock is read inline, so that a call enters no function for it:

        with clock.lock:
            before, clock.last = clock.last, dict_version({})
            clock.moment = clock.moment if clock.last == before + 1 else object()
            moment = clock.moment

    Attributes:
        lock: held while the clock is read.
        last: the version of the latest new dict.
        moment: an object that is replaced when a dict changed. If it is the same as before, no dict has changed.
    """

    lock, last, moment = threading.Lock(), 0, object()


# Before Python 3.12 torch returns Python's own versions, whose counter advances with every dict of the process.
clock = VersionClock() if dict_version is not None and sys.version_info >= (3, 12) else None
