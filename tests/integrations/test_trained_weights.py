"""Trained models whose weights lie in their packages: with graphs, the task's own result is eager's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import simplegraph as sg

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
RATE = 16000


def installed(name: str) -> Any:
    return pytest.importorskip(name, exc_type=ImportError)


def tones(pitches: list[float], device: torch.device, seconds: float = 0.5) -> Tensor:
    moments = torch.arange(int(RATE * seconds), device=device) / RATE
    return torch.stack([(2 * torch.pi * pitch * moments).sin() for pitch in pitches])


def test_pesto_hears_the_same_pitches(device: torch.device) -> None:
    model = installed("pesto").load_model("mir-1k_g7", step_size=10.0, sampling_rate=RATE).eval().to(device)
    batches = [[220.0, 440.0, 330.0], [262.0], [440.0, 196.0, 330.0], [220.0]] * 3

    def pitches(batch: list[float]) -> tuple[Tensor, Tensor]:
        hertz, confidence, *_ = model(tones(batch, device), convert_to_freq=True, return_activations=False)
        return hertz, confidence

    expected = [pitches(batch) for batch in batches]
    with sg.wrap_parts(model, [batches[0]], call=pitches) as graphs:
        for batch, (hertz, confidence) in zip(batches, expected, strict=True):
            found = pitches(batch)
            torch.testing.assert_close(found[0], hertz, rtol=1e-5, atol=1e-3)
            torch.testing.assert_close(found[1], confidence)
            middle = found[0][:, 15:35].median(1).values.cpu()
            torch.testing.assert_close(middle, torch.tensor(batch), rtol=0.03, atol=0)
        assert graphs.parts["encoder"].graph_stats.replays >= 8


def test_crepe_hears_the_same_pitches(device: torch.device) -> None:
    torchcrepe = installed("torchcrepe")
    torchcrepe.load.model(device, "tiny")
    plain = torchcrepe.infer.model

    def heard(pitch: float) -> Tensor:
        np.random.seed(0)  # what it hears is dithered
        found: Tensor = torchcrepe.predict(
            tones([pitch], device),
            RATE,
            model="tiny",
            decoder=torchcrepe.decode.argmax,
            batch_size=16,
            device=str(device),
        )
        return found

    expected = {pitch: heard(pitch) for pitch in (220.0, 330.0)}
    torchcrepe.infer.model = sg.wrap(plain, capture_sizes=[4, 16], progress=False)
    torchcrepe.infer.model.capacity = "tiny"
    try:
        for pitch in (220.0, 330.0) * 3:
            assert torch.equal(heard(pitch), expected[pitch])
            assert abs(heard(pitch).median().item() / pitch - 1) < 0.02
        assert torchcrepe.infer.model.graph_stats.replays >= 8
    finally:
        torchcrepe.infer.model = plain


def test_facenet_finds_the_same_landmarks(device: torch.device) -> None:
    plain = installed("facenet_pytorch").ONet().eval().to(device)
    model = sg.wrap(plain, capture_sizes=[1, 2, 4, 8], progress=False)
    torch.manual_seed(0)
    for rows in (5, 3, 8, 1, 7, 2, 4) * 3:
        crops = torch.randn(rows, 3, 48, 48, device=device)
        for found, wanted in zip(model(crops), plain(crops), strict=True):  # boxes, landmarks, if it is a face
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert model.graph_stats.replays >= 8


def test_lpips_finds_the_same_distances(device: torch.device) -> None:
    """The trained weights are those of its heads; those of the network below are torchvision's, and random here."""
    lpips = installed("lpips")
    torch.manual_seed(0)
    plain = lpips.LPIPS(net="squeeze", pnet_rand=True, verbose=False).eval().to(device)
    model = sg.wrap(plain, capture_sizes=[1, 2, 4], progress=False)
    for rows in (3, 1, 4, 2) * 4:
        first = torch.rand(rows, 3, 64, 64, device=device) * 2 - 1
        noisy = (first + 0.1 * torch.randn_like(first)).clamp(-1, 1)
        torch.testing.assert_close(model(first, noisy), plain(first, noisy), rtol=1e-4, atol=1e-6)
        assert not model(first, first).any()  # one tensor twice: graphs of its own
    assert model.graph_stats.replays >= 12
