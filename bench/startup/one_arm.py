"""Measures one arm in this process: starts it, compares it with eager, times it."""

from __future__ import annotations

import argparse
import dataclasses

import torch

import simplegraph as sg
from bench.arms import load_arm, timing
from bench.arms.base import Arm, Setup
from bench.arms.correctness import compare_with_eager, counts_to_compare, eager_noise
from bench.models.attention import attention_name
from bench.models.workload import Workload
from bench.startup.results import medians
from bench.tools import environment, torchrun
from bench.tools.measure import Figures, few_threads, say

AGAIN = 3  # starts in a process that has started before


def measure_arm(options: argparse.Namespace) -> Figures:
    """Build, start, compare, then time; a mismatch gives no figures."""
    shard, ranks, device = torchrun.start(options.tp, f"bench/{options.tp_run}", options.device)
    arm_class = load_arm(options.arm)
    arm_class.check_available(device)
    if options.preloaded:
        sg.preload(device).wait()
    workload = Workload(
        options.model, options.sizes, device, lm_head=options.lm_head, layers=options.layers, shard=shard
    )
    say(f"{options.arm}: building {options.model} on {device}")
    setup = Setup(workload.build(), workload, ranks)
    with torch.inference_mode(), few_threads(device):
        weight = next(setup.model.parameters())
        say(f"{options.arm}: attention is {attention_name(weight.device, weight.dtype)}")  # loads it, too
        arm_class.load(setup)
        arm, started = timing.start(arm_class, setup)
        say(f"{options.arm}: {', '.join(f'{name} {s:.2f} s' for name, s in started['seconds'].items())}")
        comparisons = compare_with_eager(arm, setup, counts_to_compare(sorted(workload.sizes)))
        figures = started | {"correct": [dataclasses.asdict(one) for one in comparisons]}
        figures |= {"eager_noise": eager_noise(setup)}
        figures |= timing.speeds(arm, setup, options.steps)
        figures |= arm.replays.figures() | {"graphs": arm.graphs(), "details": arm.details(), "notes": arm.notes}
        if arm_class.restartable and device.type == "cuda":
            del arm
            figures["primed"] = medians([_start_again(arm_class, setup) for _ in range(AGAIN)])
    figures |= {"preloaded": options.preloaded}
    return figures | timing.shape(setup) | {"environment": environment.describe()}


def _start_again(arm_class: type[Arm], setup: Setup) -> Figures:
    arm, figures = timing.start(arm_class, setup)
    return figures | {"details": arm.details()}
