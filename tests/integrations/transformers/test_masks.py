"""Masks that transformers leaves out eagerly and makes in captures: graphs go eager's way where no data is read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from run_log import run_log
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import simplegraph as sg
from simplegraph.base import patches
from simplegraph.integrations.transformers import graph_encoder
from simplegraph.integrations.transformers.masks import KnownValues
from tests.support.where import without_gpu

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from transformers.pytorch_utils import compile_compatible_method_lru_cache  # noqa: E402
from transformers.utils.import_utils import is_cuda_stream_capturing  # noqa: E402

ROWS, TOKENS = 4, 8
_READS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.item.default"}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operators of a run, without those that only read a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [str(func)] if str(func) not in _READS else []
        return func(*args, **(kwargs or {}))


class Listed(nn.Module):
    """Runs a model without its cache, and notes the operators of eager runs and of captures."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.lists: dict[bool, list[list[str]]] = {False: [], True: []}

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> Any:
        with Operators() as operators:
            found = self.model(input_ids, **inputs)
        self.lists[is_cuda_stream_capturing()].append(operators.names)
        return found.last_hidden_state


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**tiny.BERT))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=tiny.VOCABULARY, use_cache=False)
    return transformers.GPT2Model(config)


def llama() -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": tiny.VOCABULARY}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def ids(device: torch.device, rows: int = ROWS) -> Tensor:
    return torch.randint(3, tiny.VOCABULARY, (rows, TOKENS), device=device)


@pytest.fixture(params=[bert, gpt2, llama])
def listed(request: pytest.FixtureRequest, device: torch.device) -> Listed:
    return Listed(tiny.build(request.param, device)).eval()


@without_gpu
@pytest.mark.proofs
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_mask_a_graph_has_eagers_operators(listed: Listed, device: torch.device, mode: Any) -> None:
    """A mask would be right, too, but attention with one is another, slower kernel."""
    model = sg.wrap(listed, capture_sizes=[ROWS], progress=False)
    with mode():
        for _ in range(4):
            tokens = ids(device)
            torch.testing.assert_close(model(tokens), listed.model(tokens).last_hidden_state)
    eager, captured = listed.lists[False][0], listed.lists[True][0]
    assert captured == eager
    assert model.graph_stats.replays == 2
    assert not model.graph_stats.failures


