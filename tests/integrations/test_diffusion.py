"""Denoisers of diffusers, as they come: timesteps, guidance, resolutions, pipelines and what their users switch."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_denoisers as tiny
import torch

import simplegraph as sg
from simplegraph import Reason

diffusers = pytest.importorskip("diffusers")

TOKENS = 5


def unet() -> Any:
    return diffusers.UNet2DConditionModel(**tiny.CONDITIONED)


def dit() -> Any:
    return diffusers.DiTTransformer2DModel(**tiny.DIT)


def graphed(module: Any, device: torch.device, **settings: Any) -> Any:
    return sg.wrap(module.to(device).eval(), progress=False, **({"capture_sizes": [2, 4]} | settings))


def unet_call(device: torch.device, rows: int = 2, resolution: int = 16, step: int = 7) -> dict[str, Any]:
    return {
        "sample": torch.randn(rows, 4, resolution, resolution, device=device),
        "timestep": torch.tensor(step, device=device),
        "encoder_hidden_states": torch.randn(rows, TOKENS, tiny.WIDTH, device=device),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-3)


def assert_serves(model: Any, device: torch.device, calls: int = 4, **call: Any) -> None:
    """Right at every call, the last one a replay."""
    replays = model.graph_stats.replays
    for step in range(calls):
        given = unet_call(device, step=step, **call)
        assert_same(model(**given), sg.unwrap(model)(**given))
    assert model.graph_stats.replays > replays


@torch.inference_mode()
def test_a_unet_over_a_schedule_replays_one_graph(device: torch.device) -> None:
    model = graphed(unet(), device)
    for step in (981, 500, 20, 1):
        given = unet_call(device, step=step)
        sample, timestep = given.pop("sample"), given.pop("timestep")
        assert_same(model(sample, timestep, **given), sg.unwrap(model)(sample, timestep, **given))
        assert_same(
            model(sample, timestep, return_dict=False, **given),
            sg.unwrap(model)(sample, timestep, return_dict=False, **given),
        )
    assert model.graph_stats.replays == 6
    assert model.graph_stats.captures == 2  # one that returns an output object, one that returns a tuple


@torch.inference_mode()
def test_a_timestep_that_is_a_number_has_a_graph_for_each_value(device: torch.device) -> None:
    """diffusers makes a tensor of it by a copy from the host, which each graph freezes: pass a tensor."""
    model = graphed(unet(), device)
    given = unet_call(device)
    for step in (5, 9) * 3:
        given["timestep"] = step
        assert_same(model(**given), sg.unwrap(model)(**given))
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays == 4


@torch.inference_mode()
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_guidance_in_two_calls(device: torch.device, outputs: str) -> None:
    """Two calls in a row, of which both results are used: clones are two; static ones must be combined first."""
    model = graphed(unet(), device, outputs=outputs)
    assert_serves(model, device)
    given = unet_call(device)
    prompt, empty = (torch.randn(2, TOKENS, tiny.WIDTH, device=device) for _ in range(2))
    expected = [sg.unwrap(model)(**given | {"encoder_hidden_states": text}).sample for text in (prompt, empty)]
    replays = model.graph_stats.replays
    found = [model(**given | {"encoder_hidden_states": text}).sample for text in (prompt, empty)]
    assert model.graph_stats.replays == replays + 2
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-3)
    if outputs == "static":
        assert found[0].data_ptr() == found[1].data_ptr()
        return
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-3)
    assert not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_resolutions_come_and_go_within_the_bound(device: torch.device) -> None:
    model = graphed(unet(), device, capture_sizes=[2], max_signatures=2, on_too_many_signatures="flush")
    for resolution in (16, 24, 16, 32, 16):
        assert_serves(model, device, resolution=resolution)
        assert len(model.graph_manager.programs) <= 2
    assert model.graph_stats.flushes == 1
    assert model.graph_stats.captures == 4


@torch.inference_mode()
def test_batches_are_padded(device: torch.device) -> None:
    model = graphed(unet(), device)
    for rows in (2, 3, 4, 1):
        assert_serves(model, device, rows=rows)
    assert model.graph_stats.captures == 2


@torch.inference_mode()
def test_as_many_tokens_as_rows_needs_a_word(device: torch.device) -> None:
    """A batch of 5 with 5 tokens of text: which dimension is the batch's cannot be seen, and is not guessed."""
    plain, told = (
        graphed(unet(), device, capture_sizes=[TOKENS], **more)
        for more in ({}, {"batch_dims": {"encoder_hidden_states": 0}})
    )
    for _ in range(4):
        given = unet_call(device, rows=TOKENS)
        assert_same(plain(**given), sg.unwrap(plain)(**given))
        assert_same(told(**given), sg.unwrap(told)(**given))
    assert plain.graph_stats.eager[Reason.AMBIGUOUS_BATCH_DIM] == 4
    assert told.graph_stats.replays == 3


