"""Comparing arms token by token: what counts as rounding, and what does not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from bench.engine import EngineConfig
from bench.models.workload import Workload
from bench.serve import agreement
from bench.serve.agreement import Disagreement, Generated

SMALL = {"max_num_seqs": 3, "max_num_tokens": 32, "max_model_len": 48, "num_pages": 20}


def test_logits_are_compared_up_to_the_first_other_token() -> None:
    near, far = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.1, 2.0, 0.0])
    wild = torch.tensor([100.0, 0.0, 0.0])
    reference = Generated([[1, 1, 1], [1, 1, 1]], [[near, near, near], [near, near, near]])
    found = Generated([[1, 1, 1], [1, 0, 0]], [[near, near, near], [near, far, wild]])
    figures = agreement.compared(found, reference)
    assert figures["identical_requests"] == 1
    assert figures["error"] == pytest.approx(1.1 / 5**0.5)
    (divergence,) = figures["divergences"]
    assert (divergence["request"], divergence["token"]) == (1, 1)
    assert divergence["gap"] == pytest.approx(1.0)  # of one standard deviation
    assert divergence["largest_error"] == pytest.approx(1.1)


def test_every_arm_is_float32_within_its_rounding() -> None:
    llama = Workload("tiny", (1,), torch.device("cpu"), lm_head=True).build().bfloat16()
    arms = {name: EngineConfig(mode=mode, attention="sdpa", fused=False, **SMALL) for name, mode in MODES.items()}
    figures = agreement.compare(llama, arms, agreement.prompts_of(4, 12, 512), 8)
    assert [one["tokens"] for one in figures.values()] == [32, 32]
    assert 0 < figures["eager"]["error"] < 5e-2
    assert figures["graphs"]["error"] <= figures["graphs"]["allowed"]
    assert "requests identical" in agreement.render({"agreement": figures})


MODES = {"eager": "NONE", "graphs": "FULL_AND_PIECEWISE"}


def test_other_weights_are_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = Workload("tiny", (1,), torch.device("cpu"), lm_head=True).build().bfloat16()
    honest = agreement.generate
    runs = []

    def broken(model: object, *rest: object) -> Generated:
        runs.append(model)
        if len(runs) == 3:  # float32, eager, then this
            with torch.no_grad():
                llama.model.norm.weight.mul_(torch.linspace(0.5, 1.5, llama.model.norm.weight.numel()))
        return honest(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(agreement, "generate", broken)
    arms = {name: EngineConfig(mode="NONE", attention="sdpa", fused=False, **SMALL) for name in MODES}
    with pytest.raises(Disagreement, match="graphs: logits differ from float32's"):
        agreement.compare(llama, arms, agreement.prompts_of(2, 12, 512), 4)
