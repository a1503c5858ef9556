"""`sg.audit` as a program uses it, on the emulator: reports, files, the command line, processes."""

from __future__ import annotations

import configparser
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph import __main__ as cli
from simplegraph.device.select import graph_device
from simplegraph.doctor import audit as auditing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator's graphs; tests/gpu has torch's")
ROOT = Path(__file__).parent.parent.parent


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def served(rows: int = 4) -> Any:
    model: Any = sg.wrap(Mlp().eval(), capture_sizes=[2, 4], progress=False)
    with torch.inference_mode():
        model.capture_graphs(torch.ones(4, 4))
        for _ in range(3):
            model(torch.ones(rows, 4))
    return model


def test_our_own_wrappers_show_no_finding() -> None:
    with sg.audit(every=1, nan=True) as audit:
        model = served()
    assert model.graph_stats.replays
    assert [len(graph.nodes) for graph in audit.graphs] == [3, 3]
    assert audit.checks >= model.graph_stats.replays
    assert audit.findings == []


def test_answers_are_equal_to_the_bit_with_an_audit_and_without() -> None:
    torch.manual_seed(1)
    model: Any = sg.wrap(Mlp().eval(), capture_sizes=[4], progress=False)
    x = torch.randn(4, 4)
    with torch.inference_mode():
        with sg.audit(every=1):
            audited = [model(x) for _ in range(4)]
        plain = [model(x) for _ in range(4)]
    assert all(torch.equal(one, other) for one, other in zip(audited, plain, strict=True))


def test_nodes_are_named_by_the_module_whose_memory_they_use() -> None:
    with sg.audit() as audit:
        kept = served()
        audit.check()
    first, *_ = audit.graphs
    assert kept.graph_stats.replays == 3
    assert re.fullmatch(r"<AuditedGraph 1 of Mlp, captured at test_audit\.py:\d+, 3 replays>", repr(first))
    modules = [module.rpartition(".")[2] for _, _, module in first.nodes]
    assert "up" in modules
    assert "down" in modules


def test_the_report_is_one_file_of_html_and_one_of_json(tmp_path: Path) -> None:
    with sg.audit(every=1) as audit:
        served()
    page = audit.save(tmp_path / "report.html").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert page.startswith("<!doctype html>")
    assert not {"<script", "http://", "src="} & {word for word in ("<script", "http://", "src=") if word in page}
    assert ">2 graphs alike, 3 nodes each: Mlp.up to Mlp.down<" in page
    assert [len(graph["nodes"]) for graph in report["graphs"]] == [3, 3]
    assert report["findings"] == []
    assert "None: at every check" in page


def test_nan_in_an_output_is_found_where_asked_for() -> None:
    with sg.audit(every=1, nan=True) as audit, torch.inference_mode():
        model: Any = sg.wrap(Mlp().eval(), capture_sizes=[2], progress=False, outputs="static", verify=0)
        model.capture_graphs(torch.ones(2, 4))
        kept = [model(torch.full((2, 4), value)) for value in (1.0, 1.0, float("nan"))]
    assert torch.isnan(kept[-1]).all()
    assert {finding.kind for finding in audit.findings} == {"nan"}


def test_a_second_audit_is_refused_in_words() -> None:
    with sg.audit() as audit:
        with pytest.raises(sg.ConfigError, match="another audit is attached to this process"):
            sg.audit.start()
        assert sg.Audit.attached is audit
    assert sg.Audit.attached is None


def test_a_negative_number_of_replays_is_refused() -> None:
    with pytest.raises(sg.ConfigError, match="every is -1"):
        sg.audit(every=-1)


def test_an_audit_that_was_started_stops_once(tmp_path: Path) -> None:
    audit = sg.audit.start(path=tmp_path / "report.html")
    served()
    audit.stop()
    written = (tmp_path / "report.html").stat().st_mtime_ns
    audit.stop()
    assert (tmp_path / "report.html").stat().st_mtime_ns == written


def test_the_environment_asks_for_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auditing.start_from_environment()
    assert sg.Audit.attached is None  # silent
    monkeypatch.setenv("SIMPLEGRAPH_AUDIT", str(tmp_path / "report.html"))
    auditing.start_from_environment()
    audit = sg.Audit.attached
    auditing.start_from_environment()  # an engine loads plugins more than once
    assert audit is not None
    assert sg.Audit.attached is audit
    audit.stop()