@pytest.mark.proofs
def test_a_callers_mask_is_in_the_graph_whatever_the_first_one_hid(listed: Listed, device: torch.device) -> None:
    """Eager reads that the first mask hides nothing; the next one hides something."""
    model = sg.wrap(listed, capture_sizes=[ROWS], progress=False)
    whole = torch.ones(ROWS, TOKENS, dtype=torch.int64, device=device)
    part = whole.clone()
    part[1:, TOKENS // 2 :] = 0
    with torch.no_grad():
        for mask in (whole, whole, part, whole, part):
            tokens = ids(device)
            shown = mask.bool()
            expected = listed.model(tokens, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(model(tokens, attention_mask=mask)[shown], expected[shown])
    assert model.graph_stats.replays == 3
    assert not model.graph_stats.failures


@pytest.mark.proofs
@pytest.mark.parametrize("sizes", [(2, 2, 3), (3, 2, 3), (3, 3, 2), (1, 4, 3)])
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_with_a_mask_are_padded_in_whatever_order_sizes_come(
    mode: Any, make: Any, sizes: tuple[int, ...], device: torch.device
) -> None:
    module = Listed(tiny.build(make, device)).eval()
    model = sg.wrap(module, capture_sizes=[1, 4], progress=False)
    with mode():
        for rows in (*sizes, *sizes, *sizes):
            tokens, mask = ids(device, rows), torch.ones(rows, TOKENS, dtype=torch.int64, device=device)
            expected = module.model(tokens, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(model(tokens, attention_mask=mask), expected, rtol=1e-4, atol=1e-4)
    assert model.graph_stats.padded_tokens > 0
    assert not model.graph_stats.failures
    assert sg.Reason.PADDING_SHOWS not in model.graph_stats.eager


@pytest.mark.parametrize("make", [gpt2, llama])
def test_positions_of_packed_sequences_are_looked_at_by_the_graph(make: Any, device: torch.device) -> None:
    """Eager reads that the first positions are of one sequence a row; then come packed ones."""
    module = tiny.build(make, device)
    model = sg.wrap(module, capture_sizes=[ROWS], progress=False)
    one = torch.arange(TOKENS, device=device).expand(ROWS, -1).contiguous()
    packed = one % 3
    with torch.no_grad():
        for positions in (one, one, packed, one, packed):
            tokens = ids(device)
            expected = module(tokens, position_ids=positions).last_hidden_state
            torch.testing.assert_close(model(tokens, position_ids=positions).last_hidden_state, expected)
    assert model.graph_stats.replays >= 3


class Positions(nn.Module):
    """Makes positions itself, of packed sequences where a row is long."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None] % (5 if tokens.shape[1] > 6 else 100)
        found: Tensor = self.model(tokens, position_ids=positions).last_hidden_state
        return found


def test_positions_that_the_forward_makes_count_as_what_they_are_at_each_length(device: torch.device) -> None:
    module = Positions(tiny.build(gpt2, device)).eval()
    model = sg.wrap(module, capture_sizes=[ROWS], progress=False)
    with torch.no_grad():
        for length in (6, 8) * 3:
            tokens = ids(device)[:, :length].contiguous()
            torch.testing.assert_close(model(tokens), module(tokens))
    assert model.graph_stats.replays >= 2


def test_all_sizes_have_eagers_operators(listed: Listed, device: torch.device) -> None:
    model = sg.wrap(listed, capture_sizes=[2, 3, 4, 5], progress=False)
    with torch.no_grad():
        model.capture_graphs(ids(device, 5))
        assert len(listed.lists[True]) == 4
        assert len({tuple(names) for names in (*listed.lists[False], *listed.lists[True])}) == 1
        for rows in (5, 4, 3, 2):
            tokens = ids(device, rows)
            torch.testing.assert_close(model(tokens), listed.model(tokens).last_hidden_state)
    assert model.graph_stats.replays == 4


def test_sizes_are_followed_until_the_mask_is_decided(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than eight sizes, only the largest and the smallest are observed, and followed to their end."""
    run, followed = KnownValues.run, []

    def counted(self: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
        followed.append(func)
        return run(self, func, args, kwargs)

    monkeypatch.setattr(KnownValues, "run", counted)
    counts = []
    for sizes in ([2, 10], list(range(2, 11))):
        followed.clear()
        with torch.no_grad():
            sg.wrap(tiny.build(llama, device), capture_sizes=sizes, progress=False).capture_graphs(ids(device, 10))
        counts.append(len(followed))
    observed, all_sizes = counts
    assert observed < all_sizes < 3 * observed  # 4.5 times as many, were all followed to their end


def test_an_encoder_at_full_lengths_makes_no_mask(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module, plain, made = (*(tiny.build(bert, device) for _ in range(2)), run_log())
    from transformers.models.bert import modeling_bert

    make_mask = modeling_bert.create_bidirectional_mask

    def noted(*args: Any, **kwargs: Any) -> Any:
        mask = make_mask(*args, **kwargs)
        made(mask is None, is_cuda_stream_capturing())
        return mask

    monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", noted)
    whole = torch.ones(ROWS, TOKENS, dtype=torch.int64, device=device)
    with torch.no_grad(), graph_encoder(module, lengths=[TOKENS], capture_sizes=[ROWS]) as graphs:
        for _ in range(4):
            tokens = ids(device)
            expected = plain(tokens, attention_mask=whole).last_hidden_state
            torch.testing.assert_close(module(tokens, attention_mask=whole).last_hidden_state, expected)
        assert graphs.stats.replays >= 1
    assert (True, True) in made()
    assert (False, True) not in made()


@pytest.mark.proofs
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("masked", [False, True])
def test_a_training_step_in_bfloat16_is_proven_and_equal_to_the_bit(
    make: Any, masked: bool, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention with another kernel gives gradients other roundings, for which its proof would refuse the graph."""

    def trained(*, graphs: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = tiny.build(make, device).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step(tokens: Tensor, **inputs: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens, **inputs).last_hidden_state.float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = sg.train_step(step, optimizers=optimizer, modules=[model]) if graphs else step
        torch.manual_seed(1)
        hides = {"attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.int64, device=device)} if masked else {}
        losses = [run(ids(device), **hides).clone() for _ in range(5)]
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())], run

    with caplog.at_level(logging.WARNING, logger="simplegraph"):
        found, step = trained(graphs=True)
    expected, _ = trained(graphs=False)
    assert step.graph_stats.replays == 2
    assert not step.graph_stats.failures
    for one, other in zip(found, expected, strict=True):
        if masked:  # with the mask, which eager leaves out
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)
        else:
            assert torch.equal(one, other)


def test_what_is_asked_outside_of_graphs_is_answered_as_before(device: torch.device) -> None:
    from transformers import masking_utils

    model = sg.wrap(tiny.build(gpt2, device), capture_sizes=[ROWS], progress=False)
    with torch.no_grad():
        for _ in range(3):
            model(ids(device))
    assert any("is_tracing" in label for label in patches.installed())
    assert not masking_utils.is_tracing(None)
    assert not masking_utils.is_tracing(ids(device))
    assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None]) is None
    assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None] % 2).tolist() == [[0, 0, 1, 1]]
    original = masking_utils.is_tracing
    patches.restore(masking_utils, "is_tracing")
    assert masking_utils.is_tracing is not original
    assert masking_utils.is_tracing.__module__.startswith("transformers.")


class Placed(nn.Module):
    """Adds positions from two functions that transformers caches: one is passed a tensor, as DETR's is."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    @compile_compatible_method_lru_cache(maxsize=1)
    def among_visible(self, visible: Tensor) -> Tensor:
        return visible.cumsum(1)

    @compile_compatible_method_lru_cache(maxsize=1)
    def all_of(self, count: int, device: torch.device) -> Tensor:
        self.computed += 1
        return torch.arange(count, device=device)

    @compile_compatible_method_lru_cache(maxsize=1)
    def at_least(self, bounds: tuple[Tensor, float]) -> Tensor:
        return bounds[0].clamp(bounds[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.at_least((x, -1.0)) + self.among_visible(x > 0) + self.all_of(x.shape[1], x.device)


def test_a_cache_of_transformers_keeps_nothing_that_a_capture_made(device: torch.device) -> None:
    module = Placed().eval()
    model = sg.wrap(module, capture_sizes=[ROWS], progress=False)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(ROWS, TOKENS, device=device)
            expected = x.clamp(-1.0) + (x > 0).cumsum(1) + torch.arange(TOKENS, device=device)
            torch.testing.assert_close(model(x), expected)
    assert not model.graph_stats.failures
    assert model.graph_stats.replays >= 4
    assert module.computed == 1  # cached as without graphs


@pytest.mark.parametrize("lazy", [True, False], ids=["at a call", "upfront"])
def test_a_warmup_of_a_capture_makes_the_masks_that_the_capture_makes(lazy: bool) -> None:
    """What a forward makes on the CPU with a mask is copied to a device in warmups alone."""

    class Masked(nn.Module):
        """Makes constants with a mask, as eager attention does; a capture takes none that no warmup made."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            hidden = not transformers.masking_utils._ignore_bidirectional_mask_sdpa(attention_mask.bool(), TOKENS)
            if is_cuda_stream_capturing():
                if hidden and not made:
                    raise RuntimeError("a constant that no warmup made")
            elif hidden:
                made.append(True)
            return input_ids + 1 if not hidden else input_ids + attention_mask

    made: list[bool] = []
    model: Any = sg.wrap(Masked().eval(), capture_sizes=[ROWS], progress=False, verify=0)
    inputs = {"input_ids": torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if lazy:
        for rows in (2, ROWS, ROWS, ROWS):
            expected = inputs["input_ids"][:rows] + 1
            assert torch.equal(model(**{name: value[:rows] for name, value in inputs.items()}), expected)
    else:
        model.capture_graphs(**{name: value[:1] for name, value in inputs.items()})
    assert made
    assert model.graph_stats.failures == {}
    assert len(model.graph_stats.graphs) >= 1
