"""A function in a fresh process: its result, its error, and its end when it dies or takes too long."""

from __future__ import annotations

import math
import os
import time

import pytest

from bench.tools import fresh


def test_a_process_that_dies_or_takes_too_long_is_told() -> None:
    assert fresh.call(abs, -3, seconds=60) == 3
    with pytest.raises(fresh.ProcessFailed, match="exit code 7"):
        fresh.call(os._exit, 7, seconds=60)
    with pytest.raises(fresh.ProcessFailed, match="ValueError: math domain error") as failed:
        fresh.call(math.sqrt, -1, seconds=60)
    assert failed.value.reason.startswith("ValueError: ")
    with pytest.raises(TimeoutError, match=r"more than 0\.2 s"):
        fresh.call(time.sleep, 60, seconds=0.2)
