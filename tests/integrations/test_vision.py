"""Image classifiers of timm and torchvision, as they come: batches, memory formats and resolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

CLASSES = 10


def vit(**more: Any) -> Any:
    timm = pytest.importorskip("timm")
    return timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, num_classes=CLASSES, **more
    )


def convnext() -> Any:
    timm = pytest.importorskip("timm")
    return timm.create_model(
        "convnext_atto", pretrained=False, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=CLASSES
    )


def resnet() -> Any:
    torchvision = pytest.importorskip("torchvision", exc_type=Exception)
    return torchvision.models.resnet18(weights=None, num_classes=CLASSES)


MODELS: dict[str, Callable[[], Any]] = {
    "vit": vit,
    "vit at any resolution": lambda: vit(dynamic_img_size=True),
    "convnext": convnext,
    "resnet": resnet,
}
ANY_RESOLUTION = [name for name in MODELS if name != "vit"]


def graphed(name: str, device: torch.device, **settings: Any) -> Any:
    settings = {"capture_sizes": [2, 4], "batch_dims": {"x": 0}, "progress": False} | settings
    return sg.wrap(MODELS[name]().to(device).eval(), **settings)


def images(rows: int, device: torch.device, resolution: int = 32) -> torch.Tensor:
    return torch.randn(rows, 3, resolution, resolution, device=device)


def assert_serves(model: Any, x: torch.Tensor, calls: int = 4) -> None:
    """Right at every call, the last one a replay."""
    replays = model.graph_stats.replays
    for _ in range(calls):
        x = x + torch.randn_like(x)
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-2, atol=2e-3)  # TF32 rounds so on a GPU
    assert model.graph_stats.replays > replays


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_batches_of_every_size_share_two_graphs(name: str, device: torch.device) -> None:
    model = graphed(name, device)
    for rows in (1, 2, 3, 4, 3, 2, 1):
        assert_serves(model, images(rows, device))
    assert model.graph_stats.captures == 2
    assert set(model.graph_stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP, Reason.OUTPUT_SHAPE_UNKNOWN}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["convnext", "resnet"])
def test_channels_last_images_stay_channels_last_in_the_graph(name: str, device: torch.device) -> None:
    model = graphed(name, device)
    model.to(memory_format=torch.channels_last)
    for rows in (2, 3):
        x = images(rows, device).contiguous(memory_format=torch.channels_last)
        assert_serves(model, x.contiguous())
        assert_serves(model, x)
    static = model.static_inputs(4)["x"]
    assert static.is_contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
@pytest.mark.parametrize("name", ANY_RESOLUTION)
def test_one_wrapper_serves_several_resolutions_within_a_bound(name: str, device: torch.device) -> None:
    model = graphed(name, device, max_signatures=2, on_too_many_signatures="flush")
    for resolution in (32, 64, 32, 96, 64):
        assert_serves(model, images(2, device, resolution))
        assert len(model.graph_manager.programs) <= 2
    assert model.graph_stats.flushes == 1


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_features_and_heads_replaced_later(name: str, device: torch.device) -> None:
    """Fine-tuning swaps the head; the next call has the new one."""
    model = graphed(name, device)
    assert_serves(model, images(2, device))
    head = "fc" if name == "resnet" else "head.fc" if name == "convnext" else "head"
    old = model.get_submodule(head)
    model.set_submodule(head, torch.nn.Linear(old.in_features, 4).to(device))
    assert model(images(2, device)).shape == (2, 4)
    assert_serves(model, images(2, device))
    assert model.graph_stats.recaptures == 1


@torch.inference_mode()
def test_autocast_has_graphs_of_its_own(device: torch.device) -> None:
    model = graphed("vit", device)
    x = images(2, device)
    assert_serves(model, x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for _ in range(3):
            found, expected = model(x), sg.unwrap(model)(x)
            assert found.dtype is expected.dtype is torch.bfloat16
            torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
    assert_serves(model, x)
    assert model.graph_stats.captures == 2
