"""Greedy tokens and logits of every engine arm beside float32's; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench.models.workload import Workload
from bench.serve import agreement


def test_agreement(benchmark: Any, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    llama = Workload("8b" if on_gpu else "tiny", (1,), device, lm_head=True).build().bfloat16()
    prompts = agreement.prompts_of(*((16, 128) if on_gpu else (3, 12)), llama.config.vocab_size)
    figures: agreement.Figures = {}
    arms = agreement.default_arms(device)
    count = 64 if on_gpu else 6
    benchmark.pedantic(lambda: figures.update(agreement.measure(llama, arms, prompts, count)), rounds=1)
    benchmark.extra_info.update(figures)
    print(agreement.render(figures))
