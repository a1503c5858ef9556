"""``python -m simplegraph doctor``: what this machine can do, found out by trying it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simplegraph import __version__
from simplegraph.errors import SimpleGraphError


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was tried.

    Attributes:
        name: what; ok: whether it works; detail: what was seen, or what went wrong and what to do.
    """

    name: str
    ok: bool
    detail: str


def doctor() -> list[Finding]:
    """Try capture and replay, and everything else that this library needs, on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("simplegraph").setLevel(logging.ERROR)
    versions = f"simplegraph {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    findings = [Finding("versions", True, versions), _gpu()]
    for name, trial in _TRIALS.items():
        try:
            with torch.inference_mode():
                findings.append(Finding(name, True, trial(device)))
        except Exception as error:
            findings.append(Finding(name, False, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    findings += [_package(name) for name in _OPTIONAL]
    return [*findings, _flash_attention()]


def attention_findings() -> list[Finding]:
    """Try each attention backend in a full graph, at lengths that it was not captured with."""
    from simplegraph.attention.selftest import self_test

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    findings = []
    for trial in self_test(device):
        detail = trial.problem or f"{trial.rounds} sets of lengths, largest relative error {trial.error:.1e}"
        ok = trial.problem is None or not trial.installed
        findings.append(Finding(f"attention {trial.backend}, {trial.batches} batches", ok, detail))
    return findings


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", True, "none: graphs run on the emulator, which checks CUDA's rules and gives no speed")
    properties = torch.cuda.get_device_properties(0)
    gigabytes = properties.total_memory / 2**30
    return Finding("GPU", True, f"{properties.name}, {gigabytes:.0f} GiB, CUDA {torch.version.cuda}")


class _Function(nn.Module):
    """The smallest module worth capturing: it calls a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def _graphed(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    from simplegraph.module.mixin import wrap

    return wrap(_Function(function).eval(), capture_sizes=[2, 4], verify=0, progress=False)


def _try_replay(device: torch.device) -> str:
    model = _graphed(lambda x: x * 2)
    x = torch.randn(3, 5, device=device)
    model.capture_graphs(x)
    if not torch.equal(model(x), x * 2) or model.graph_stats.replays != 1:
        raise RuntimeError("a replay did not give eager's answer")
    return "captured two sizes, replayed one padded: equal to eager"


def _try_recovery(device: torch.device) -> str:
    model = _graphed(lambda x: x if x.sum().item() < 0 else x * 2)
    x = torch.ones(4, 5, device=device)  # sums to more than 0: the forward doubles it
    answers = [model(x) for _ in range(3)]
    good = _try_replay(device)
    torch.rand(1, device=device)
    if not all(torch.equal(answer, x * 2) for answer in answers) or not model.graph_stats.failures:
        raise RuntimeError("a capture that should fail did not, or its calls went wrong")
    return f"a forward that reads back fails to capture and runs eagerly; afterwards: {good}"


def _try_random(device: torch.device) -> str:
    model = _graphed(lambda x: x + torch.rand_like(x))
    x = torch.zeros(4, 5, device=device)
    model.capture_graphs(x)
    torch.manual_seed(1)
    replayed = torch.stack([model(x) for _ in range(2)])
    torch.manual_seed(1)
    if not torch.equal(replayed, torch.stack([torch.rand_like(x) for _ in range(2)])):
        raise RuntimeError("random numbers in a replay are not eager's")
    return "replays draw the numbers that eager would"


def _try_borrowing(device: torch.device) -> str:
    if device.type == "cpu":
        return "not needed by the emulator"
    from simplegraph.graph.cuda.device import _CAN_BORROW

    if not _CAN_BORROW:
        raise RuntimeError("this torch has no non-owning tensors; every captured size keeps its own outputs")
    return "outputs of all sizes share the pool's memory"


_TRIALS = {
    "capture and replay": _try_replay,
    "recovery from a failed capture": _try_recovery,
    "random numbers": _try_random,
    "memory sharing between sizes": _try_borrowing,
}
_OPTIONAL = {
    "flashinfer": "pip install 'simplegraph[flashinfer]'",
    "transformers": "pip install 'simplegraph[bench]'",
    "matplotlib": "pip install 'simplegraph[plot]'",
}


def _package(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, True, f"not installed (optional): {_OPTIONAL[name]}")
    distribution = {"flashinfer": "flashinfer-python"}.get(name, name)
    try:
        return Finding(name, True, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, True, "installed, version unknown")


def _flash_attention() -> Finding:
    """Find flash-attention, and say which versions of its kernels it has."""
    name = "flash-attention"
    if importlib.util.find_spec("numpy") is None:
        return Finding(name, True, "not tried, for want of numpy: pip install 'simplegraph[attention]'")
    from simplegraph.attention.backends.flash_attention import MODULES, problem_of

    supports = {3: "any batch in full graphs (Hopper)", 2: "uniform decode in full graphs"}
    found = {module: [v for v in supports if problem_of(module, v) is None] for module in MODULES}
    said = [
        f"{module}: " + ", ".join(f"version {v}, {supports[v]}" for v in versions)
        for module, versions in found.items()
        if versions
    ]
    missing = "not installed (optional): python -m simplegraph install-flash-attention vllm==VERSION"
    return Finding(name, True, "; ".join(said) or missing)


def _install(options: argparse.Namespace) -> int:
    from simplegraph.attention.install import install_flash_attention

    try:
        print(f"installed {install_flash_attention(options.source, options.target, force=options.force)}")
    except SimpleGraphError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m simplegraph", description="CUDA graphs for any PyTorch module.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    trial = commands.add_parser("doctor", help="say what this machine can do, by trying it")
    trial.add_argument("--attention", action="store_true", help="also try every attention backend at random lengths")
    trial.add_argument("--json", action="store_true", help="print the findings as JSON")
    kernels = commands.add_parser("install-flash-attention", help="take FlashAttention-3's kernels out of a vLLM wheel")
    kernels.add_argument("source", help="a wheel file, or a requirement such as vllm==0.24.0, built for this torch")
    kernels.add_argument("--target", type=Path, help="folder that gets the package; site-packages by default")
    kernels.add_argument("--force", action="store_true", help="replace a package that is there")
    options = parser.parse_args(argv)
    if options.command == "install-flash-attention":
        return _install(options)
    findings = doctor() + (attention_findings() if options.attention else [])
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name}: {finding.detail}")
    return 0 if all(finding.ok for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
