"""Policies of lerobot: ACT answers by one replay a chunk, a Diffusion Policy by one for each denoising step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.modeling_act import ACTConfig, ACTPolicy
from lerobot.policies.diffusion.modeling_diffusion import DiffusionConfig, DiffusionPolicy
from lerobot.policies.pretrained import PreTrainedPolicy

import simplegraph as sg


# Recipe
def add_graphs(policy: PreTrainedPolicy) -> None:
    """Give a policy graphs, before `select_action`."""
    if isinstance(policy, ACTPolicy):
        policy.model = sg.wrap(policy.model)
    if isinstance(policy, DiffusionPolicy):
        policy.diffusion.unet = sg.wrap(policy.diffusion.unet)
        encoder = getattr(
            policy.diffusion, "rgb_encoder", None
        )  # absent without images, a list with one for each camera
        if isinstance(encoder, torch.nn.ModuleList):
            policy.diffusion.rgb_encoder = torch.nn.ModuleList(map(sg.wrap, encoder))
        elif encoder is not None:
            policy.diffusion.rgb_encoder = sg.wrap(encoder)


# Comparison
def policies() -> dict[str, PreTrainedPolicy]:
    """Make small policies with random weights."""
    torch.manual_seed(0)
    image, numbers = PolicyFeature(FeatureType.VISUAL, (3, 96, 96)), PolicyFeature(FeatureType.STATE, (6,))
    both: dict[str, Any] = {
        "input_features": {"observation.state": numbers, "observation.images.top": image},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (6,))},
        "pretrained_backbone_weights": None,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    act = ACTConfig(dim_model=64, dim_feedforward=128, n_heads=4, chunk_size=16, n_action_steps=4, **both)
    denoiser = {"down_dims": (32, 64), "crop_shape": (84, 84), "num_inference_steps": 10}
    diffusion = DiffusionConfig(noise_scheduler_type="DDIM", **denoiser, **both)
    return {"act": ACTPolicy(act), "diffusion": DiffusionPolicy(diffusion)}


def main() -> dict[str, Callable[[], object]]:
    """Compare actions over some observations, and return one call of each, to be timed."""
    calls: dict[str, Callable[[], object]] = {}
    for name, policy in policies().items():
        plain = policy.to(policy.config.device).eval()
        graphed = copy.deepcopy(plain)
        add_graphs(graphed)
        for seed in range(64):
            torch.manual_seed(seed)
            seen = {"observation.state": torch.randn(1, 6), "observation.images.top": torch.rand(1, 3, 96, 96)}
            seen = {key: value.to(plain.config.device) for key, value in seen.items()}
            found = []
            for each in (plain, graphed):
                torch.manual_seed(seed)
                found.append(each.select_action(dict(seen)))
            torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
        inner = graphed.model if isinstance(graphed, ACTPolicy) else graphed.diffusion.unet
        print(inner.graph_report())
        assert inner.graph_stats.replays > 10
        for kind, each in {"plain": plain, "graphs": graphed}.items():
            calls[f"{name} {kind}"] = lambda each=each, seen=seen: (each.reset(), each.select_action(dict(seen)))
    return calls


if __name__ == "__main__":
    main()
