"""The command ``simplegraph``, also ``python -m simplegraph``: try this machine, explain messages, watch programs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import runpy
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import simplegraph
from simplegraph.base.errors import DISTRIBUTION, ConfigError, install_command

if TYPE_CHECKING:  # torch is imported where it is needed: the help and the version should come at once
    from torch import Tensor, device

_PAGE = """\
CUDA graphs for PyTorch modules, without a compiler.

  import simplegraph as sg

  model = sg.wrap(module.eval(), capture_sizes=[1, 2, 4, 8])
  with torch.inference_mode():
      y = model(x)             # runs eagerly, is captured or replays a graph: eager's answer
  print(model.graph_report())  # captures, replays, and a reason for every call that ran eagerly
"""
_EXAMPLES = """\
examples:
  simplegraph doctor                    try capture and replay on this machine
  simplegraph explain capture-failed    say more about a warning or a reason in a report
  simplegraph audit -- python serve.py  check the graphs that a program captures
  simplegraph advise -- python eval.py  find where a program would gain from graphs
  simplegraph COMMAND --help            list a command's options

Without a GPU graphs are emulated: CUDA's rules are checked, and nothing becomes faster.
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was tried.

    Attributes:
        name: of the thing.
        status: "ok"; "skip" where it is not available here and nothing is wrong; "FAIL".
        detail: what was seen, or what is missing or went wrong and what to do.
    """

    name: str
    status: Literal["ok", "skip", "FAIL"]
    detail: str

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return self.status != "FAIL"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings out of what is printed; a finding says what went wrong."""
    ours = logging.getLogger("simplegraph")
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)


