"""Switches of other people's modules are followed without a setting, by where their classes come from."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import simplegraph as sg

WIDTH = 8


class Tuner(nn.Linear):
    """The attributes of peft's layers, with the same names."""

    __module__ = "peft.tuners.made_up"
    _disable_adapters = False

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self._active_adapter: str | list[str] = "a"
        self.merged_adapters: list[str] = []
        self.scaling = {"a": 0.5, "b": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._disable_adapters or self.merged_adapters:
            return x
        active = [self._active_adapter] if isinstance(self._active_adapter, str) else self._active_adapter
        return sum(self.scaling[name] * super(Tuner, self).forward(x) for name in active)


class Processor:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Attention(nn.Module):
    """The attributes of diffusers' attention."""

    __module__ = "diffusers.models.made_up"

    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.processor.factor


class MadeUpBlock2D(nn.Module):
    """Takes factors that are absent until somebody sets them, as FreeU's are."""

    __module__ = "diffusers.models.made_up"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (getattr(self, "s1", None) or 1.0)


def graphed(device: torch.device, *modules: nn.Module) -> nn.Module:
    return sg.wrap(nn.Sequential(*modules).to(device).eval(), capture_sizes=[2], progress=False)


def assert_replays_eager(model: nn.Module, device: torch.device) -> None:
    replays = model.graph_stats.replays
    for _ in range(4):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-3, atol=1e-4)
    assert model.graph_stats.replays > replays


CHANGES = {
    "another adapter": lambda tuner: setattr(tuner, "_active_adapter", "b"),
    "two adapters": lambda tuner: setattr(tuner, "_active_adapter", ["a", "b"]),
    "disabled": lambda tuner: setattr(tuner, "_disable_adapters", True),
    "merged, a list changed in place": lambda tuner: tuner.merged_adapters.append("a"),
    "scaled, a dict changed in place": lambda tuner: tuner.scaling.update(a=7.0),
}


@torch.inference_mode()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_an_adapter_is_noticed_at_the_next_call(device, change):
    tuner = Tuner()
    model = graphed(device, nn.Tanh(), tuner)
    assert_replays_eager(model, device)
    change(tuner)
    assert_replays_eager(model, device)
    assert model.graph_stats.captures == 2


@torch.inference_mode()
def test_switching_back_replays_what_was_captured_before(device):
    tuner = Tuner()
    model = graphed(device, tuner)
    for active in "ababab":
        tuner._active_adapter = [active]  # a new list each time, as peft sets it
        assert_replays_eager(model, device)
    assert model.graph_stats.captures == 2


@torch.inference_mode()
def test_a_tuner_put_in_later_is_watched_too(device):
    model = graphed(device, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    assert_replays_eager(model, device)
    model[1] = tuner = Tuner().to(device).eval()
    assert_replays_eager(model, device)
    tuner._active_adapter = "b"
    assert_replays_eager(model, device)


@torch.inference_mode()
def test_another_attention_processor_is_another_graph_and_no_id_is_reused(device):
    attention = Attention()
    model = graphed(device, attention)
    for factor in range(1, 5):  # the earlier processor is freed, and the next may lie where it lay
        attention.processor = Processor(float(factor))
        assert_replays_eager(model, device)


@torch.inference_mode()
def test_a_factor_that_was_absent_at_capture(device):
    block = MadeUpBlock2D()
    model = graphed(device, block)
    assert_replays_eager(model, device)
    block.s1 = 0.9
    assert_replays_eager(model, device)
    block.s1 = None
    assert_replays_eager(model, device)
    assert model.graph_stats.captures == 3  # None is no absent attribute


@torch.inference_mode()
def test_a_state_key_of_ones_own_goes_beside_known_switches(device):
    tuner = Tuner()
    model = sg.wrap(tuner.to(device).eval(), capture_sizes=[2], state_key=lambda module: tuple(module.scaling.items()))
    assert_replays_eager(model, device)
    tuner.scaling["a"] = 3.0
    assert_replays_eager(model, device)
    assert model.graph_stats.captures == 2


def test_a_state_key_survives_pickling_with_its_config():
    config = pickle.loads(pickle.dumps(sg.CudaGraphConfig(state_key=len)))
    assert config.state_key is len


def test_scales_of_an_ip_adapter_and_attributes_of_a_processor_are_followed(device):
    diffusers = pytest.importorskip("diffusers")
    from diffusers.models.attention_processor import Attention, IPAdapterAttnProcessor2_0

    class Scaled:
        """A processor of one's own, with a number that its user changes."""

        def __init__(self) -> None:
            self.strength = 1.0

        def __call__(self, attn, hidden_states, *args, **kwargs):
            return attn.to_out[0](attn.to_v(hidden_states)) * self.strength

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adapted = Attention(8, cross_attention_dim=8, heads=2, dim_head=4)
            self.adapted.set_processor(IPAdapterAttnProcessor2_0(8, 8, num_tokens=(2,), scale=1.0))
            self.own = Attention(8, heads=2, dim_head=4)
            self.own.set_processor(Scaled())

        def forward(self, x, text, image):
            return self.own(self.adapted(x, encoder_hidden_states=(text, [image])))

    def set_ip_adapter_scale(module, scale):  # as the mixin of diffusers' pipelines does
        module.adapted.processor.scale = [scale] * len(module.adapted.processor.scale)

    assert hasattr(diffusers.loaders.IPAdapterMixin, "set_ip_adapter_scale")
    module = Block().to(device).eval()
    model = sg.wrap(module, capture_sizes=[5], progress=False)
    inputs = [
        torch.randn(5, 3, 8, device=device),
        torch.randn(5, 4, 8, device=device),
        torch.randn(5, 1, 2, 8, device=device),
    ]

    def serve():
        before = model.graph_stats.replays
        for _ in range(5):
            torch.testing.assert_close(model(*inputs), module(*inputs))
        return model.graph_stats.replays - before

    with torch.inference_mode():
        assert serve(), model.graph_report()
        for change in (
            lambda: set_ip_adapter_scale(module, 0.25),
            lambda: setattr(module.own.processor, "strength", 0.5),
            lambda: set_ip_adapter_scale(module, 1.0),
        ):
            change()
            assert serve(), model.graph_report()
