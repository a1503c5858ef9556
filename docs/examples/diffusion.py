"""A pipeline of diffusers whose denoiser is replayed at every step of the schedule.

It needs ``pip install . diffusers``, in the folder of simplegraph's sources.
"""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler, DDPMPipeline, UNet2DModel

from simplegraph.integrations.diffusers import graph_pipeline

device = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Draw two images with and without graphs, from the same noise, and compare."""
    # StableDiffusionPipeline.from_pretrained(...) works alike; this one is tiny, with random weights.
    kinds = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
    torch.manual_seed(0)
    unet = UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, **kinds)
    pipe = DDPMPipeline(unet.eval(), DDIMScheduler()).to(device)
    pipe.set_progress_bar_config(disable=True)

    def draw() -> torch.Tensor:
        noise = torch.Generator(device).manual_seed(1)
        images = pipe(batch_size=2, generator=noise, num_inference_steps=8, output_type="np").images
        return torch.from_numpy(images)

    expected = draw()
    with graph_pipeline(pipe, max_batch_size=4) as graphs:
        found = [draw() for _ in range(2)]  # the first captures, the second replays
        print(graphs.report())
        assert graphs.parts["unet"].graph_stats.replays > 8
    for images in found:
        torch.testing.assert_close(images, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
