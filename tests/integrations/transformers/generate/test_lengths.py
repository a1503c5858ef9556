"""Models that compute with the length of their cache in Python decode by replays, as long as every length agrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_lengths  # noqa: E402
import tiny_models as tiny  # noqa: E402
from tiny_generation import GREEDY, TOKENS, graphed  # noqa: E402

from simplegraph.integrations.transformers.generate.known_length import KnownLength  # noqa: E402

SERVED = {
    name: tiny_lengths.MODELS[name]
    for name in ("mpt", "trocr", "trocr_sinusoidal", "xglm", "opt", "bloom", "m2m100", "led", "bart")
}


@pytest.mark.parametrize("name", SERVED)
def test_ragged_batches_give_plain_tokens_and_logits(name: str, device: torch.device) -> None:
    if name == "trocr_sinusoidal" and device.type == "cuda":
        pytest.skip("transformers' own TrOCR keeps these positions on the CPU")
    plain, model = (tiny.build(SERVED[name], device) for _ in range(2))
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    with graphed(model) as graphs:
        steps = 0
        for seed, lengths in enumerate(([7, 4, 6], [5], [9, 9, 2, 3], [1], [3, 7])):
            batch = tiny.prompts(lengths, device, seed)
            found, expected = (one.generate(**batch, **settings) for one in (model, plain))
            assert torch.equal(found.sequences, expected.sequences)
            for actual, wanted in zip(found.logits, expected.logits, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)
            steps += TOKENS - 1
        assert not graphs.stats.failures
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP}
        assert graphs.stats.replays == steps - sum(graphs.stats.eager.values())


def test_experts_that_are_routed_in_python_give_plain_tokens_and_a_reason(device: torch.device) -> None:
    plain, model = (tiny.build(tiny_lengths.MODELS["nllb_moe"], device) for _ in range(2))
    with graphed(model) as graphs:
        for count, lengths in enumerate(([7, 4, 6], [7, 4, 6]), start=1):
            batch = tiny.prompts(lengths, device)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
            assert graphs.stats.eager[Reason.GENERATION] == count
        assert graphs.stats.replays == 0


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda length: length > 9, False),
        (lambda length: length + 2 > 6, None),  # 3 to 6 answer no, 7 yes
        (lambda length: 1 + length + 2 > 10, False),
        (lambda length: length >= 3, True),
        (lambda length: max(0, 1 - (length + 1)), 0),
        (lambda length: length - 1 < 0, False),
        (lambda length: 4 < length, None),  # noqa: SIM300
        (lambda length: length == 5, None),
        (lambda length: length == 9, False),
        (lambda length: length != 9, True),
    ],
)
def test_a_question_is_answered_only_if_all_lengths_agree(
    ask: Callable[[Any], Any], answer: Any, device: torch.device
) -> None:
    for value in range(3, 7):
        length = torch.tensor(value, device=device)
        with KnownLength(length, 3, 6):
            found = ask(length)
        assert type(found) is (torch.Tensor if answer is None else type(answer))
        assert bool(found) == bool(ask(value))


@pytest.mark.parametrize(
    "write",
    [
        lambda number: number.mul_(3),
        lambda number: number.add_(3, alpha=4),
        lambda number: number.clamp_(min=12),
        lambda number: number.fill_(12),
        lambda number: number.__iadd__(9),
        lambda number: number.sub_(-9),
        lambda number: number.gt_(0).add_(11),
    ],
)
def test_a_number_that_a_model_writes_in_place_is_not_taken_for_what_it_was(
    write: Callable[[torch.Tensor], object], device: torch.device
) -> None:
    length = torch.tensor(5, device=device)
    with KnownLength(length, 4, 6):
        number = length + 0
        write(number)
        found = number > 7
    assert bool(found)


def test_a_range_from_the_length_on_is_a_sum(device: torch.device) -> None:
    length = torch.tensor(5, device=device)
    with KnownLength(length, 1, 9):
        found = torch.arange(length + 1, length + 4, dtype=torch.int32, device=device)
        length.fill_(7)  # which a tensor made of the number 5 would not follow
        later = torch.arange(length, 2 + length, device=device)
    assert found.tolist() == [6, 7, 8]
    assert found.dtype is torch.int32
    assert later.tolist() == [7, 8]
    assert later.dtype is torch.int64
