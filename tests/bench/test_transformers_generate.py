"""The arms of the generation benchmark give the same tokens, and its table says what they are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from bench import transformers_generate

CPU = torch.device("cpu")


def test_every_arm_gives_the_same_tokens_and_graphs_are_replayed() -> None:
    plan = transformers_generate.Plan("tiny", batch=2, prompt=5, tokens=6, rounds=2)
    figures = {arm: transformers_generate.run_arm(plan, arm, CPU, torch.float32) for arm in plan.arms}
    plain, static, graphs, own_norms = (figures[arm]["tokens"] for arm in transformers_generate.ARMS)
    assert plain == static == graphs == own_norms
    assert len(plain[0]) == 6
    assert figures["simplegraph"]["report"]["replays"] == 3 * 5 - 1
    assert all(len(found["seconds"]) == 3 for found in figures.values())


def test_the_table_compares_with_plain_and_says_that_a_cpu_is_no_speed() -> None:
    arms = {
        "plain": {"ms_per_token": 30.0, "first_seconds": 2.0},
        "simplegraph": {"ms_per_token": 3.0, "first_seconds": 2},
    }
    plan = {"shape": "tiny", "batch": 1, "prompt": 8, "tokens": 8}
    table = transformers_generate.render({"plan": plan, "device": "cpu", "same_tokens": 8, "arms": arms})
    assert transformers_generate.NOT_SPEED in table
    assert "3.000 ms a token, 10.00 times plain; first generation 2.00 s" in table
