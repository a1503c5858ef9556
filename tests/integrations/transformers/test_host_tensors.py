"""Models of transformers that make tensors on the CPU, whole, with the meta device in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import simplegraph as sg
from tests.support import host_models
from tests.support.meta_device import use_meta_device
from tests.support.where import without_gpu

pytest.importorskip("transformers")


@without_gpu
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("make", "constants", "watched"),
    [
        (host_models.sam, 2, []),
        (host_models.videomae, 1, ["embeddings.position_embeddings"]),
        (host_models.rt_detr, 2, ["anchors", "valid_mask"]),
        (host_models.wavlm, 0, []),
    ],
)
def test_a_model_with_cpu_tensors_is_captured(
    make: Callable[[], Any], constants: int, watched: list[str], grad_mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_meta_device(monkeypatch)
    module, inputs = make()
    model: Any = sg.wrap(module.eval().to("meta"), capture_sizes=[5], padding=False, verify=0)
    with grad_mode():
        for _ in range(4):
            model(**inputs(5, "meta"))
    stats = model.graph_stats
    assert (stats.captures, stats.failures) == (1, {}), model.graph_report()
    assert stats.replays >= 2
    (program,) = model._graph_runner.manager.programs.values()
    assert len(program.constants) == constants
    # What the graph took from the module is noticed when it changes.
    for name in watched:
        captures = stats.captures
        with torch.inference_mode(False), torch.no_grad():
            _attribute(module, name).zero_()
        with grad_mode():
            for _ in range(4):
                model(**inputs(5, "meta"))
        assert stats.captures == captures + 1, model.graph_report()
        assert stats.failures == {}


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module
