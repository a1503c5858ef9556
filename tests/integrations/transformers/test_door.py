"""The door of the integration imports what is asked for, and no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers", minversion="5.0")

import simplegraph.integrations.transformers as door


def test_every_name_of_the_door_is_there_and_no_other() -> None:
    assert [getattr(door, name).__name__ for name in door.__all__] == door.__all__
    with pytest.raises(AttributeError, match="graph_decoder"):
        _ = door.graph_decoder


def test_kernels_are_imported_without_the_wrapper_and_its_graphs() -> None:
    code = """
import sys
import simplegraph.integrations.transformers.generate.grouped_heads
print([name for name in sys.modules if name.startswith(("simplegraph.serve", "simplegraph.manager"))])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
