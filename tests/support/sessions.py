"""Captures in a session, without the manager that makes the descriptions of runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simplegraph.program.probes import Run
from simplegraph.program.program import Program
from simplegraph.program.session import CaptureSession


def record(session: CaptureSession, run: Callable[[], Any], *, label: str, **options: Any) -> Program:
    """Capture one run under a name, and wait until it can be replayed; see `CaptureSession.capture`."""
    program = session.capture(run, about=Run(label=label, recorded=True), **options)
    program.wait()
    return program
