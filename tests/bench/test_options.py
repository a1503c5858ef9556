"""Invalid options of a benchmark are refused before anything is measured or written, with the valid ones named."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from bench.tools.options import names

pytest.importorskip("transformers", minversion="5.0")

STARTUP = "bench.startup.__main__"
SHAPES = "expected 70b, 8b, tiny, or a folder with a config.json"
REFUSED = [
    (STARTUP, "--arms eager,foo", "'foo' is none of eager, eager-dtensor, plain-loop, lean-loop, simplegraph, "),
    (STARTUP, "--sizes a", "'a' is no whole number of at least 1; expected numbers separated by commas, such as 1,2,4"),
    (STARTUP, "--sizes 1,0", "'0' is no whole number of at least 1"),
    (STARTUP, "--model nope", f"'nope' is no model; {SHAPES}"),
    (STARTUP, "--rounds 0", "'0' is no whole number of at least 1"),
    (STARTUP, "--timeout soon", "'soon' is no number above 0"),
    (STARTUP, "--device tpu", "'tpu' is none of cuda, cpu"),
    ("bench.host_overhead.__main__", "--rounds a", "'a' is no whole number of at least 1"),
    ("bench.serve.decode_steps", "--launches a", "'a' is no whole number of at least 1"),
    ("bench.layer_kinds.__main__", "--kinds a", "'a' is none of windows, hybrid"),
    ("bench.host_overhead.consensus", "--sizes a", "'a' is no whole number of at least 1"),
    ("bench.optimized.rows", "--models nope", "'nope' is none of "),
    ("bench.optimized.rows", "--arms eager,foo", "'foo' is none of eager, graph, optimized, optimized-static, make-"),
    ("bench.optimized.rows", "--batches 8,", "'' is no whole number of at least 1"),
    ("bench.training.training_steps", "--workloads nope", "'nope' is none of mlp, vit-b-8, vit-b-64, gpt2, "),
    ("bench.training.training_steps", "--arms foo", "'foo' is none of eager, eager-capturable, train-step, hand-made"),
    ("bench.transformers_generate.generation", "--models nope", "'nope' is none of llama, qwen2, "),
    ("bench.transformers_generate.generation", "--arms foo", "'foo' is none of plain, static-compiled, simplegraph"),
    ("bench.serve.__main__", "--arms foo", "'foo' is none of eager, full, full-decode-only, full-and-piecewise, "),
    ("bench.serve.__main__", "--attention foo", "'foo' is none of auto, "),
    ("bench.serve.__main__", "--model nope", SHAPES.replace("70b", "trained, 70b")),
    ("bench.serve.__main__", "--rate 20,0", "'0' is no number above 0"),
    ("bench.serve.__main__", "--in-flight 2,x", "'x' is no whole number of at least 1"),
    ("bench.serve.__main__", "--draft medusa", "'medusa' is no draft; expected eagle, eagle3, or a folder with a"),
    (
        "bench.spec_decode.__main__",
        "--arms foo",
        "none of no-speculation, eager, target-full-draft-eager, target-full-",
    ),
    (
        "bench.spec_decode.__main__",
        "--draft medusa",
        "'medusa' is no draft; expected eagle, eagle3, or a folder with a",
    ),
    ("bench.spec_decode.__main__", "--model nope", f"'nope' is no model; {SHAPES.replace('70b', 'trained, 70b')}"),
    ("bench.spec_decode.__main__", "--k 0", "'0' is no whole number of at least 1"),
    ("bench.accuracy.__main__", "--model tiny", "'tiny' is no model; expected trained, or a folder with a config.json"),
    ("bench.accuracy.__main__", "--ways foo", "'foo' is none of eager, piecewise, full, speculation-eager, "),
]


@pytest.mark.parametrize(("module", "line", "words"), REFUSED, ids=[f"{module} {line}" for module, line, _ in REFUSED])
def test_what_is_not_valid_is_refused_with_what_is(
    module: str, line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = ["--json", str(tmp_path / "figures.json")]
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(module).main([*line.split(" "), *written])
    told = capsys.readouterr()
    assert words in told.err.splitlines()[-1]
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_name_with_a_comma_is_written_with_dashes() -> None:
    read = names(["no speculation", "target full, draft eager"])
    assert read("target-full-draft-eager, no-speculation") == ("target full, draft eager", "no speculation")
