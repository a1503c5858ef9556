"""`graph_pipeline`: runs the models of a diffusers pipeline through graphs. Imports nothing of diffusers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from simplegraph.base.errors import ConfigError
from simplegraph.integrations.graphed_parts import GraphedParts
from simplegraph.serve.runner import CudaGraphWrapper
from simplegraph.serve.wrap import graph_pool, wrap

__all__ = ["graph_pipeline"]

# Not worth a graph, or impossible in one: checkers pass images to NumPy.
_LEFT_OUT = ("safety_checker", "watermarker")
# Inputs whose rows are the batch; other dimensions may have the same size by chance.
_ROWS = ("sample", "hidden_states", "encoder_hidden_states", "pooled_projections", "added_cond_kwargs", "input_ids")
_CODER_PARTS = ("encoder", "decoder")  # of a model that is called by `encode` and `decode`


def graph_pipeline(
    pipe: Any,
    *,
    parts: Collection[str] | None = None,
    max_batch_size: int = 16,
    max_signatures: int = 8,
    **settings: Any,
) -> GraphedParts:
    """Run the models of a pipeline through CUDA graphs from now on: denoiser, text encoders, VAE, control nets.

        graphs = graph_pipeline(pipe)
        image = pipe("a photo of a cat").images[0]
        print(graphs.report())

    Each model is captured at the batch sizes, resolutions and prompt lengths that come, guidance's doubled batches
    among them, and never padded. All share their graphs' memory, since one runs after the other. LoRA weights that are
    loaded, fused or switched later are followed.

    Args:
        pipe: a pipeline of diffusers, or an object with a dict of its models in `components`; on its device already.
        parts: names of models to capture, such as ``["unet"]`` or ``["transformer", "vae.decoder"]``; None for all.
        max_batch_size: rows of the largest batch, guidance's included.
        max_signatures: the most resolutions, prompt lengths and the like that a model has graphs for; one more drops
            them all and starts over.
        **settings: other fields of `CudaGraphConfig`, for every model.

    Returns:
        A handle with `parts`, `report` and `remove`; as a context manager it calls `remove` at the end.

    Raises:
        ConfigError: `pipe` is no pipeline, its models are offloaded or on several devices, or `parts` names no model.
    """
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        raise ConfigError(f"graph_pipeline got a {type(pipe).__name__}; expected a pipeline with `components`.")
    places = {name: place for name, place in _models(pipe, components) if parts is None or _is_meant(name, parts)}
    unknown = sorted(part for part in parts or () if not any(_is_meant(name, [part]) for name in places))
    if unknown or not places:
        names = ", ".join(name for name, _ in _models(pipe, components)) or "none"
        raise ConfigError(f"graph_pipeline found no model {', '.join(unknown) or 'at all'}; the pipeline has {names}.")
    graphs, pool = GraphedParts(pipe), graph_pool(_device(places))
    graphs.skipped.update(
        {name: "nothing for a graph" for name in components if name in _LEFT_OUT and components[name] is not None}
    )
    common: dict[str, Any] = {
        "capture_sizes": range(1, max_batch_size + 1),
        "max_signatures": max_signatures,
        "on_too_many_signatures": "flush",
        "progress": False,
    }
    wrapped = {}
    for name, place in places.items():
        model = getattr(*place)
        takes = inspect.signature(type(model).forward).parameters
        rows = {"batch_dims": {argument: 0 for argument in _ROWS if argument in takes}}
        wrapped[name] = wrap(model, pool=pool, **(common | rows | settings))
    for name, place in places.items():
        graphs.put(name, wrapped[name], [place])
    return graphs


def _models(pipe: Any, components: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the name of each model that can be captured, its holder, and the attribute of the holder."""
    for name, model in components.items():
        if not isinstance(model, nn.Module) or name in _LEFT_OUT or getattr(pipe, name, None) is not model:
            continue
        if isinstance(model, CudaGraphWrapper):
            raise ConfigError(f"{name} of the pipeline has graphs already; pass one whose models are not wrapped.")
        coders = [part for part in _CODER_PARTS if isinstance(getattr(model, part, None), nn.Module)]
        if coders and callable(getattr(model, "decode", None)):
            yield from ((f"{name}.{part}", (model, part)) for part in coders)
        else:
            yield name, (pipe, name)


def _is_meant(name: str, parts: Collection[str]) -> bool:
    return name in parts or name.partition(".")[0] in parts


def _device(places: Mapping[str, tuple[Any, str]]) -> torch.device:
    """Return the device of all models. Raises ConfigError."""
    models = {name: getattr(*place) for name, place in places.items()}
    offloaded = [
        name for name, model in models.items() if any(hasattr(module, "_hf_hook") for module in model.modules())
    ]
    if offloaded:
        raise ConfigError(
            f"{', '.join(offloaded)} of the pipeline: offloaded to the CPU between calls, where no graph finds its "
            "weights. Move the pipeline to its device, without enable_model_cpu_offload."
        )
    devices = {
        tensor.device: name
        for name, model in models.items()
        for tensor in itertools.chain(model.parameters(), model.buffers())
    }
    if len(devices) != 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items()) or "none has any weights"
        raise ConfigError(f"graph_pipeline needs all models of the pipeline on one device, and got {where}.")
    return torch.device(*devices)
