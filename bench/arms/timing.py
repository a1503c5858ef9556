"""Measures an arm's start, its steps and its memory, and describes the model it ran."""

from __future__ import annotations

import gc
import os
from typing import TypeVar

import torch

from bench.arms.base import Arm, Setup
from bench.models.attention import attention_name
from bench.tools.measure import DeviceMemory, Figures, Timeline, host_microseconds, step_milliseconds

STEP_BATCHES = (1, 8, 64, 256)
A = TypeVar("A", bound=Arm)


def start(arm_class: type[A], setup: Setup) -> tuple[A, Figures]:
    """Start an arm; return it with the seconds since the model was built, and the memory kept and at its peak."""
    gc.collect()
    first = setup.batch(1)
    _ = setup.largest  # made before the timing starts
    before = DeviceMemory.now(setup.device)
    if before:
        torch.cuda.reset_peak_memory_stats(setup.device)
    timeline = Timeline(setup.device)
    arm = arm_class(setup)
    arm.start(first, timeline)
    figures: Figures = {"seconds": timeline.seconds}
    if before:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(setup.device)
        figures |= before.spent(DeviceMemory.now(setup.device))
    return arm, figures


def speeds(arm: Arm, setup: Setup, steps: int) -> Figures:
    """Measure step times in ms by batch, and on a GPU microseconds of host time per call at batch 1."""
    step_ms = {}
    for count in STEP_BATCHES:
        if count <= setup.workload.max_batch:
            step_ms[str(count)] = step_milliseconds(arm.call(setup.batch(count)), setup.device, steps=steps)
    if setup.device.type != "cuda":
        return {"step_ms": step_ms}
    return {"step_ms": step_ms, "host_us": host_microseconds(arm.call(setup.batch(1)), setup.device, calls=steps)}


def shape(setup: Setup) -> Figures:
    """Describe the model, the sizes and the attention that ran."""
    weight = next(setup.model.parameters())
    return {
        "model": setup.workload.model,
        "layers": setup.model.config.num_hidden_layers,
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": setup.device.type,
        "sizes": sorted(setup.workload.sizes),
        "context": setup.workload.context,
        "lm_head": setup.workload.lm_head,
        "attention": attention_name(weight.device, weight.dtype),
        "pid": os.getpid(),
        "tp": setup.workload.shard.size,
    }
