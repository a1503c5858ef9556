"""One forward on one device: captured or refused, why, and if it equals its own eager."""

from __future__ import annotations

import dataclasses
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from eager_twin import tensors

from tests.parity import forwards
from tests.sweeps import entries
from tests.sweeps.entries import UNDEFINED, Entry, Sample, first_rows
from tests.sweeps.sweep import CALLS, sweep


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict on a forward.

    Attributes:
        verdict: "replayed"; "eager", where a capture was refused or not tried; "raised", where eager itself raises;
            "unstable", where eager differs from itself; or "defect".
        reasons: why it ran eagerly.
        cause: why its capture was refused.
        differs: how it differs from its own eager, if it is a defect; "rounding" where it does within that.
    """

    name: str
    verdict: str
    reasons: str = ""
    cause: str = ""
    differs: str = ""


def all_forwards(device: torch.device, only: str = "") -> Iterator[tuple[str, Entry]]:
    """Yield the named forwards, and of each operator and module of torch's databases the first sample and the largest.

    `only` is part of the names wanted, of these or of entries of the databases.

    A sample's name tells dtypes and shapes: releases of torch have other samples, and no number would find it again.
    """
    for entry in forwards.named():
        if only in f"named: {entry.name}":
            yield f"named: {entry.name}", entry
    for entry in [*entries.operators(), *entries.modules()]:
        if only in entry.name and entry.name not in UNDEFINED:
            yield from _of_database(entry, device)


def _of_database(entry: Entry, device: torch.device) -> Iterator[tuple[str, Entry]]:
    samples = [sample for sample in entry.samples(device, CALLS - 1) if first_rows(*sample.calls[0]) > 1]
    chosen = [samples[0], max(samples, key=_elements)] if samples else []
    for name, sample in {_name(entry, sample): sample for sample in chosen}.items():
        yield name, Entry(name, lambda device, calls, sample=sample: iter([sample]))


def find(name: str, entry: Entry, mode: str, device: torch.device) -> Finding:
    """Try an entry that has one sample."""
    # The databases seed before they draw, which no capture may.
    seeded = "torch.testing._internal.common_methods_invocations.wrapper_set_seed"
    with unittest.mock.patch(seeded, lambda op, *args, **kwargs: op(*args, **kwargs)):
        found = sweep(entry, mode, device)
    causes, defects = "; ".join(found.causes.values()), "; ".join(found.defects.values())
    return Finding(name, found.kind, ", ".join(found.eager), causes, defects or "rounding" * found.rounded)


def _elements(sample: Sample) -> int:
    return sum(tensor.numel() for tensor in tensors(sample.calls[0]))


def _name(entry: Entry, sample: Sample) -> str:
    args, kwargs = sample.calls[0]
    shown = [_shown(arg) for arg in args] + [f"{name}={_shown(value)}" for name, value in kwargs.items()]
    return f"{entry.name} ({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}{shape}".replace(" ", "")
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    return str(value)[:40] if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
