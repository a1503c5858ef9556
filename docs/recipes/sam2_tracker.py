"""The tracker of SAM2 in transformers: image encoder, memory and mask decoder of each frame are replays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Sam2VideoConfig, Sam2VideoModel
from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession

import simplegraph as sg


# Recipe
def add_graphs(tracker: Sam2VideoModel) -> None:
    """Give a tracker graphs, before the first frame."""
    encoder = tracker.vision_encoder
    encoder.backbone = sg.wrap(encoder.backbone)
    tracker.memory_encoder = sg.wrap(tracker.memory_encoder)
    # As long as the memory grows, each frame has another shape.
    tracker.memory_attention = sg.wrap(tracker.memory_attention, exact_shapes=True)
    tracker.mask_decoder = sg.wrap(tracker.mask_decoder, exact_shapes=True)


# Comparison
SIZE, FRAMES = 128, 40


def small_tracker() -> Sam2VideoModel:
    """Make a small tracker with random weights."""
    torch.manual_seed(0)
    widths = [16, 32, 64, 128]
    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": widths[0],
        "num_attention_heads": 1,
        "image_size": [SIZE, SIZE],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": widths,
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "global_attention_blocks": [3],
    }
    sizes = [[SIZE // stride] * 2 for stride in (4, 8, 16)]
    vision = {"backbone_config": backbone, "backbone_channel_list": widths[::-1], "backbone_feature_sizes": sizes}
    config = Sam2VideoConfig(
        vision_config={"model_type": "sam2_vision_model", **vision},
        prompt_encoder_config={"image_size": SIZE},
        image_size=SIZE,
        memory_attention_rope_feat_sizes=sizes[-1],
    )
    return Sam2VideoModel(config).to("cuda" if torch.cuda.is_available() else "cpu").eval()


@torch.no_grad()
def track(tracker: Sam2VideoModel, video: Tensor) -> Tensor:
    """Follow what is at one point of the first frame; return a mask for each frame."""
    session = Sam2VideoInferenceSession(video=video, inference_device=video.device, dtype=video.dtype)
    point, label = torch.full((1, 1, 1, 2), SIZE / 2), torch.ones(1, 1, 1, dtype=torch.int32)
    prompt = {"point_coords": point.to(video.device), "point_labels": label.to(video.device)}
    session.add_point_inputs(session.obj_id_to_idx(1), 0, prompt)
    session.obj_with_new_inputs = [1]
    tracker(inference_session=session, frame_idx=0)
    return torch.stack([frame.pred_masks for frame in tracker.propagate_in_video_iterator(session)])


def main() -> dict[str, Callable[[], object]]:
    """Compare the masks of some videos, and return what tracks one, to be timed."""
    plain = small_tracker()
    graphed = copy.deepcopy(plain)
    add_graphs(graphed)
    for seed in range(3):
        torch.manual_seed(seed)
        video = torch.randn(FRAMES, 3, SIZE, SIZE, device=plain.device)
        torch.testing.assert_close(track(graphed, video), track(plain, video), rtol=1e-3, atol=1e-3)
    print(graphed.memory_attention.graph_report())
    assert graphed.memory_attention.graph_stats.replays > FRAMES
    return {"plain": lambda: track(plain, video), "graphs": lambda: track(graphed, video)}


if __name__ == "__main__":
    main()
