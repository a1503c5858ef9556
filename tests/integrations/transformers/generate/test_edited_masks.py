"""Models, hooks and replaced methods that edit masks between steps are served the masks that they made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_log import run_log
from torch import Tensor

from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from tiny_generation import GREEDY, MODELS, TOKENS, graphed, inputs  # noqa: E402

WINDOW = 6
Edit = Callable[[Tensor], Any]


def forgets(mask: Tensor) -> Tensor:
    """Hide all but the last tokens."""
    mask = mask.clone()
    mask[:, :-WINDOW] = 0
    return mask


def keeps_sinks(mask: Tensor) -> Tensor:
    """Hide all but the last tokens and the first two."""
    return torch.cat([mask[:, :2], forgets(mask)[:, 2:]], dim=1)


def hides_itself(mask: Tensor) -> Tensor:
    """Hide the newest token in the first row."""
    mask = mask.clone()
    mask[0, -1] = mask.shape[1] < 9
    return mask


def drops(mask: Tensor) -> Any:
    """Show everything, padding too, from some length on."""
    return None if mask.shape[1] > 9 else mask


def in_four_dimensions(mask: Tensor) -> Tensor:
    """Make the whole mask, from some length on."""
    return forgets(mask)[:, None, None].bool() if mask.shape[1] > 9 else mask


EDITS = (forgets, keeps_sinks, hides_itself, drops)


class Prepares(transformers.LlamaForCausalLM):
    edit: Edit

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prepare_inputs_for_generation(*args, **kwargs)
        return found | {"attention_mask": self.edit(found["attention_mask"])}


class Updates(transformers.LlamaForCausalLM):
    edit: Edit

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._update_model_kwargs_for_generation(*args, **kwargs)
        return found | {"attention_mask": self.edit(found["attention_mask"])}


def by_class(kind: Any) -> Callable[[Any, Edit], None]:
    def change(model: Any, edit: Edit) -> None:
        model.__class__ = type(kind.__name__, (kind,), {"edit": staticmethod(edit)})

    return change


def by_method(model: Any, edit: Edit) -> None:
    """Replace a model's method by one that says that it is transformers' own."""
    own = model.prepare_inputs_for_generation

    @functools.wraps(own)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return found | {"attention_mask": edit(found["attention_mask"])}

    model.prepare_inputs_for_generation = prepare


def by_hook(model: Any, edit: Edit) -> None:
    def before(_: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": edit(kwargs["attention_mask"])}

    model.register_forward_pre_hook(before, with_kwargs=True)


def by_forward(model: Any, edit: Edit) -> None:
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | {"attention_mask": edit(kwargs["attention_mask"])})

    model.forward = forward


WAYS = {
    "prepares": by_class(Prepares),
    "updates": by_class(Updates),
    "method": by_method,
    "hook": by_hook,
    "forward": by_forward,
}


@pytest.mark.parametrize(
    ("way", "edit"),
    # Without a mask, the next one cannot be edited.
    [(way, edit) for way in WAYS for edit in EDITS if (way, edit) != ("updates", drops)],
)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}])
def test_masks_that_are_edited_between_steps_are_those_of_the_steps(
    settings: dict[str, Any], way: str, edit: Edit, llama: Any, plain: Any, device: torch.device
) -> None:
    for model in (plain, llama):
        if way != "forward":
            WAYS[way](model, edit)
    with graphed(llama) as graphs:
        if way == "forward":  # around the graphs' own
            for model in (plain, llama):
                WAYS[way](model, edit)
        for seed in range(2):
            batch = tiny.prompts([7, 4], device, seed)
            found, expected = (model.generate(**batch, **GREEDY, **settings) for model in (llama, plain))
            assert torch.equal(found, expected)
        assert graphs.stats.replays >= 2 * (TOKENS - 3)  # served by graphs all the same


def test_a_mask_that_is_no_longer_one_of_tokens_ends_the_graphs_of_its_generation(
    llama: Any, plain: Any, device: torch.device
) -> None:
    for model in (llama, plain):
        by_method(model, in_four_dimensions)
    batch = tiny.prompts([7, 4], device)
    with graphed(llama) as graphs:
        for _ in range(2):
            assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.OPAQUE_ARGUMENT] == 2
        assert graphs.stats.replays
        assert "attention_mask is not a mask of 2 rows and 9 tokens" in str(graphs.report())


@pytest.mark.parametrize("name", ["decoder_attention_mask", "attention_mask"])
def test_both_masks_of_an_encoder_and_a_decoder(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["t5"], device) for _ in range(2))
    batch = inputs("t5", [9, 5], device)
    batch["decoder_input_ids"] = torch.tensor([[0, 5, 9, 7], [0, 8, 3, 6]], device=device)
    batch["decoder_attention_mask"] = torch.ones_like(batch["decoder_input_ids"])
    settings = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    before = plain.generate(**batch, **settings)
    for each in (plain, model):
        own = each.prepare_inputs_for_generation
        count = iter(range(1000))

        def prepare(*args: Any, own: Any = own, count: Any = count, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            mask = found[name].clone()
            mask[:, : 1 + next(count) % 4] = 0  # other tokens at each step
            return found | {name: mask}

        each.prepare_inputs_for_generation = prepare
    with graphed(model) as graphs:
        for _ in range(2):
            found, expected = (each.generate(**batch, **settings) for each in (model, plain))
            assert torch.equal(found.sequences, expected.sequences)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
        assert (torch.stack(expected.logits) - torch.stack(before.logits)).abs().max() > 0.1
        assert graphs.stats.replays


@pytest.mark.parametrize("way", ["prepares", "updates", "method"])
def test_steps_that_the_model_prepares_itself_are_not_launched_together(
    way: str, llama: Any, plain: Any, device: torch.device
) -> None:
    """They are asked for nothing in a launch."""
    for model in (llama, plain):
        WAYS[way](model, forgets)
    with graphed(llama, tokens_per_launch=4) as graphs:
        for seed in range(2):
            batch = tiny.prompts([7, 4], device, seed)
            assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.slower[Reason.ONE_TOKEN]
        assert "runs in Python at every step" in str(graphs.report())


def test_a_model_prepares_as_many_steps_as_without_graphs(llama: Any, plain: Any, device: torch.device) -> None:
    """A check of end tokens that is one step late has one more step prepared, which a method of the user's sees."""
    batch = tiny.prompts([7], device)
    end = int(plain.generate(**batch, **GREEDY)[0, 10])
    logs = run_log(), run_log()  # a list that is noticed would be a reason to run eagerly
    for model, log in zip((llama, plain), logs, strict=True):
        own = model.prepare_inputs_for_generation

        @functools.wraps(own)
        def prepare(ids: Tensor, *args: Any, own: Any = own, log: Any = log, **kwargs: Any) -> Any:
            log(ids.shape[1])
            return own(ids, *args, **kwargs)

        model.prepare_inputs_for_generation = prepare
    with graphed(llama) as graphs:
        for _ in range(2):
            found, expected = (
                model.generate(**batch, max_new_tokens=20, do_sample=False, eos_token_id=end)
                for model in (llama, plain)
            )
            assert torch.equal(found, expected)
        assert logs[0]() == logs[1]()
        assert graphs.stats.replays
