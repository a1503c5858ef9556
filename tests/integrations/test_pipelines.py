"""`graph_pipeline` and sentence encoders, on stand-ins with the protocol of the libraries' own: one line each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.integrations.diffusers import graph_pipeline

CHANNELS, WIDTH = 4, 8


class Denoiser(nn.Module):
    """Takes a timestep, a prompt and keyword flags, as a UNet does, and returns a tuple or an object."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(in_channels=CHANNELS)
        self.image = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.time = nn.Linear(1, CHANNELS)
        self.text = nn.Linear(WIDTH, CHANNELS)

    def forward(self, sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, return_dict: bool = True) -> Any:
        steps = timestep if torch.is_tensor(timestep) else torch.tensor([timestep], device=sample.device)
        steps = steps.reshape(-1).to(sample.device).expand(sample.shape[0])[:, None].to(sample.dtype) / 1000
        given = self.time(steps) + self.text(encoder_hidden_states.mean(1))
        found = self.image(sample + given[..., None, None]).tanh()
        return {"sample": found} if return_dict else (found,)


class Autoencoder(nn.Module):
    """Is called by `decode`, never by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, CHANNELS, 4, 4)
        self.decoder = nn.ConvTranspose2d(CHANNELS, 3, 4, 4)
        self.post_quant_conv = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def encode(self, image: Tensor) -> Tensor:
        return self.encoder(image)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        return (self.decoder(self.post_quant_conv(latents)),)


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.table(input_ids),)


class Checker(nn.Module):
    def forward(self, images: Any) -> Any:
        return images.numpy()


class Pipeline:
    """Has the models of a latent diffusion pipeline, its loop, and setters that keep a configuration."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(3)
        self.config: dict[str, str] = {}
        self.unet = Denoiser().to(device).eval()
        self.vae = Autoencoder().to(device).eval()
        self.text_encoder = TextEncoder().to(device).eval()
        self.safety_checker = Checker()
        self.tokenizer = object()
        self.device = device

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.config[name] = f"{type(value).__module__}.{type(value).__name__}"

    @property
    def components(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("config", "device")}

    @torch.no_grad()
    def __call__(
        self, prompts: int = 1, size: int = 8, steps: int = 8, guidance: float = 2.0, numbers: bool = False
    ) -> Any:
        generator = torch.Generator().manual_seed(prompts * size)
        ids = torch.randint(50, (2 * prompts, 6), generator=generator).to(self.device)
        latents = torch.randn(prompts, CHANNELS, size, size, generator=generator).to(self.device)
        text = self.text_encoder(ids)[0]
        for step in range(900, 900 - 50 * steps, -50):
            timestep: Any = step if numbers else torch.tensor(step, device=self.device)
            both = torch.cat([latents, latents])
            noise = self.unet(both, timestep, encoder_hidden_states=text, return_dict=False)[0]
            empty, full = noise.chunk(2)
            latents = latents - 0.1 * (empty + guidance * (full - empty))
        return self.vae.decode(latents, return_dict=False)[0]


@pytest.mark.proofs
def test_a_pipeline_in_one_line_gives_the_same_images(device: torch.device) -> None:
    plain, pipe = Pipeline(device), Pipeline(device)
    with graph_pipeline(pipe, max_batch_size=8) as graphs:
        for prompts, size in ((1, 8), (1, 8), (2, 8), (1, 12), (2, 8), (1, 8), (1, 12)):
            found, expected = (each(prompts, size) for each in (pipe, plain))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert list(graphs.parts) == ["unet", "vae.encoder", "vae.decoder", "text_encoder"]
        stats = graphs.parts["unet"].graph_stats
        assert stats.replays >= 30
        assert stats.padded_tokens == 0
        assert graphs.parts["vae.decoder"].graph_stats.replays >= 1
        assert graphs.parts["text_encoder"].graph_stats.replays >= 1
        assert "safety_checker runs eagerly" in str(graphs.report())
        assert graphs.report().to_dict()["parts"]["unet"]["replays"] == stats.replays
        assert repr(graphs) == "<GraphedParts of Pipeline: unet, vae.encoder, vae.decoder, text_encoder>"


def test_timesteps_that_are_numbers_have_a_graph_each_and_give_the_same_images(device: torch.device) -> None:
    plain, pipe = Pipeline(device), Pipeline(device)
    with graph_pipeline(pipe, max_batch_size=8) as graphs:
        for _ in range(4):
            found, expected = (each(steps=4, numbers=True) for each in (pipe, plain))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert graphs.parts["unet"].graph_stats.captures == 4
        assert graphs.parts["unet"].graph_stats.replays == 12


def test_the_models_keep_their_classes_and_come_back(device: torch.device) -> None:
    pipe = Pipeline(device)
    before, config = pipe.components, dict(pipe.config)
    decoder = pipe.vae.decoder
    graphs = graph_pipeline(pipe)
    assert isinstance(pipe.unet, Denoiser)
    assert pipe.config == config
    assert pipe.unet.state_dict().keys() == before["unet"].state_dict().keys()
    assert "decoder.weight" in pipe.vae.state_dict()
    pipe()
    graphs.remove()
    graphs.remove()
    assert pipe.components == before
    assert pipe.vae.decoder is decoder
    assert all(not part.graph_stats.graphs for part in graphs.parts.values())


