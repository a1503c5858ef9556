"""Seeding as quick as tests need it: `torch.manual_seed` formats the stack for each kind of device that is absent."""

from __future__ import annotations

from typing import Any

import torch


def leave_absent_devices_unseeded() -> None:
    """Let `torch.manual_seed` leave out absent devices, for which it would keep the text of the stack at every call.

    That is half the time of tests that seed often, and gigabytes by the end of all tests.
    """
    for name in ("cuda", "xpu", "mtia"):
        kind: Any = getattr(torch, name, None)
        if hasattr(kind, "manual_seed_all") and not kind.is_available():
            kind.manual_seed_all = lambda seed: None
