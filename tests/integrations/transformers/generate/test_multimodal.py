"""Models that read images or speech decode by replays and give the tokens of plain `generate`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
import tiny_multimodal  # noqa: E402
from tiny_generation import GREEDY, TOKENS, graphed  # noqa: E402
from unseen_kernel import stand_in_triton  # noqa: E402

from simplegraph.fused.torch_operators import Operators  # noqa: E402

# Models whose `generate` calls that of a part, which is the one to be given graphs.
PARTS = {"blip": "text_decoder", "blip2": "language_model"}


@pytest.mark.parametrize("name", tiny_multimodal.MODELS)
def test_ragged_batches_give_plain_tokens(name: str, device: torch.device) -> None:
    make, batch_of = tiny_multimodal.MODELS[name]
    plain, model = (tiny.build(make, device) for _ in range(2))
    with graphed(getattr(model, PARTS[name]) if name in PARTS else model) as graphs:
        steps = 0
        for seed, lengths in enumerate(([7, 4, 6], [5], [3, 8, 2, 9], [2])):
            batch = batch_of(lengths, device, seed)
            found, expected = (one.generate(**batch, **GREEDY) for one in (model, plain))
            assert torch.equal(found, expected)
            steps += TOKENS - 1
        assert not graphs.stats.failures
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP}
        assert graphs.stats.replays == steps - sum(graphs.stats.eager.values())


@pytest.mark.parametrize("name", PARTS)
def test_graphs_of_a_model_whose_generate_calls_that_of_a_part_name_the_part(name: str, device: torch.device) -> None:
    make, batch_of = tiny_multimodal.MODELS[name]
    plain, model = (tiny.build(make, device) for _ in range(2))
    with graphed(model) as graphs:
        batch = batch_of([6, 4], device)
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.GENERATION] == 1
        assert f"use graph_generation(model.{PARTS[name]})" in str(graphs.report())


def test_an_image_s_positions_are_those_of_its_own_row(device: torch.device) -> None:
    make, batch_of = tiny_multimodal.MODELS["qwen2_vl"]
    plain, model = (tiny.build(make, device) for _ in range(2))
    mixed = batch_of([7, 4], device)
    text = tiny.prompts([9, 3], device)
    with graphed(model) as graphs:
        for batch in (mixed, text, mixed):
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays > 2 * TOKENS


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_rows_may_have_no_image_or_several(
    name: str, beams: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, _ = tiny_multimodal.MODELS[name]
    plain, model = (tiny.build(make, device) for _ in range(2))
    prepare = type(plain).prepare_inputs_for_generation
    batch: dict[str, torch.Tensor] = {}

    @functools.wraps(prepare)
    def with_grids(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass the images' grids at every step, as transformers 5.17 does."""
        prepared = prepare(self, *args, **kwargs)
        is_step = prepared["input_ids"].shape[1] == 1
        return prepared | ({"image_grid_thw": batch["image_grid_thw"]} if is_step else {})

    monkeypatch.setattr(type(plain), "prepare_inputs_for_generation", with_grids)
    with graphed(model, max_batch_size=4 * beams) as graphs:
        for seed, counts in enumerate([[1, 0], [2, 1, 0], [3], [0, 2], [1, 1]]):
            batch.update(tiny_multimodal.images([7, 4, 5][: len(counts)], device, seed, counts))
            found, expected = (one.generate(**batch, **GREEDY, num_beams=beams) for one in (model, plain))
            assert torch.equal(found, expected)
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF}
        assert graphs.stats.replays == 5 * (TOKENS - 1) - sum(graphs.stats.eager.values()) > 3 * TOKENS


@pytest.fixture
def norms_by_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute norms of captured steps as on a GPU: by kernels that no operator mode sees."""
    if device.type == "cuda":
        return
    by_torch = Operators.rms_norm

    def rms_norm(self: Operators, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Any:
        def kernel(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
            out.copy_(by_torch(self, x, weight, eps, offset))

        out = torch.empty_like(x)
        kernels(kernel, module="simplegraph.fused.row_kernels").run(out, x, weight, eps, grid=(1,))
        return out

    kernels = stand_in_triton(monkeypatch)
    monkeypatch.setattr(Operators, "rms_norm", rms_norm)


@pytest.mark.usefixtures("norms_by_triton")
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_that_each_prefill_stores_on_the_model_drop_no_graph(
    name: str, beams: int, device: torch.device
) -> None:
    make, batch_of = tiny_multimodal.MODELS[name]
    plain, model = (tiny.build(make, device) for _ in range(2))
    kept = []  # so that a later tensor has another address
    batches = [
        batch_of(lengths, device, seed) for seed, lengths in enumerate(([7, 4, 6], [5, 1], [3, 8, 2, 9], [2, 2]))
    ]
    with graphed(model, max_batch_size=4 * beams, capture_sizes=[4 * beams]) as graphs:
        for batch in (*batches, tiny.prompts([9, 3], device), *batches):
            found, expected = (one.generate(**batch, **GREEDY, num_beams=beams) for one in (model, plain))
            assert torch.equal(found, expected)
            kept.append(model.model.rope_deltas)
        assert len({deltas.data_ptr() for deltas in kept}) > 1
        assert graphs.stats.captures == 2, graphs.report()  # with and without images
        assert graphs.stats.recaptures == 0
        assert graphs.stats.replays == 9 * (TOKENS - 1) - sum(graphs.stats.eager.values()) > 8 * (TOKENS - 1)


@pytest.mark.parametrize("name", ["speech2text", "moonshine"])
def test_speech_in_beams(name: str, device: torch.device) -> None:
    make, batch_of = tiny_multimodal.MODELS[name]
    plain, model = (tiny.build(make, device) for _ in range(2))
    with graphed(model, max_batch_size=8) as graphs:
        for seed, lengths in enumerate(([7, 4], [5])):
            found, expected = (
                one.generate(**batch_of(lengths, device, seed), **GREEDY, num_beams=3) for one in (model, plain)
            )
            assert torch.equal(found, expected)
        assert graphs.stats.replays == 2 * (TOKENS - 1) - sum(graphs.stats.eager.values()) > TOKENS


def test_an_argument_that_changes_its_shape_at_every_step_is_refused(device: torch.device) -> None:
    class Looking(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: Any = None, attention_mask: Any = None, seen: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, attention_mask, **kwargs)

        def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(input_ids, **kwargs) | {"seen": input_ids.clone()}

    plain, model = (tiny.build(lambda: Looking(transformers.LlamaConfig(**tiny.LLAMA)), device) for _ in range(2))
    batch = tiny.prompts([6, 4], device)
    with graphed(model) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.details[Reason.OPAQUE_ARGUMENT] == "seen of shape (2, 7) at a decode step"
        assert graphs.stats.replays == 0
