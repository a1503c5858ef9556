"""A comparison of minutes says how far it is, also where no terminal could draw a bar."""

from __future__ import annotations

import io
import sys
import time

import pytest

from bench.startup.progress import Progress


class Seconds:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    seconds = Seconds()
    monkeypatch.setattr(time, "monotonic", seconds)
    monkeypatch.delenv("RANK", raising=False)
    return seconds


def test_a_long_process_is_told_every_ten_seconds_with_the_time_that_is_left(
    clock: Seconds, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress([1.0, 4.0, 1.0])
    progress.begin("eager")
    clock.now = 5.0
    progress.tick()
    progress.end()
    progress.begin("compiled (cold)")
    assert capsys.readouterr().err == "[bench] eager ...\n[bench] compiled (cold) ...\n"
    for clock.now in (8.0, 14.9, 15.0, 20.0, 24.9, 25.0):
        progress.tick()
    assert capsys.readouterr().err.splitlines() == [
        "[bench] compiled (cold): running for 10 s; 1 of 3 processes done, about 15 s left",
        "[bench] compiled (cold): running for 20 s; 1 of 3 processes done, about 5 s left",
    ]
    progress.close()


def test_processes_that_will_not_run_count_as_done(clock: Seconds) -> None:
    progress = Progress([1.0, 1.0, 1.0, 1.0])
    assert progress.left() == "time left unknown"
    progress.begin("eager")
    clock.now = 6.0
    progress.end(skipped=2)
    progress.begin("simplegraph")
    assert progress.left() == "about 2 s left"


def test_a_terminal_has_a_bar_and_what_processes_say_above_it(clock: Seconds, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress([1.0, 1.0])
    progress.begin("eager")
    progress.tick()
    progress.write("[bench] eager: ready 0.01 s\n")
    progress.end()
    progress.begin("simplegraph")
    progress.tick()
    progress.close()
    shown = terminal.getvalue()
    assert "eager |" in shown
    assert "1 of 2" in shown
    assert "[bench] eager: ready 0.01 s\n" in shown
