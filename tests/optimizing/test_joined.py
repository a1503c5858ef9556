"""Projections of an attention run as one product, on weights that stay what and where everybody expects them."""

from __future__ import annotations

import copy
import io
from unittest import mock

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.0")

import simplegraph as sg  # noqa: E402

CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
}
IDS = torch.arange(2 * 7).view(2, 7) % 9


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def bert(seed=0):
    torch.manual_seed(seed)
    model = transformers.BertModel(transformers.BertConfig(**CONFIG), add_pooling_layer=False).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    return model


def answer(model):
    return model(input_ids=IDS).last_hidden_state


def products(model):
    """The outputs' widths of the products that a call computes."""
    with mock.patch.object(nn.functional, "linear", wraps=nn.functional.linear) as linear:
        answer(model)
    return [len(call.args[1]) for call in linear.call_args_list]


def test_queries_keys_and_values_are_one_product():
    model = bert()
    expected, state = answer(model), {name: each.clone() for name, each in model.state_dict().items()}
    handle = sg.optimize(model)
    assert handle.changed["projections"] == [f"encoder.layer.{at}.attention.self.query+key+value" for at in (0, 1)]
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-5)
    assert products(model) == [96, 32, 64, 32] * 2
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    handle.remove()
    assert products(model) == [32, 32, 32, 32, 64, 32] * 2
    assert torch.equal(answer(model), expected)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.parameters())
    sg.optimize(model, skip=["projections"])
    assert 96 not in products(model)


