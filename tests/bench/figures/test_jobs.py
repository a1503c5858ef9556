"""One command measures every table of the documentation, each into the file that the table is written from."""

from __future__ import annotations

import collections
import re
import shlex

import pytest

pytest.importorskip("transformers", minversion="5.0")

from bench.figures import __main__ as command
from bench.figures.jobs import JSON, all_jobs
from bench.tools.options import command_line
from docs.tools import latency, layer_kinds, model_table, optimized, ranges, raw, several_gpus, tables

COMPUTED = {"modes", "lifecycle"}  # not measured
# Paragraphs about files that stand in tables, too, and about starts of earlier commits.
SENTENCES = {"losses", "optimized-summary", "readme-headline", "readme-losses"}
# Where vLLM is installed, which has other versions of what we measure; without a GPU, for longer than a call; and where
# the wheels of recipes are.
ELSEWHERE = {"vllm-audit", "http-load", "recipes"}
# Their commands are gone, the figures stay.
PAST = {
    "startup-compiled",
    "mixed",
    "attention",
    "kinds-equal",
    "models",
    "first-token",
    "first-token-process",
}

# The same command at another commit or on another card.
EARLIER = {
    "h200_model_calls_881db13",
    "h200_compilers_84c6bcf",
    "h200_latency_6e56cc7",
    "h200_latency_84c6bcf",
    "h100_sleep",
}
EARLIER |= {f"h200x4_models/models_{key}" for key in ranges.EARLY}  # and the one before it


def named() -> set[str]:
    """The tables that stand on the pages."""
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    return set(re.findall(r"<!-- table: ([\w-]+) -->", pages)) - COMPUTED - SENTENCES - PAST - ELSEWHERE


def test_every_table_has_a_job() -> None:
    assert {table for job in all_jobs() for table in job.tables} == named()


def test_figures_whose_command_is_gone_still_make_their_tables() -> None:
    for table in PAST | ELSEWHERE | SENTENCES:
        assert "Not measured" not in tables.make(table)


@pytest.mark.parametrize("table", sorted(named()))
def test_a_tables_jobs_write_the_files_that_it_is_written_from(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = set()

    def load(name: str) -> object:
        read.add(name)
        return known(name)

    known = raw.load
    for module in (raw, tables, latency, layer_kinds, model_table, optimized, several_gpus):
        monkeypatch.setattr(module, "load", load)
    model_table.rows.cache_clear()
    tables.make(table)
    assert read
    assert read - EARLIER <= {job.file for job in all_jobs() if table in job.tables}


def test_the_startup_tables_read_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed figures are of an older form."""
    written = tables.TABLES["startup"]()
    results = raw.startup() | {"breakable": {"status": "not available"}}
    monkeypatch.setattr(raw, "load", lambda name: {"results": results})
    lines = written.splitlines()
    assert tables.TABLES["startup"]().splitlines() == [line for line in lines if "| breakable |" not in line]


def test_no_two_jobs_write_one_file_and_every_job_has_a_limit_that_one_call_can_wait_for() -> None:
    files = collections.Counter(job.file for job in all_jobs())
    assert [file for file, count in files.items() if count > 1] == []
    for job in all_jobs():
        assert job.command.count(JSON) == 1, job.file
        assert 0 < job.seconds < 600
        assert job.gpus in (0, 1, 2, 4, 8)


def test_parts_are_chosen_by_table_or_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["folder", "--list", "--only", "families,h200_serve,h200x8*"]) == 0
    chosen = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"h200_serve", "h200x4_models/generate_llama", "h200x8_tp8_70b"} <= set(chosen)
    assert all("generate" in file or "h200x8" in file or file == "h200_serve" for file in chosen)
    assert command.main(["folder", "--list"]) == 0
    every = capsys.readouterr().out
    assert "h200_training_shapes" not in every  # has no table: only if it is named
    assert command.main(["folder", "--list", "--only", "h200_training_shapes"]) == 0
    with pytest.raises(SystemExit):
        command.main(["folder", "--only", "nothing"])
    assert "no table and no file is named nothing" in capsys.readouterr().err


def test_every_jobs_options_are_those_of_its_command() -> None:
    """As far as the parsers of the benchmarks can tell: a job must not fail after an hour over a name."""
    import bench.accuracy.__main__
    import bench.serve.__main__
    import bench.startup.__main__
    import bench.two_batch.__main__

    options = {
        "bench": bench.startup.__main__.OPTIONS,
        "bench.serve": bench.serve.__main__.OPTIONS,
        "bench.accuracy": bench.accuracy.__main__.OPTIONS,
        "bench.two_batch": bench.two_batch.__main__.OPTIONS,
    }
    checked = 0
    for job in all_jobs():
        line = [*job.command]
        if line[:2] == ["-m", "pytest"]:  # whose options of ours are those of a command
            line = [*line[:1], "bench", *line[line.index("--benchmark-only") + 1 : line.index("--benchmark-json")]]
        module = line[len(line) - line[::-1].index("-m")]
        if module in options:
            command_line(module, "", options[module]).parse_args(line[len(line) - line[::-1].index("-m") + 1 :])
            checked += 1
    assert checked >= 10, shlex.join(options)
