"""``python -m bench.host_inputs``: calls whose images are on the CPU, beside calls whose images were copied first."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.tools import command
from bench.tools.measure import Call, Figures, synchronize
from bench.tools.options import Options, count
from bench.tools.replays import Replays, Served, timed
from bench.tools.tables import grid

CALLS = 50


class Encoder(nn.Module):
    """A vision transformer that moves its images, of (batch, 3, side, side), to its device: by one of two copies.

    Args:
        model: the transformer.
        move: "wait", "later" for a copy that is not waited for, or "none".
    """

    def __init__(self, model: nn.Module, move: str) -> None:
        super().__init__()
        self.model, self.move = model, move
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        if self.move != "none":
            device = next(self.model.parameters()).device
            images = images.to(device, non_blocking=self.move == "later")
        out: Tensor = self.model(images).last_hidden_state
        return out


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """Blocks of calls that a median is taken over, images of a call, and the shape of the transformer."""

    rounds: int
    batch: int = 1
    tiny: bool = False


def default_plan(device: torch.device) -> HostPlan:
    """Return 40 blocks of ViT-B/16; on a CPU 2 of a tiny one."""
    return HostPlan(40) if device.type == "cuda" else HostPlan(2, tiny=True)


def transformer(plan: HostPlan, device: torch.device) -> nn.Module:
    """Build ViT-B/16 in bfloat16, or a tiny one, with random weights."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(**sizes, image_size=32, patch_size=8) if plan.tiny else ViTConfig()
    model: nn.Module = ViTModel(config, add_pooling_layer=False).to(device, torch.bfloat16).eval()
    return model


def calls(plan: HostPlan, device: torch.device) -> dict[str, Call]:
    """Make the calls to compare, and check their results against eager.

    ``device``: the images are copied into a tensor on the device first, and the wrapped model is passed that.
    ``pinned``, ``pinned, waits``, ``pageable``: the wrapped model is passed them on the CPU. ``eager``: the model
    itself is, pinned.

    Raises:
        RuntimeError: a result differs from eager's.
    """
    model = transformer(plan, device)
    side = model.config.image_size  # type: ignore[union-attr]
    images = torch.randn(plan.batch, 3, side, side, dtype=torch.bfloat16)
    pinned = images.pin_memory() if device.type == "cuda" else images
    on_device = torch.empty_like(images, device=device)
    settings: dict[str, Any] = {"capture_sizes": [plan.batch], "padding": False, "progress": False}
    wrapped: dict[str, Any] = {
        "device": sg.wrap(Encoder(model, "none"), **settings),
        "pinned": sg.wrap(Encoder(model, "later"), **settings),
        "pinned, waits": sg.wrap(Encoder(model, "wait"), **settings),
        "pageable": sg.wrap(Encoder(model, "wait"), **settings),
    }

    def copied() -> Tensor:
        on_device.copy_(pinned, non_blocking=True)
        out: Tensor = wrapped["device"](on_device)
        return out

    eager = functools.partial(Encoder(model, "later"), pinned)
    given = {"pinned": pinned, "pinned, waits": pinned, "pageable": images}
    found: dict[str, Any] = {"device": copied}
    found |= {name: functools.partial(wrapped[name], tensor) for name, tensor in given.items()}
    for name, call in found.items():
        for _ in range(6):
            result = call()
        if not torch.equal(result, eager()):
            raise RuntimeError(f"{name}: the replay's result is not eager's.")
        found[name] = Served(call, Replays(wrapped[name], name=name))
    return {**found, "eager": eager}


@torch.inference_mode()
def measure(plan: HostPlan, device: torch.device) -> Figures:
    """Time calls whose answer is waited for, in blocks that take turns."""
    todo = calls(plan, device)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(plan.rounds):
        for name, call in todo.items():
            with timed(call, CALLS) as run:
                for _ in range(CALLS):
                    synchronize(device)
                    start = time.perf_counter()
                    run()
                    synchronize(device)
                    times[name].append((time.perf_counter() - start) * 1e6)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"waited_us": medians, "batch": plan.batch, "calls": CALLS * plan.rounds}


def render(figures: Figures) -> str:
    """Format a line for every way to pass the images, beside the one that copies them first."""
    medians = figures["waited_us"]
    rows = [(name, f"{found:.1f}", f"{found / medians['device']:.3f}") for name, found in medians.items()]
    return grid([("a call, waited for", "us", "of device"), *rows])


OPTIONS: Options = {
    "--rounds": {"type": count, "help": f"blocks of {CALLS} calls that a median is taken over; 40 on a GPU, else 2"},
    "--batch": {"type": count, "help": "images of a call; 1 by default"},
}
main = command.of("bench.host_inputs", __doc__, OPTIONS, default_plan, measure, render)


if __name__ == "__main__":
    main()
