"""Greedy tokens and logits of every engine arm beside float32's; all figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.models.workload import Workload
from bench.serve import agreement


def test_agreement(record: Callable[..., object], device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    llama = Workload("8b" if on_gpu else "tiny", (1,), device, lm_head=True).build().bfloat16()
    prompts = agreement.prompts_of(*((16, 128) if on_gpu else (3, 12)), llama.config.vocab_size)
    arms, count = agreement.default_arms(device), 64 if on_gpu else 6
    record(lambda: agreement.measure(llama, arms, prompts, count), agreement.render)