@torch.inference_mode()
def test_a_dit_with_guidance_by_a_doubled_batch(device: torch.device) -> None:
    model = graphed(dit(), device)
    for step in (99, 50, 25, 1):
        for rows in (1, 2):
            latents = torch.randn(rows, 4, 8, 8, device=device).repeat(2, 1, 1, 1)
            labels = torch.tensor([3] * rows + [100] * rows, device=device) % 100
            given = {"timestep": torch.full((2 * rows,), step, device=device), "class_labels": labels}
            assert_same(model(latents, **given), sg.unwrap(model)(latents, **given))
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 5


@torch.inference_mode()
def test_freeu_on_and_off_is_followed(device: torch.device) -> None:
    model = graphed(unet(), device)
    assert_serves(model, device)
    for factors in ((0.9, 0.2, 1.5, 1.6), (0.5, 0.1, 1.1, 1.2)):
        model.enable_freeu(*factors)
        for _ in range(3):  # through a graph where its Fourier transform can be captured
            given = unet_call(device)
            assert_same(model(**given), sg.unwrap(model)(**given))
    model.disable_freeu()
    assert_serves(model, device)


@torch.inference_mode()
def test_other_attention_processors_are_used_at_the_next_call(device: torch.device) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    class Half(AttnProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().__call__(*args, **kwargs) * 0.5

    model = graphed(unet(), device)
    assert_serves(model, device)
    model.set_attn_processor(Half())
    assert_serves(model, device)


@torch.inference_mode()
def test_a_unet_with_lora_scaled_per_call(device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    model = unet()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "style")
    model = graphed(model, device)
    assert_serves(model, device)
    model.disable_adapters()
    assert_serves(model, device)
    model.enable_adapters()
    given = unet_call(device)
    results = []
    for scale in (0.0, 1.0, 3.0) * 3:
        call = given | {"cross_attention_kwargs": {"scale": scale}}
        results.append(model(**call).sample)
        torch.testing.assert_close(results[-1], sg.unwrap(model)(**call).sample, rtol=1e-2, atol=1e-3)
    assert not torch.allclose(results[-1], results[-3], rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_a_pipeline_with_a_wrapped_unet_makes_the_same_image(device: torch.device) -> None:
    module = diffusers.UNet2DModel(**(tiny.PLAIN | {"sample_size": 8})).to(device).eval()
    wrapped = sg.wrap(module, capture_sizes=[2], progress=False)
    images = []
    for denoiser in (module, wrapped):
        pipeline = diffusers.DDIMPipeline(denoiser, diffusers.DDIMScheduler(num_train_timesteps=100))
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        images.append(pipeline(batch_size=2, num_inference_steps=6, generator=generator, output_type="np").images)
    torch.testing.assert_close(torch.tensor(images[1]), torch.tensor(images[0]), rtol=1e-2, atol=1e-3)
    if device.type == "cpu":  # elsewhere the scheduler's timesteps may lie on the host
        assert wrapped.graph_stats.replays >= 4