def doctor() -> list[Finding]:
    """Try capture and replay, and everything else that this library needs, on this machine."""
    import torch

    from simplegraph.base.config import CudaGraphConfig, CudaGraphMode

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = f"simplegraph {simplegraph.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    findings = [Finding("versions", "ok", versions), _installed(), _gpu()]
    for name, trial in _TRIALS.items():
        try:
            with _quiet(), torch.inference_mode():
                if CudaGraphConfig().from_env().mode is CudaGraphMode.NONE:
                    switch = f"SIMPLEGRAPH_MODE={os.environ['SIMPLEGRAPH_MODE']}"
                    findings.append(Finding(name, "skip", f"graphs are switched off by {switch}"))
                else:
                    findings.append(Finding(name, "ok", trial(device)))
        except Exception as error:
            findings.append(Finding(name, "FAIL", f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    findings += [_package(name) for name in _OPTIONAL]
    return [*findings, _flash_attention()]


def _installed() -> Finding:
    """Find other distributions that install a package of this name: files of one lie over files of the other."""
    folder = simplegraph.__name__
    owners = importlib.metadata.packages_distributions().get(folder, [])
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        owners = [*owners, importlib.metadata.metadata(folder)["Name"]]
    others = sorted({*owners} - {DISTRIBUTION})
    if not others:
        return Finding("import name", "ok", f"{folder} is this package, and no other one")
    remedy = f"pip uninstall {' '.join(others)}, then install this package again, with --force-reinstall"
    return Finding("import name", "FAIL", f"{' and '.join(others)} has the import name {folder}, too: {remedy}")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "skip", "none: graphs run on the emulator, which checks CUDA's rules and gives no speed")
    properties = torch.cuda.get_device_properties(0)
    gigabytes = properties.total_memory / 2**30
    return Finding("GPU", "ok", f"{properties.name}, {gigabytes:.0f} GiB, CUDA {torch.version.cuda}")


def _graphed(function: Callable[[Tensor], Tensor]) -> Any:
    """Wrap the smallest module worth capturing: it calls a function."""
    from torch import nn

    from simplegraph.serve.wrap import wrap

    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return wrap(Function().eval(), capture_sizes=[2, 4], verify=0, progress=False)


def _try_replay(device: device) -> str:
    import torch

    model = _graphed(lambda x: x * 2)
    x = torch.randn(3, 5, device=device)
    model.capture_graphs(x)
    if not torch.equal(model(x), x * 2):
        raise RuntimeError("a replay did not give eager's answer")
    stats = model.graph_stats
    if stats.replays != 1:
        raise RuntimeError(f"the call did not replay: {', '.join(map(stats.explained, stats.eager))}")
    return "captured two sizes, replayed one padded: equal to eager"


def _try_recovery(device: device) -> str:
    import torch

    model = _graphed(lambda x: x if x.sum().item() < 0 else x * 2)
    x = torch.ones(4, 5, device=device)  # sums to more than 0: the forward doubles it
    answers = [model(x) for _ in range(3)]
    good = _try_replay(device)
    torch.rand(1, device=device)
    if not all(torch.equal(answer, x * 2) for answer in answers) or not model.graph_stats.failures:
        raise RuntimeError("a capture that should fail did not, or its calls went wrong")
    return f"a forward that reads back fails to capture and runs eagerly; afterwards: {good}"


def _try_random(device: device) -> str:
    import torch

    model = _graphed(lambda x: x + torch.rand_like(x))
    x = torch.zeros(4, 5, device=device)
    model.capture_graphs(x)
    torch.manual_seed(1)
    replayed = torch.stack([model(x) for _ in range(2)])
    torch.manual_seed(1)
    if not torch.equal(replayed, torch.stack([torch.rand_like(x) for _ in range(2)])):
        raise RuntimeError("random numbers in a replay are not eager's")
    return "replays draw the numbers that eager would"


_TRIALS = {
    "capture and replay": _try_replay,
    "recovery from a failed capture": _try_recovery,
    "random numbers": _try_random,
}
# Optional packages, and the extra of this one that brings each.
_OPTIONAL = {
    "flashinfer": "flashinfer",
    "transformers": "transformers",
    "prometheus_client": "prometheus",
}


def _package(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "skip", f"not installed (optional): {install_command(_OPTIONAL[name])}")
    distribution = {"flashinfer": "flashinfer-python"}.get(name, name)
    try:
        return Finding(name, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "ok", "installed, version unknown")


def _flash_attention() -> Finding:
    """Find builds of flash-attention, and the versions whose kernels they have."""
    name = "flash-attention"
    from simplegraph.attention.backends.flash_attention import HOW_TO_INSTALL, kernels_of
    from simplegraph.attention.backends.flash_kernels import GPUS, MODULES

    serves = {3: "any batch", 2: "uniform batches"}
    said = []
    for version, gpus in GPUS.items():
        builds = ", ".join(module for module in MODULES if not isinstance(kernels_of(module, version), str))
        if builds:
            said.append(f"{builds}: version {version}, {serves[version]} in full graphs, on {gpus.words}")
    if said:
        return Finding(name, "ok", "; ".join(said))
    return Finding(name, "skip", f"not installed (optional): {HOW_TO_INSTALL}")


def _is_python(program: str) -> bool:
    """True for the interpreter itself, by any of its names: ``python3.13`` is, and ``python_train.py`` is not."""
    return re.fullmatch(r"python[\d.]*t?(\.exe)?", Path(program).name) is not None


def _wait_for_threads(before: set[threading.Thread]) -> None:
    """Wait for the threads that a program leaves running, as Python does at its end."""
    if any(not thread.daemon for thread in set(threading.enumerate()) - before):
        # Threads of executors, and those that watch the main one, end only once Python says that it ends.
        threading._shutdown()  # type: ignore[attr-defined]


def _run_python(command: Sequence[str]) -> int:
    """Run a Python program in this process, as ``python ...`` or an installed command would; return its exit status."""
    program, *arguments = command
    if not _is_python(program):
        arguments = [shutil.which(program) or program, *arguments]
    before, threads = (sys.argv, sys.path[:]), set(threading.enumerate())
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        _wait_for_threads(threads)
        sys.argv, sys.path[:] = before
    return 0


def _worker_reports(report: Path, started: float) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yield the reports that workers wrote since then beside the main process's own, with their findings."""
    for path in report.parent.glob(f"{glob.escape(report.stem)}.*.json"):
        try:
            if path.stat().st_mtime < started:
                continue
            saved = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"simplegraph audit: {path} was not read: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if isinstance(saved, dict) and {"process", "survey_seconds", "findings"} <= saved.keys():  # else another's file
            yield path.with_suffix(report.suffix), saved["findings"]


def _audit(options: argparse.Namespace) -> int:
    """Run a program under an audit; return its exit status, or 3 where that is 0 and a finding is of `fail_on`."""
    from simplegraph.doctor.audit import EVERY, VARIABLE, Audit

    report, started = Path(options.report), time.time()
    os.environ |= {VARIABLE: str(report), EVERY: str(options.every)}  # for workers that load plugins
    with Audit.start(options.every, nan=options.nan, path=report) as audit:
        status = _run_python(options.program)
    kinds = [finding.kind for finding in audit.findings]
    written = [] if audit.saved is None else [audit.saved]
    for path, findings in _worker_reports(report, started):
        written.append(path)
        kinds += [finding["kind"] for finding in findings]
    lines = [f"  report: {path}" for path in written]
    print("\n".join([f"simplegraph audit: {audit}", *lines]), file=sys.stderr)
    return status or (3 if set(kinds) & set(options.fail_on) else 0)


def _advise(options: argparse.Namespace) -> int:
    """Run a program, say where it would gain from graphs, and return its exit status."""
    from simplegraph.doctor.advise_page import write_advice
    from simplegraph.integrations.advice import advisor

    report, process = Path(options.report), os.getpid()
    if report.suffix == ".json" or report.is_dir() or not os.access(report.parent, os.W_OK):
        raise ConfigError(f"the report's path is {options.report!r}; expected an HTML file in a folder to write to.")
    with contextlib.ExitStack() as end, advisor(simplegraph) as advice:

        @end.callback  # also where the program is interrupted
        def tell() -> None:
            if os.getpid() == process:  # else this is a child that the program forked
                print(
                    f"simplegraph advise:\n{advice}\n  report: {write_advice(advice.to_dict(), report)}",
                    file=sys.stderr,
                )

        return _run_python(options.program)


def _explain(options: argparse.Namespace) -> str:
    from simplegraph.doctor.explain import all_names, explain

    if (options.name is not None) is options.all:
        raise ConfigError("expected the name of a reason or of another section, or --all")
    return all_names() if options.all else explain(options.name)


def _kinds(value: str) -> list[str]:
    from simplegraph.doctor.audit import KINDS

    kinds = value.split(",")
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {', '.join(KINDS)}")
    return kinds


def _check_program(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    """End the command if there is no such program, or not one that can be run in this process."""
    options.program = options.program[options.program[:1] == ["--"] :]
    if not options.program:
        command.error("no program to run; expected -- python script.py ...")
    program, *arguments = options.program
    is_python = _is_python(program)
    has_option = arguments[:1] != ["-m"] and any(argument[:1] == "-" for argument in arguments[:1])
    if is_python and (has_option or arguments in ([], ["-m"])):
        command.error("expected -- python script.py ..., or -- python -m module ..., without options of Python's own")
    runs = arguments[0] if is_python else shutil.which(program) or program
    if not (is_python and runs == "-m") and not Path(runs).exists():
        command.error(f"there is no {runs} to run; expected -- python script.py ...")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; without a command, print what there is."""
    if not hasattr(simplegraph, "__version__"):  # files of another package lie over ours
        print(f"FAIL  import name: {_installed().detail}")
        return 1
    as_module = Path(sys.argv[0]).name == "__main__.py"
    parser = argparse.ArgumentParser(
        prog="python -m simplegraph" if as_module else "simplegraph",
        description=_PAGE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=simplegraph.__version__, help="print the version")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    trial = commands.add_parser("doctor", help="try what this machine can do: ok, skip (not available here) or FAIL")
    trial.add_argument("--json", action="store_true", help="print the findings as JSON")
    explained = commands.add_parser("explain", help="print what the troubleshooting page says about a message")
    explained.add_argument("name", nargs="?", metavar="NAME", help="as a message names it, such as capture-failed")
    explained.add_argument("--all", action="store_true", help="list the names")
    purpose = "run a program, and check the graphs that it captures"
    audited = commands.add_parser("audit", help=purpose, description=f"{purpose.capitalize()}.")
    audited.add_argument("--every", type=int, default=100, metavar="N", help="check a graph at every N-th replay (100)")
    audited.add_argument("--nan", action="store_true", help="look for NaN in outputs of checked replays, too")
    audited.add_argument(
        "--fail-on", type=_kinds, default=[], metavar="KINDS", help="exit with 3 on these, such as stale,freed"
    )
    purpose = "run a program, and find where it would gain from graphs"
    advised = commands.add_parser("advise", help=purpose, description=f"{purpose.capitalize()}.")
    for command, report in ((audited, "audit.html"), (advised, "advice.html")):
        command.add_argument("--report", default=report, metavar="PATH", help=f"where to write the report ({report})")
        command.add_argument("program", nargs=argparse.REMAINDER, help="-- python script.py ...")
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    if options.command == "explain":
        try:
            print(_explain(options), flush=True)
        except ConfigError as error:
            explained.error(str(error))
        except BrokenPipeError:  # such as of `| head`; Python would fail once more when it flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    for name, command, run in (("audit", audited, _audit), ("advise", advised, _advise)):
        if options.command == name:
            _check_program(options, command)
            try:
                return run(options)
            except ConfigError as error:
                command.error(str(error))
    findings = doctor()
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) | {"ok": finding.ok} for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.status:<4}  {finding.name}: {finding.detail}")
    return 0 if all(finding.ok for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