def test_more_resolutions_than_the_bound_stay_bounded_and_right(device: torch.device) -> None:
    plain, pipe = Pipeline(device), Pipeline(device)
    with graph_pipeline(pipe, max_signatures=2, parts=["unet"]) as graphs:
        for size in (8, 12, 16, 8, 12, 16):
            torch.testing.assert_close(pipe(1, size), plain(1, size), rtol=1e-4, atol=1e-5)
            assert len(graphs.parts["unet"].graph_stats.graphs) <= 2
        assert list(graphs.parts) == ["unet"]
        assert graphs.parts["unet"].graph_stats.flushes >= 2


def test_weights_that_are_changed_meanwhile_are_followed(device: torch.device) -> None:
    """A LoRA that is fused writes in place, one that is loaded puts another layer in the place of one."""
    plain, pipe = Pipeline(device), Pipeline(device)
    with graph_pipeline(pipe):
        for change in ("nothing", "fused", "loaded"):
            for each in (pipe, plain):
                if change == "fused":
                    with torch.no_grad():
                        each.unet.text.weight.mul_(1.5)
                elif change == "loaded":
                    torch.manual_seed(7)
                    each.unet.text = nn.Sequential(each.unet.text, nn.Linear(CHANNELS, CHANNELS)).to(device).eval()
            torch.testing.assert_close(pipe(), plain(), rtol=1e-4, atol=1e-5)


def test_what_is_no_pipeline_is_refused(device: torch.device) -> None:
    with pytest.raises(sg.ConfigError, match="graph_pipeline got a Linear"):
        graph_pipeline(nn.Linear(2, 2))
    with pytest.raises(sg.ConfigError, match="found no model decoder; the pipeline has unet, vae"):
        graph_pipeline(Pipeline(device), parts=["decoder"])
    offloaded = Pipeline(device)
    offloaded.unet._hf_hook = object()  # type: ignore[assignment]
    with pytest.raises(sg.ConfigError, match=r"unet of the pipeline: offloaded .* enable_model_cpu_offload"):
        graph_pipeline(offloaded)
    twice = Pipeline(device)
    graph_pipeline(twice)
    with pytest.raises(sg.ConfigError, match="unet of the pipeline has graphs already"):
        graph_pipeline(twice)
    meta = Pipeline(device)
    meta.vae.to("meta")
    with pytest.raises(sg.ConfigError, match="all models of the pipeline on one device"):
        graph_pipeline(meta)


# Sentence encoders.

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

from simplegraph.integrations.transformers import graph_encoder  # noqa: E402


class Tokens(nn.Module):
    """Runs the language model of a sentence encoder, by a dict of features that it adds to."""

    def __init__(self, auto_model: Any) -> None:
        super().__init__()
        self.auto_model = auto_model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        features["token_embeddings"] = self.auto_model(**inputs, return_dict=False)[0]
        return features


class Pooling(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None]
        features["sentence_embedding"] = (features["token_embeddings"] * mask).sum(1) / mask.sum(1)
        return features


class SentenceEncoder(nn.Sequential):
    """Sorts by length, encodes in batches, and puts the results in order again, as `encode` does."""

    def encode(self, sentences: list[list[int]], batch_size: int = 4) -> Tensor:
        device = next(self.parameters()).device
        order = sorted(range(len(sentences)), key=lambda at: -len(sentences[at]))
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                longest = max(len(sentences[at]) for at in chosen)
                rows = [sentences[at] + [0] * (longest - len(sentences[at])) for at in chosen]
                ids = torch.tensor(rows, device=device)
                features = self({"input_ids": ids, "attention_mask": (ids != 0).long()})
                found |= dict(zip(chosen, features["sentence_embedding"], strict=True))
        return torch.stack([found[at] for at in range(len(sentences))])


def test_a_sentence_encoder_in_one_line_gives_the_same_embeddings(device: torch.device) -> None:
    def make() -> SentenceEncoder:
        bert = tiny.build(lambda: transformers.BertModel(transformers.BertConfig(**tiny.BERT)), device)
        return SentenceEncoder(Tokens(bert), Pooling()).eval()

    plain, model = make(), make()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (22,), generator=generator).tolist()
    sentences = [torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    with graph_encoder(model, lengths=[8, 16, 24, 32], max_batch_size=4) as graphs:
        for _ in range(3):
            torch.testing.assert_close(model.encode(sentences), plain.encode(sentences), rtol=1e-3, atol=1e-4)
        assert graphs.stats.replays >= 5
        assert not graphs.stats.failures
    calls = graphs.stats.replays
    model.encode(sentences)
    assert graphs.stats.replays == calls
