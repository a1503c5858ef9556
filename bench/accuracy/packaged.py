"""Scores models whose trained weights come with their packages, on inputs with a known answer."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.accuracy.scores import Score, check_same
from bench.tools.measure import Figures, say
from bench.tools.replays import SOON, Replays
from simplegraph import wrap

WAYS: dict[str, Any] = {"eager": None, "piecewise": "PIECEWISE", "full": "FULL"}
# Of torchcrepe: samples a second, samples of a frame, cents above 10 Hz of the first bin, and of each bin.
RATE, FRAME, FIRST, STEP = 16_000, 1024, 1997.3794084376191, 20
TONES, BATCH = 93, 8


def measure(device: torch.device) -> dict[str, dict[str, Figures]]:
    """Score every installed model in every way, task -> way -> figures.

    Raises:
        ScoreError: graphs have another score than eager calls.
    """
    try:
        package = importlib.import_module("torchcrepe")
    except ImportError as error:
        say(f"torchcrepe: not available; {error}")
        return {}
    model = package.Crepe("tiny")
    weights = Path(str(package.__file__)).parent / "assets" / "tiny.pth"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return {"torchcrepe": pitches(model.to(device).eval(), device)}


@torch.inference_mode()
def pitches(model: nn.Module, device: torch.device) -> dict[str, Figures]:
    """Score a model that names the pitch of a frame, (rows, 1024) to (rows, 360) probabilities, on tones.

    Raises:
        ScoreError: graphs have another score than eager calls.
        NotReplayed: graphs did not serve every call after the first.
    """
    bins = torch.linspace(60, 300, TONES).long()
    frames = tones(bins).to(device)
    found: dict[str, Figures] = {}
    expected: Score | None = None
    for way, mode in WAYS.items():
        call: Any = model if mode is None else wrap(model, mode=mode, capture_sizes=[BATCH])
        replays = Replays(*([] if mode is None else [call]), name=f"torchcrepe, {way}", expected=SOON)
        # The last batch is padded.
        outputs = [call(frames[at : at + BATCH]).cpu() for at in range(0, TONES, BATCH)]
        replays.end(len(outputs))
        scored = _scored(torch.cat(outputs), bins)
        expected = expected or scored
        check_same(f"torchcrepe, {way}", scored, expected, torch.float32)
        found[way] = scored.figures()
        say(f"torchcrepe, {way}: exact match {scored.exact_match:.3f}, perplexity {scored.perplexity:.4f}")
    return found


def tones(bins: Tensor) -> Tensor:
    """Make a frame of a tone with four overtones for each pitch, (rows, 1024), of mean 0 and deviation 1."""
    hertz = 10 * 2 ** ((FIRST + STEP * bins.double()) / 1200)
    time = torch.arange(FRAME, dtype=torch.float64) / RATE
    overtones = [(2 * math.pi * n * hertz[:, None] * time).sin() / n for n in range(1, 6)]
    waves = torch.stack(overtones).sum(dim=0)
    return ((waves - waves.mean(dim=1, keepdim=True)) / waves.std(dim=1, keepdim=True)).float()


def _scored(outputs: Tensor, bins: Tensor) -> Score:
    """Score probabilities of the pitches: an answer within 50 cents is right."""
    right = ((outputs.argmax(dim=1) - bins).abs() * STEP <= 50).tolist()
    shares = outputs.double() / outputs.double().sum(dim=1, keepdim=True)
    return Score(right, (-shares.gather(1, bins[:, None]).log())[:, 0].tolist(), {})
