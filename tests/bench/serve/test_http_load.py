"""The load is one: callers of each kind are served while it lasts, and a server that loses a request is found out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench.serve import http_load

# They are looked for only: with locust imported here, gevent would make all tests' threads run in one.
_MISSING = [name for name in ("fastapi", "locust", "prometheus_client") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}")


def test_callers_of_each_kind_are_served_and_every_request_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    http_load.main(["--minutes", "0.1", "--callers", "12", "--most", "8", "--port", "8769", "--json", str(path)])
    figures = json.loads(path.read_text(encoding="utf-8"))["results"]
    callers, after = figures["callers"], figures["after"]
    assert set(http_load.KINDS) <= set(callers)
    assert {counts["failures"] for counts in callers.values()} == {0}
    assert after["accepted"] == after["answered"] + after["cancelled"] > 20
    assert figures["statuses"]["400"] > 0
    assert [problem for problem in figures["problems"] if not problem.startswith("memory")] == []  # it has not settled
