"""Greedy tokens and logits of every engine arm beside float32's: no times, so beside the benchmarks in the JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.models.workload import Workload
from bench.serve import agreement
from bench.tools.measure import Figures


def test_agreement(device: torch.device, shown: Any, keep_untimed: Callable[[str, Figures], None]) -> None:
    on_gpu = device.type == "cuda"
    llama = Workload("8b" if on_gpu else "tiny", (1,), device, lm_head=True).build().bfloat16()
    prompts = agreement.prompts_of(*((16, 128) if on_gpu else (3, 12)), llama.config.vocab_size)
    arms, count = agreement.default_arms(device), 64 if on_gpu else 6
    with shown():
        found = agreement.measure(llama, arms, prompts, count)
        print(f"\n{agreement.render(found)}")
    keep_untimed("agreement", found)
