"""Some samples of torch's databases; ``python -m tests.sweeps`` tries them all."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's databases of operators and modules need it")

import simplegraph as sg
from tests.sweeps import entries
from tests.sweeps.__main__ import KINDS
from tests.sweeps.sweep import Verdict, sweep

pytestmark = pytest.mark.proofs  # as users have them

# Kind, mode, and which of the entries.
CASES = [
    ("modules", "no_grad", slice(None)),
    ("modules", "inference_autocast", slice(None)),
    ("operators", "no_grad", slice(0, None, 7)),
    ("operators", "inference_autocast", slice(1, None, 7)),
    ("in_place", "inference_mode", slice(0, None, 3)),
]
# Differences that are known, by what a defect says of them. An entry is taken out with the defect.
KNOWN = {
    "memory is shared": "an output that is, or shares memory with, an input or another output is a tensor of its own",
    "its inputs themselves": "an input that is returned is another tensor",
    "has strides": "the strides of a view are lost with it",
    "input [0][0] has shape": "an input that is re-shaped in place keeps its shape",
    "__class__ assignment": "a lazy module cannot become what it will be once it is wrapped",
}


@pytest.mark.parametrize(("kind", "mode", "which"), CASES)
def test_every_entry_of_torchs_databases_equals_eager(device: torch.device, kind: str, mode: str, which: slice) -> None:
    if device.type == "cuda":
        pytest.skip("too long here: python -m tests.sweeps --device cuda --chunk 1/4")
    chosen = KINDS[kind]()[which]
    verdicts = [sweep(entry, mode, device, 2) for entry in chosen]
    defects = {
        verdict.name: text for verdict in verdicts for text in verdict.defects.values() if not known(verdict.name, text)
    }
    assert defects == {}
    served = sum(verdict.kind in ("replayed", "defect") for verdict in verdicts)
    assert served > 0.6 * len(verdicts), "what runs eagerly proves little"


def known(name: str, defect: str) -> bool:
    return any(text in f"{name}: {defect}" for text in KNOWN)


class Wrong(torch.nn.Module):
    """Answers otherwise to values that eager sees, and no capture does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 2 if isinstance(self, sg.CudaGraphWrapper) else 3
        return x * factor


def test_the_sweep_sees_a_replay_that_differs(device: torch.device) -> None:
    calls = [((torch.full((2, 3), value, device=device),), {}) for value in (1.0, 2.0, 3.0, 4.0)]
    sample = entries.Sample("one", lambda: Wrong().eval(), calls)
    verdict: Verdict = sweep(entries.Entry("wrong", lambda device, calls: iter([sample])), "no_grad", device)
    assert list(verdict.defects) == ["one"]
