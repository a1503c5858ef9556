"""Whatever changes between two generations, the next one has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from run_log import run_log  # noqa: E402
from tiny_generation import GREEDY, TOKENS, graphed  # noqa: E402


def test_weights_changed_in_place_and_replaced_are_never_stale(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([7, 4], device)
    with graphed(llama) as graphs:
        before = llama.generate(**batch, **GREEDY)
        for model in (llama, plain):
            model.lm_head.weight.data.mul_(-1)
        changed = llama.generate(**batch, **GREEDY)
        assert torch.equal(changed, plain.generate(**batch, **GREEDY))
        assert not torch.equal(changed, before)
        torch.manual_seed(7)
        other = torch.randn_like(llama.model.norm.weight)
        for model in (llama, plain):
            model.model.norm.weight = torch.nn.Parameter(other.clone())
        again = llama.generate(**batch, **GREEDY)
        assert torch.equal(again, plain.generate(**batch, **GREEDY))
        assert not torch.equal(again, changed)
        assert graphs.stats.recaptures == 1
        replays = graphs.stats.replays
        llama.generate(**batch, **GREEDY)
        assert graphs.stats.replays == replays + TOKENS - 1


class Adapter(torch.nn.Linear):
    active_adapters, disable_adapters = ("a",), False

    def switch(self, disabled: bool) -> None:
        self.disable_adapters = disabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.disable_adapters else -1)


class OfTheInstance(Adapter):
    def disable_adapters(self) -> None:  # type: ignore[override]
        """Is no switch, and is hidden by the attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.switch(False)


class WithoutNames(torch.nn.Linear):
    off = False

    @property
    def disable_adapters(self) -> bool:
        return self.off

    def switch(self, disabled: bool) -> None:
        self.off = disabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.off else -1)


@pytest.mark.parametrize("Adapter", [Adapter, OfTheInstance, WithoutNames])
def test_attention_chosen_otherwise_and_adapters_switched_are_never_stale(
    Adapter: Any, llama: Any, plain: Any, device: torch.device
) -> None:
    batch = tiny.prompts([7, 4], device)
    for model in (llama, plain):
        adapter = Adapter(64, tiny.VOCABULARY, bias=False, device=device)
        adapter.weight = model.lm_head.weight
        model.lm_head = adapter
    with graphed(llama) as graphs:
        found = []
        for disabled in (False, True, False):
            for model in (llama, plain):
                model.lm_head.switch(disabled)
            found.append(llama.generate(**batch, **GREEDY))
            assert torch.equal(found[-1], plain.generate(**batch, **GREEDY))
        assert not torch.equal(found[0], found[1])
        assert graphs.stats.captures == 3


@pytest.mark.parametrize("variable", ["VERIFY=2", "DEBUG=1", "CAPTURE_SIZES=3,6", "MODE=none", "PADDING=0"])
def test_settings_from_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch, llama: Any, plain: Any, device: torch.device
) -> None:
    monkeypatch.setenv(*f"SIMPLEGRAPH_{variable}".split("="))
    with graphed(llama) as graphs:
        for lengths in ([5, 6], [4], [7, 3, 4], [4, 4, 4, 4]):
            batch = tiny.prompts(lengths, device)
            for _ in range(2):
                assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert bool(graphs.stats.replays) is (variable != "MODE=none")
        assert not graphs.stats.failures


