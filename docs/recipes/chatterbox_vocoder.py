"""The vocoder of chatterbox: graphs for each length of a chunk; phases and the inverse transform stay eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from chatterbox.models.s3gen.f0_predictor import ConvRNNF0Predictor
from chatterbox.models.s3gen.hifigan import HiFTGenerator

import simplegraph as sg


# Recipe
def add_graphs(vocoder: HiFTGenerator) -> None:
    """Give a vocoder graphs, such as `tts.s3gen.mel2wav`; speak in chunks of few lengths."""
    vocoder._istft = sg.eager_break(vocoder._istft)  # `torch.istft` reads a check of its window back
    sines = vocoder.m_source.l_sin_gen
    sines.forward = sg.eager_break(sines.forward)  # draws phases on the CPU
    vocoder.inference = sg.wrap(vocoder.inference, mode="PIECEWISE", exact_shapes=True)


# Comparison
def main() -> dict[str, Callable[[], object]]:
    """Compare the sound of some chunks, and return what speaks one, to be timed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 512 if device == "cuda" else 64
    blocks = {"source_resblock_kernel_sizes": [7, 7, 11], "source_resblock_dilation_sizes": [[1, 3, 5]] * 3}
    sizes = {"upsample_rates": [8, 5, 3], "upsample_kernel_sizes": [16, 11, 7], **blocks}
    pitch = ConvRNNF0Predictor(cond_channels=width)
    plain = HiFTGenerator(sampling_rate=24000, base_channels=width, f0_predictor=pitch, **sizes).to(device).eval()
    graphed = copy.deepcopy(plain)
    add_graphs(graphed)
    for seed in range(12):
        mel = torch.randn(1, 80, 20 + 10 * (seed % 2), device=device)
        sounds = []
        for vocoder in (plain, graphed):
            torch.manual_seed(seed)
            sounds.append(vocoder.inference(speech_feat=mel))
        torch.testing.assert_close(sounds[1], sounds[0], rtol=1e-3, atol=1e-4)
    print(graphed.inference.graph_report())
    assert graphed.inference.graph_stats.replays >= 8
    kinds = {"plain": plain, "graphs": graphed}
    return {kind: lambda vocoder=vocoder: vocoder.inference(speech_feat=mel) for kind, vocoder in kinds.items()}


if __name__ == "__main__":
    main()