def test_weights_that_are_loaded_written_or_replaced_are_used():
    model, other = bert(), bert(1)
    sg.optimize(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(answer(model), answer(other), rtol=1e-4, atol=1e-5)
    assert 96 in products(model)
    for each in (model, other):
        each.encoder.layer[0].attention.self.key.weight = nn.Parameter(torch.full((32, 32), 0.02))
    assert products(model).count(96) == 1  # they do not lie together any more
    torch.testing.assert_close(answer(model), answer(other), rtol=1e-4, atol=1e-5)
    model.double()
    torch.testing.assert_close(answer(model), answer(other.double()), rtol=1e-9, atol=1e-9)


def test_graphs_replay_it_and_copies_and_files_have_plain_weights():
    model = bert()
    expected = answer(model)
    sg.optimize(model)
    wrapped = sg.wrap(model, capture_sizes=[2], progress=False)
    for _ in range(4):
        found = answer(wrapped)
    assert wrapped.graph_stats.replays >= 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    other = bert(1)
    wrapped.load_state_dict(other.state_dict())
    torch.testing.assert_close(answer(wrapped), answer(other), rtol=1e-4, atol=1e-5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = bert(2)
    again.load_state_dict(torch.load(file))
    assert torch.equal(answer(again), answer(other))
    copied = copy.deepcopy(model)
    assert torch.equal(answer(copied), answer(other))
    assert "projections" in sg.optimize(copied).changed
    assert 96 in products(copied)


def test_what_wants_gradients_or_is_hooked_runs_as_it_is_written():
    model = bert()
    sg.optimize(model)
    seen = []
    model.encoder.layer[0].attention.self.key.register_forward_hook(lambda module, args, output: seen.append(output))
    assert 96 in products(model)
    assert seen[0].shape == (2, 7, 32)
    with torch.enable_grad():
        assert 96 not in products(model)
        answer(model).sum().backward()
    assert model.encoder.layer[1].attention.self.query.weight.grad is not None


def test_keys_of_another_input_are_computed_from_it():
    attention = bert().encoder.layer[0].attention.self
    x, other = torch.randn(2, 1, 7, 32)
    expected = attention.key(other)

    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attention

        def forward(self, x):
            return self.inner(x)

    module = Crossed().eval()
    sg.optimize(module)
    found = []
    attention.query.register_forward_hook(lambda *args: found.append(attention.key(other)))
    module(x)
    torch.testing.assert_close(found[0], expected)


def test_denoisers_join_what_reads_the_same_states():
    diffusers = pytest.importorskip("diffusers")
    from diffusers.models.attention_processor import Attention

    torch.manual_seed(0)
    module = nn.ModuleDict(
        {"own": Attention(16, heads=2, dim_head=8), "cross": Attention(16, 12, heads=2, dim_head=8)}
    ).eval()
    x, other = torch.randn(1, 5, 16), torch.randn(1, 3, 12)
    expected = module["own"](x), module["cross"](x, encoder_hidden_states=other)
    handle = sg.optimize(module)
    assert handle.changed["projections"] == ["own.to_q+to_k+to_v", "cross.to_k+to_v"]
    found = module["own"](x), module["cross"](x, encoder_hidden_states=other)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)
    module["own"].set_processor(diffusers.models.attention_processor.SlicedAttnProcessor(1))
    torch.testing.assert_close(module["own"](x), expected[0], rtol=1e-4, atol=1e-5)


def attention_of(model):
    return model.encoder.layer[0].attention.self


def no_key_weight(attention):
    attention.key = nn.Identity()


def longer_key(attention):
    attention.key = nn.Sequential(attention.key, nn.ReLU())


def no_query_bias(attention):
    attention.query.bias = None


def no_key_bias(attention):
    attention.key.bias = None


def changed_by_a_hook(attention):
    def halve(module, args):
        args[0].mul_(0.5)

    attention.key.register_forward_pre_hook(halve)


CHANGES = [no_key_weight, longer_key, no_query_bias, no_key_bias, changed_by_a_hook]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_projections_that_are_changed_afterwards_are_computed_as_they_are(change, inference):
    model, other = bert(), bert()
    sg.optimize(model)
    for each in (model, other):
        change(attention_of(each))
    with torch.inference_mode(inference):
        torch.testing.assert_close(answer(model), answer(other), rtol=1e-4, atol=1e-5)


def test_rows_that_are_cut_from_the_last_weight_are_gone():
    model, other = bert(), bert()
    sg.optimize(model)
    for each in (model, other):  # one head of values, which both heads of queries read
        value = attention_of(each).value
        value.weight, value.bias = nn.Parameter(value.weight[:16]), nn.Parameter(value.bias[:16])
    torch.testing.assert_close(answer(model), answer(other), rtol=1e-4, atol=1e-5)


def test_weights_that_share_memory_stay_tied():
    model = bert()
    tied = model.encoder.layer[1].attention.self.query
    tied.weight = nn.Parameter(attention_of(model).query.weight.data)
    assert "projections" not in sg.optimize(model).changed
    attention_of(model).query.weight.fill_(7.0)
    assert tied.weight.min() == 7
    shared = bert().share_memory()
    assert "projections" not in sg.optimize(shared).changed
    assert all(each.is_shared() for each in shared.parameters())


def test_what_is_optimized_in_inference_mode_can_be_trained_later():
    model = bert()
    with torch.inference_mode():
        handle = sg.optimize(model)
        handle.remove()
        sg.optimize(model)
    model.train()
    with torch.enable_grad():
        answer(model).sum().backward()
    assert attention_of(model).query.weight.grad is not None


def test_weights_that_were_made_in_inference_mode_are_left_where_they_are():
    with torch.inference_mode():
        model = bert()
    expected = answer(model)
    assert "projections" not in sg.optimize(model).changed
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-5)


def test_remove_leaves_weights_in_the_memory_that_others_gave_them():
    model = bert()
    handle = sg.optimize(model)
    flat = torch.randn(3, 32, 32)
    attention = attention_of(model)
    for part, weight in zip((attention.query, attention.key, attention.value), flat, strict=True):
        part.weight = nn.Parameter(weight)
    handle.remove()
    flat.fill_(3.0)
    assert attention.query.weight.min() == 3


def test_adapters_around_a_projection_are_run():
    peft = pytest.importorskip("peft")
    for targets in (["query"], ["key"], ["value", "query"]):
        model, other = bert(), bert()
        sg.optimize(model)
        for each in (model, other):
            torch.manual_seed(1)
            peft.get_peft_model(each, peft.LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
        torch.testing.assert_close(answer(model), answer(other), rtol=1e-4, atol=1e-5)