def test_a_model_of_another_dtype_gets_another_cache(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([7, 4], device)
    with graphed(llama) as graphs:
        llama.generate(**batch, **GREEDY)
        for model in (llama, plain):
            model.to(torch.float64)
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == 2 * (TOKENS - 2)


class Int8Linear(torch.nn.Module):
    """A linear layer of int8 weights with a scale for each row, both in buffers, as libraries for it have them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty_like(linear.weight[:, :1]))
        self.quantise(linear.weight)

    def quantise(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.scales.copy_(weight.abs().amax(1, keepdim=True) / 127)
            self.weight.copy_((weight / self.scales).round())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scales)


def test_quantised_layers_requantised_in_place_and_replaced(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6, 4], device)
    unquantised = plain.generate(**batch, **GREEDY)
    for layer in (layer for model in (llama, plain) for layer in model.model.layers):
        layer.mlp.down_proj = Int8Linear(layer.mlp.down_proj)
    with graphed(llama) as graphs:

        def same() -> torch.Tensor:
            found, expected = (model.generate(**batch, **GREEDY) for model in (llama, plain))
            assert torch.equal(found, expected)
            return expected

        seen = [unquantised, same()]
        for change in ("in place", "replaced"):
            torch.manual_seed(len(change))
            weight = torch.randn(llama.config.hidden_size, llama.config.intermediate_size, device=device)
            for layer in (layer for model in (llama, plain) for layer in model.model.layers):
                if change == "in place":
                    layer.mlp.down_proj.quantise(weight)
                else:
                    layer.mlp.down_proj.weight = -layer.mlp.down_proj.weight
            seen.append(same())
        assert not any(torch.equal(seen[-1], earlier) for earlier in seen[:-1])
        assert not torch.equal(seen[1], seen[2])
        assert graphs.stats.replays >= 3 * (TOKENS - 3)
        assert graphs.stats.captures == 2  # in place, the graph reads the new numbers


def test_a_traced_part_runs_eagerly(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([7], device)
    for model in (llama, plain):
        mlp = model.model.layers[0].mlp
        mlp.down_proj = torch.jit.trace(mlp.down_proj, torch.randn(1, 1, mlp.down_proj.in_features, device=device))
    with graphed(llama, fused_kernels=False) as graphs:
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == 0


def test_what_downloads_and_progress_bars_keep_is_no_reason_for_another_graph(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3's code leads to huggingface_hub's, which keeps connections, tokens and caches in globals."""
    import huggingface_hub
    import tqdm

    plain, model = (tiny.build(tiny.DECODERS["gemma3"], device) for _ in range(2))
    batch = tiny.prompts([7, 4], device)
    with graphed(model) as graphs:
        for at in range(3):
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
            monkeypatch.setattr(
                huggingface_hub.constants, "HF_HUB_OFFLINE", not huggingface_hub.constants.HF_HUB_OFFLINE
            )
            monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args: None)
            monkeypatch.setattr(tqdm.tqdm, "monitor_interval", at)
        assert graphs.stats.captures == 1, graphs.report()


@pytest.mark.parametrize(("name", "other"), [("llama", "mixtral"), ("gemma3", "qwen3"), ("t5", "gpt2")])
def test_another_model_that_is_loaded_later_is_no_reason_for_another_graph(
    name: str, other: str, device: torch.device
) -> None:
    """Each class of models adds itself to registries of transformers when it is first used."""
    batch = tiny.prompts([7, 4], device)
    models = tiny.DECODERS | tiny.MIXTURES | tiny.ENCODER_DECODERS
    plain, model = (tiny.build(models[name], device) for _ in range(2))
    with graphed(model) as graphs:
        for _ in range(2):
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
            tiny.build(models[other], device).generate(**batch, **GREEDY)
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.captures == 1, graphs.report()


def test_arguments_of_steps_in_another_order_have_the_same_graph(llama: Any, plain: Any, device: torch.device) -> None:
    batch, prepare, log = tiny.prompts([7, 4], device), llama.prepare_inputs_for_generation, run_log()

    def shuffled(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        return {name: inputs[name] for name in sorted(inputs, reverse=bool(len(log("call")) % 2))}

    llama.prepare_inputs_for_generation = shuffled
    with graphed(llama) as graphs:
        for _ in range(2):
            assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert len(log()) > 2
        assert graphs.stats.captures == 1, graphs.report()
        assert graphs.stats.replays > TOKENS
