"""An audit that a test leaves attached, as one that fails does, is stopped before the next test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import simplegraph as sg


@pytest.fixture(autouse=True)
def _audit_stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends before `monkeypatch` does, whose stand-ins an audit may be attached to."""
    yield
    if sg.Audit.attached is not None:
        sg.Audit.attached.stop()
