"""CI's count of tests that ran nowhere, by cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import skips

RUN = '<testcase classname="{}" name="{}"/>'
FILE = (
    '<testcase classname="" name="{}"><skipped message="collection skipped">'
    "('/a/b.py', 12, &quot;Skipped: {}&quot;)</skipped></testcase>"
)
SKIP = '<testcase classname="{}" name="{}"><skipped type="pytest.{}" message="{}"/></testcase>'


def test_only_what_no_step_ran_is_counted_and_each_cause_once_for_every_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {
        "readme": [
            RUN.format("tests.a", "test_one"),
            SKIP.format("tests.a", "test_kernel", "skip", "needs Triton"),
            SKIP.format("tests.a", "test_gpu[1]", "skip", "needs a GPU"),
            SKIP.format("tests.a", "test_gpu[2]", "skip", "needs a GPU"),
            SKIP.format("tests.a", "test_known", "xfail", "a bug"),
            FILE.format("tests.models", "needs timm"),
            FILE.format("tests.others", "could not import 'others': No module named 'others'"),
        ],
        "triton": [RUN.format("tests.a", "test_kernel"), SKIP.format("tests.a", "test_one", "skip", "interpreted")],
        "models": [RUN.format("tests.models", "test_vit"), FILE.format("tests.others", "needs others")],
    }
    for name, cases in steps.items():
        (tmp_path / f"{name}.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    skips.main([str(tmp_path / f"{name}.xml") for name in steps])
    assert capsys.readouterr().out == (
        "3 tests or files of tests ran in no step:\n     2  needs a GPU\n"
        "     1  could not import 'others': No module named 'others'\n"
    )


def test_what_was_skipped_for_a_cause_is_printed_as_pytest_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = [
        RUN.format("tests.test_skips", "test_ran"),
        SKIP.format("tests.test_skips", "test_kernel[a b]", "skip", "needs Triton"),
        SKIP.format("tests.test_skips", "test_kernel[c]", "skip", "needs Triton"),
        SKIP.format("tests.test_cli.TestImportName", "test_it", "skip", "needs Triton, too"),
        FILE.format("tests.fused.test_layers", "no Triton"),
        SKIP.format("tests.test_skips", "test_gpu", "skip", "needs a GPU"),
        SKIP.format("tests.test_skips", "test_known", "xfail", "Triton"),
    ]
    file = tmp_path / "readme.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(step)}</testsuite></testsuites>")
    skips.main(["--of", "Triton", str(file)])
    assert capsys.readouterr().out.splitlines() == [
        "tests/test_skips.py::test_kernel",
        "tests/test_cli.py::TestImportName::test_it",
        "tests/fused/test_layers.py",
    ]