def test_a_wrong_environment_is_a_warning_and_stops_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIMPLEGRAPH_AUDIT", str(tmp_path / "report.html"))
    monkeypatch.setenv("SIMPLEGRAPH_AUDIT_EVERY", "often")
    auditing.start_from_environment()
    assert sg.Audit.attached is None
    assert "SIMPLEGRAPH_AUDIT_EVERY is 'often'; expected a number of replays" in caplog.text


@pytest.mark.parametrize("path", ["nothere/report.html", "report.json", ".", ""])
def test_a_report_that_cannot_be_written_is_refused_before_the_program_runs(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Path("script.py").write_text("print('runs')")
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", "--report", path, "--", "python", "script.py"])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert f"the report's path is {str(Path(path))!r}; expected an HTML file in a folder" in said.err
    assert sg.Audit.attached is None


def test_an_engine_whose_report_cannot_be_written_runs_without_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIMPLEGRAPH_AUDIT", str(tmp_path / "nothere" / "report.html"))
    auditing.start_from_environment()
    assert sg.Audit.attached is None
    assert "expected an HTML file in a folder that can be written" in caplog.text


def test_a_folder_that_is_gone_at_the_end_is_logged_and_hides_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def program() -> None:
        served()
        folder.rmdir()
        raise KeyError("the program's")

    with pytest.raises(KeyError, match="the program's"), sg.audit(path=folder / "report.html"):
        program()
    assert sg.Audit.attached is None
    assert "its report could not be written; the program goes on" in caplog.text


def test_an_audit_that_is_attached_again_watches_replays_again() -> None:
    audit = sg.audit(every=1)
    with audit:
        first = served()
    checks = audit.checks
    with audit:
        second = served()
    assert audit.checks == checks + second.graph_stats.replays
    assert first.graph_stats.replays == second.graph_stats.replays > 0
    assert audit.findings == []


def test_an_engine_finds_the_plugin() -> None:
    declared = configparser.ConfigParser()  # a source distribution has the same, with other white space
    declared.read(ROOT / "setup.cfg")
    plugins = declared["options.entry_points"]["vllm.general_plugins"].strip()
    assert plugins == "simplegraph_audit = simplegraph.doctor.audit:start_from_environment"


def _work(path: str) -> None:
    os.environ["SIMPLEGRAPH_AUDIT"] = path
    auditing.start_from_environment()
    served()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_writes_a_report_of_its_own(tmp_path: Path, method: str) -> None:
    with sg.audit(path=tmp_path / "report.html") as audit:
        worker = multiprocessing.get_context(method).Process(
            target=_work, args=(str(tmp_path / "report.html"),), name="EngineCore"
        )
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        assert [path.name for path in sorted(tmp_path.iterdir())] == [
            "report.EngineCore.html",
            "report.EngineCore.json",
        ]
        assert sg.Audit.attached is audit


def _finds(path: str) -> None:
    """Replay a graph that reads memory which is gone, in a process that was forked from an audited one."""
    device, x = graph_device("cpu"), torch.ones(2, 4)
    with device.on_capture_stream():
        device.begin(device.new_pool())
        y = x * 2
        graph = device.end()
    del x
    with pytest.raises(sg.EmulatorError):
        graph.replay()
    assert y is not None
    assert sg.Audit.attached is not None
    assert [finding.kind for finding in sg.Audit.attached.findings] == ["freed"]


def test_a_forked_process_writes_no_report_in_its_parents_place(tmp_path: Path) -> None:
    with sg.audit(path=tmp_path / "report.html"):
        worker = multiprocessing.get_context("fork").Process(target=_finds, args=(str(tmp_path),))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    assert [*tmp_path.iterdir()] == []  # the parent has captured nothing


def test_a_process_that_was_forked_while_a_thread_audits_goes_on(tmp_path: Path) -> None:
    audits, forked = threading.Event(), threading.Event()

    def audit_a_graph() -> None:
        with audit._telling():
            audits.set()
            forked.wait()

    with sg.audit(every=1) as audit:
        thread = threading.Thread(target=audit_a_graph)
        thread.start()
        audits.wait()
        worker = multiprocessing.get_context("fork").Process(target=_finds, args=(str(tmp_path),))
        worker.start()
        worker.join(20)
        ended = worker.exitcode
        worker.kill()
        forked.set()
        thread.join()
    assert ended == 0


def test_a_worker_may_have_any_name(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(
        target=_work, args=(str(tmp_path / "report.html"),), name="Worker 1/2"
    )
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert (tmp_path / "report.Worker 1_2.html").exists()


def test_a_kernel_is_named_by_its_operator_outside_of_inference_mode_too() -> None:
    with sg.audit() as audit:
        device, x = graph_device("cpu"), torch.ones(2, 4)
        with device.on_capture_stream():
            device.begin(device.new_pool())
            x * 2
            device.end()
    assert [node[0] for node in audit.graphs[0].nodes] == ["aten.mul.Tensor"]


SCRIPT = """
import sys, torch, simplegraph as sg
from torch import nn
if __name__ == "__main__":
    model = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2], progress=False)
    with torch.inference_mode():
        for _ in range(4):
            model(torch.ones(2, 4))
        if "fault" in sys.argv:
            from simplegraph.device.select import graph_device
            device, x = graph_device("cpu"), torch.ones(2, 4)
            with device.on_capture_stream():
                device.begin(device.new_pool()); y = x * 2; graph = device.end()
            del x
            try:
                graph.replay()
            except sg.EmulatorError:
                pass
    sys.exit(int(sys.argv[1]))
"""


def run(tmp_path: Path, *words: str, command: tuple[str, ...] = ("-m", "simplegraph")) -> Any:
    return subprocess.run(
        [sys.executable, *command, "audit", "--report", str(tmp_path / "report.html"), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )


def command(
    tmp_path: Path, *arguments: str, options: tuple[str, ...] = (), source: str = SCRIPT
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(source)
    done: subprocess.CompletedProcess[str] = run(tmp_path, *options, "--", "python", str(script), *arguments)
    return done


def test_the_command_runs_a_program_and_ends_with_its_status(tmp_path: Path) -> None:
    done = command(tmp_path, "7", options=("--every", "1"))
    assert done.returncode == 7, done.stderr
    assert "simplegraph audit: 1 graph, 1 node, " in done.stderr
    assert done.stderr.endswith(f"  report: {tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("program", [["python", "nothere.py"], ["nothere"]])
def test_a_program_that_there_is_not_is_named_in_a_line(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["audit", "--", *program])
    assert f"there is no {program[-1]} to run" in capsys.readouterr().err


@pytest.mark.parametrize(("kinds", "status"), [("stale,freed", 3), ("nan", 0)])
def test_the_command_fails_on_findings_of_some_kinds(tmp_path: Path, kinds: str, status: int) -> None:
    done = command(tmp_path, "0", "fault", options=("--fail-on", kinds))
    assert done.returncode == status, done.stderr
    assert "freed: aten.mul.Tensor in graph 2" in done.stderr


def test_the_command_refuses_kinds_that_there_are_not(tmp_path: Path) -> None:
    done = command(tmp_path, "0", options=("--fail-on", "stale,wrong"))
    assert done.returncode == 2
    assert "wrong: expected some of freed, unmapped, taken, stale, nan" in done.stderr


def test_the_command_refuses_a_negative_number(tmp_path: Path) -> None:
    done = command(tmp_path, "0", options=("--every", "-1"))
    assert done.returncode == 2
    assert "every is -1; expected a number of replays" in done.stderr


def test_the_command_needs_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "simplegraph", "audit"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "no program to run; expected -- python script.py" in done.stderr


@pytest.mark.parametrize("program", [["python"], ["python", "-u", "script.py"], ["python", "-m"]])
def test_the_command_refuses_what_it_cannot_run(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", "--", *program])
    assert end.value.code == 2
    assert "expected -- python script.py ..., or -- python -m module ..." in capsys.readouterr().err


def test_the_command_runs_a_module_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine_of_mine.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit('over')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    report = tmp_path / "report.html"
    assert cli.main(["audit", "--report", str(report), "--", "python", "-m", "engine_of_mine", "--x", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "['--x', '1']\n"
    assert printed.err.startswith("over\nsimplegraph audit: 0 graphs")
    assert not report.exists()  # there is nothing to say
    assert "report:" not in printed.err


def test_the_installed_command_finds_a_module_of_the_working_directory_as_python_does(tmp_path: Path) -> None:
    """`sys.path` of a console script begins with the script's own folder."""
    installed = tmp_path / "bin" / "simplegraph"
    installed.parent.mkdir()
    installed.write_text("import sys\nfrom simplegraph.__main__ import main\nsys.exit(main())\n")
    (tmp_path / "engine_of_mine.py").write_text("import sys\nprint(sys.argv[1:], sys.path[0])\n")
    done = run(tmp_path, "--", "python", "-m", "engine_of_mine", "--x", command=(str(installed),))
    assert (done.returncode, done.stdout) == (0, f"['--x'] {tmp_path}\n"), done.stderr


@pytest.mark.parametrize("name", ["python_train.py", "pythonic"])
def test_a_program_whose_name_begins_as_pythons_is_run_itself(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("import sys\nprint(sys.argv)\n")
    (tmp_path / "other.py").write_text("print('the wrong one')\n")
    done = run(tmp_path, "--", name, "other.py")
    assert done.stdout == f"['{name}', 'other.py']\n", done.stderr


@pytest.mark.parametrize("name", ["python", "python3", "python3.13t", "/usr/bin/python3.11", "python.exe"])
def test_the_interpreter_is_known_by_all_its_names(name: str) -> None:
    assert cli._is_python(name)


def test_other_files_beside_the_report_neither_end_the_command_nor_count(tmp_path: Path) -> None:
    """`audit.*.json` may be anyone's; only reports of this run's workers count."""
    source = f"""
from pathlib import Path
folder = Path({str(tmp_path)!r})
(folder / "report.config.json").write_text('{{"findings": 3}}')
(folder / "report.list.json").write_text('[{{"kind": "stale"}}]')
(folder / "report.half.json").write_text('{{"findings": [')
(folder / "report.bytes.json").write_bytes(b"\\xff")
(folder / "report.folder.json").mkdir()
"""
    done = command(tmp_path, options=("--fail-on", "stale"), source=source)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "report.half.json was not read: JSONDecodeError" in done.stderr
    assert "  report:" not in done.stderr


def test_a_workers_report_is_named_and_its_findings_count(tmp_path: Path) -> None:
    source = f"""
import multiprocessing
{SCRIPT.replace('__name__ == "__main__"', "True").replace("sys.exit(int(sys.argv[1]))", "")}
"""
    (tmp_path / "working.py").write_text(
        "def work():\n"
        "    import sys\n"
        "    sys.argv = ['', 'fault']\n"
        "    from simplegraph.doctor.audit import start_from_environment\n"
        "    start_from_environment()\n" + "".join(f"    {line}\n" for line in source.splitlines())
    )
    main = """
import multiprocessing, working
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=working.work, name="Engine")
    worker.start()
    worker.join()
"""
    done = command(tmp_path, options=("--fail-on", "freed"), source=main)
    assert done.returncode == 3, done.stderr
    assert done.stderr.endswith(
        f"simplegraph audit: 0 graphs, 0 nodes, 0 checks, 0 findings\n  report: {tmp_path}/report.Engine.html\n"
    )


LEFT_RUNNING = """
import concurrent.futures, sys, threading, time, torch, simplegraph as sg
from torch import nn

def serve():
    time.sleep(0.5)
    model = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2], progress=False)
    with torch.inference_mode():
        for _ in range(4):
            model(torch.ones(2, 4))
    sys.stdout.write("served\\n" if sg.Audit.attached else "not audited\\n")

def watch():
    while threading.main_thread().is_alive():
        time.sleep(0.01)

threading.Thread(target=serve).start()
threading.Thread(target=watch).start()
threading.executor = concurrent.futures.ThreadPoolExecutor(1)
threading.executor.submit(serve)
sys.exit(5)
"""


def test_graphs_of_threads_that_outlive_the_main_script_are_seen(tmp_path: Path) -> None:
    """A server's script ends once it has started its threads; Python waits for them, also for those of executors."""
    done = command(tmp_path, source=LEFT_RUNNING)
    assert done.returncode == 5, done.stderr
    assert done.stdout == "served\n" * 2
    assert "simplegraph audit: 2 graphs" in done.stderr


def test_findings_are_counted_for_prometheus() -> None:
    client = pytest.importorskip("prometheus_client")
    from simplegraph.integrations import prometheus

    registry = client.CollectorRegistry()
    prometheus.register(registry)
    labels = {"kind": "stale"}
    before = registry.get_sample_value("simplegraph_audit_findings_total", labels)
    auditing.FOUND["stale"] += 1
    assert registry.get_sample_value("simplegraph_audit_findings_total", labels) == before + 1
    auditing.FOUND["stale"] -= 1
