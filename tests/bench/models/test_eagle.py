"""EAGLE and EAGLE-3 drafts: what they compute, and the public checkpoint format in all its spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

from bench.models.checkpoint import CheckpointError  # noqa: E402
from bench.models.eagle import Eagle, Eagle3, build_eagle, draft_config, load_eagle, tiny_pair  # noqa: E402
from bench.models.llama import CacheShape, Llama, build_llama  # noqa: E402
from bench.spec_decode.train_eagle import dense_step, draft_loss, run_target, train  # noqa: E402

HIDDEN, VOCAB = 32, 40


def config(**changes: Any) -> Any:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    return transformers.LlamaConfig(**settings | changes)


@pytest.fixture
def target() -> Llama:
    return build_llama(config(), CacheShape(1, 4), 1, dtype=torch.float32)


def save(folder: Path, draft: Any, *, pickled: bool = False, rename: Any = str, **changes: Any) -> Path:
    tensors = {rename(name): tensor.detach().clone() for name, tensor in draft.named_parameters()}
    tensors |= changes.pop("tensors", {})
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder.mkdir(exist_ok=True)
    settings = draft.config.to_dict() | changes
    (folder / "config.json").write_text(json.dumps(settings))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def inputs(draft: Any, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(0, VOCAB, (1, count), generator=generator),
        torch.randn(count, draft.state_size, generator=generator),
    )


def run(draft: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, states = inputs(draft)
    with torch.inference_mode():
        found, carried = draft.run(ids.flatten(), draft.fuse(states), dense_step(draft.rotary_emb, ids))
        return draft.choose(found), carried


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def layer_by_hand(inner: torch.Tensor, residual: torch.Tensor, layer: Any, rotary: Any) -> torch.Tensor:
    """Attention and MLP of one decoder layer, written out head by head."""
    attention, tokens = layer.self_attn, inner.shape[0]
    q, k, v = (
        (inner @ projection.weight.T).view(tokens, -1, 8)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    angles = torch.arange(tokens)[:, None] * rotary.inv_freq
    cos, sin = angles.cos(), angles.sin()

    def turned(head: torch.Tensor) -> torch.Tensor:
        first, second = head.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    heads = []
    for head in range(4):
        scores = turned(q[:, head]) @ turned(k[:, head // 2]).T / 8**0.5
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, head // 2])
    hidden = residual + torch.cat(heads, dim=-1) @ attention.o_proj.weight.T
    normed, mlp = rms(hidden, layer.post_attention_layernorm.weight), layer.mlp
    gate = torch.nn.functional.silu(normed @ mlp.gate_proj.weight.T)
    return hidden + (gate * (normed @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T


def randomize_norms(draft: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    for name, weight in draft.named_parameters():
        if weight.dim() == 1 and weight.is_floating_point():
            weight.data.uniform_(0.5, 1.5, generator=generator)
            assert "norm" in name


def test_eagle_is_the_published_head(target: Llama) -> None:
    draft = build_eagle("eagle", target)
    randomize_norms(draft)
    ids, states = inputs(draft)
    inner = torch.cat((target.model.embed_tokens.weight[ids[0]], states), dim=-1) @ draft.fc.weight.T
    expected = layer_by_hand(inner, inner, draft.layers[0], draft.rotary_emb)  # no norm before attention
    chosen, carried = run(draft)
    assert torch.allclose(carried, expected, atol=1e-4)
    assert torch.equal(chosen, (expected @ target.lm_head.weight.T).argmax(-1))


@pytest.mark.parametrize("norm_first", [False, True])
def test_eagle3_is_the_published_head(target: Llama, norm_first: bool) -> None:
    draft = build_eagle("eagle3", target, draft_vocab_size=10)
    draft.layers[0]._norm_before_residual = norm_first
    randomize_norms(draft)
    ids, states = inputs(draft)
    fused, layer = states @ draft.fc.weight.T, draft.layers[0]
    normed = rms(fused, layer.hidden_norm.weight)
    embedded = rms(target.model.embed_tokens.weight[ids[0]], layer.input_layernorm.weight)
    inner = torch.cat((embedded, normed), dim=-1)
    expected = layer_by_hand(inner, normed if norm_first else fused, layer, draft.rotary_emb)
    chosen, carried = run(draft)
    assert torch.allclose(carried, expected, atol=1e-4)
    ids = (rms(expected, draft.norm.weight) @ draft.lm_head.weight.T).argmax(-1)
    assert torch.equal(chosen, ids * 4)  # ten ids spread over forty


def test_tabulated_positions_are_the_computed_ones(target: Llama) -> None:
    draft, steps = build_eagle("eagle", target), []
    draft.run = lambda ids, hidden, step: steps.append(step)  # type: ignore[method-assign,assignment]
    positions, hidden = torch.tensor([0, 29, 7, 7]), torch.zeros(4, HIDDEN)
    draft(positions, positions, hidden)
    for limit in (30, 20):  # a shorter table takes nothing away
        draft.tabulate(limit)
        draft(positions, positions, hidden)
    for step in steps[1:]:
        assert torch.equal(step.cos, steps[0].cos)
        assert torch.equal(step.sin, steps[0].sin)


def test_eagle3_takes_an_early_a_middle_and_a_late_layer(target: Llama) -> None:
    assert build_eagle("eagle3", target).aux_layers == (2, 4, 5)
    assert build_eagle("eagle", target).aux_layers == ()
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        hidden, states = run_target(target, ids, (2, 4, 5))
        decoder, step = target.model, dense_step(target.model.rotary_emb, ids)
        expected, state = [], decoder.embed_tokens(ids[0])
        for index, layer in enumerate(decoder.layers):
            expected += [state] if index in (2, 4, 5) else []
            state = layer(state, step)
    assert torch.equal(states, torch.cat(expected, dim=-1))
    assert torch.equal(hidden[0], decoder.norm(state))


@pytest.mark.parametrize("pickled", [False, True])
def test_a_public_eagle3_checkpoint_is_loaded_under_its_own_names(tmp_path: Path, target: Llama, pickled: bool) -> None:
    draft = build_eagle("eagle3", target, draft_vocab_size=10)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    folder = save(
        tmp_path / "draft",
        draft,
        pickled=pickled,
        rename=lambda name: name.replace("layers.0.", "midlayer."),
        tensors={"t2d": t2d},
    )
    loaded = load_eagle(folder, target)
    assert isinstance(loaded, Eagle3)
    assert loaded.lm_head.weight.shape == (10, HIDDEN)
    for found, expected in zip(run(loaded), run(draft), strict=True):
        assert torch.equal(found, expected)


def test_an_eagle3_checkpoint_may_bring_an_embedding_and_the_targets_vocabulary(tmp_path: Path, target: Llama) -> None:
    draft = build_eagle("eagle3", target)
    embedding = torch.randn(VOCAB, HIDDEN)
    folder = save(tmp_path / "draft", draft, tensors={"embed_tokens.weight": embedding, "d2t": None})
    loaded = load_eagle(folder, target)
    assert torch.equal(loaded.embed_tokens.weight, embedding)
    assert not torch.equal(run(loaded)[1], run(draft)[1])
    assert int(loaded.d2t.abs().max()) == 0


@pytest.mark.parametrize("bias", [False, True])
def test_a_public_eagle_checkpoint_shares_embedding_and_head_with_its_target(
    tmp_path: Path, target: Llama, bias: bool
) -> None:
    draft = build_eagle("eagle", target)
    more = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "lm_head.weight": torch.randn(VOCAB, HIDDEN)}
    if bias:
        more["fc.bias"] = torch.randn(HIDDEN)
    loaded = load_eagle(save(tmp_path / "draft", draft, tensors=more), target)
    assert isinstance(loaded, Eagle)
    if bias:
        assert torch.equal(loaded.fc.bias, more["fc.bias"])
    else:
        assert torch.equal(run(loaded)[1], run(draft)[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "the draft's hidden_size is 64, the target's 32"),
        ({"vocab_size": 41}, "the draft's vocab_size is 41, the target's 40"),
        ({"num_hidden_layers": 2}, "the draft has 2 layers; expected 1"),
        ({"tensors": {"fc.weight": None}}, "has no fc.weight"),
        ({"tensors": {"norm.weight": None}}, "1 missing: norm.weight"),
        ({"tensors": {"norm.weight": torch.ones(3)}}, r"norm.weight is \(3,\), the model has \(32,\)"),
        ({"tensors": {"d2t": torch.full((10,), 39)}}, "d2t leads to token ids from 39 to 48; the target has 40"),
        ({"tensors": {"layers.1.mlp.up_proj.weight": torch.ones(1)}}, "1 unexpected: layers.1"),
    ],
)
def test_a_draft_that_does_not_fit_its_target_is_refused(
    tmp_path: Path, target: Llama, changes: dict[str, Any], words: str
) -> None:
    draft = build_eagle("eagle3", target, draft_vocab_size=10)
    with pytest.raises(CheckpointError, match=words):
        load_eagle(save(tmp_path / "draft", draft, **changes), target)


def test_no_draft_says_what_was_looked_for(tmp_path: Path, target: Llama) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_eagle(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(draft_config(target.config).to_dict()))
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        load_eagle(tmp_path, target)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no state dict")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        load_eagle(tmp_path, target)
    with pytest.raises(ValueError, match="kind of draft is 'medusa'"):
        build_eagle("medusa", target)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_training_teaches_a_draft_what_its_target_says(target: Llama, kind: str) -> None:
    draft = build_eagle(kind, target)
    ids = torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))
    before = float(draft_loss(draft, target, ids))
    train(draft, iter([ids] * 40), lambda batch: draft_loss(draft, target, batch), kind)
    assert float(draft_loss(draft, target, ids)) < 0.9 * before


def test_the_trained_pair_knows_its_text() -> None:
    from bench.tools import text

    target, draft = tiny_pair("eagle3")
    ids = text.token_ids(200, 256, start=1000)[None]
    with torch.inference_mode():
        hidden, states = run_target(target, ids, draft.aux_layers)
        said = target.head(hidden)[0].argmax(-1)
        found, _ = draft.run(ids[0].roll(-1), draft.fuse(states), dense_step(draft.rotary_emb, ids))
    assert float((said[:-1] == ids[0, 1:]).double().mean()) > 0.5
    assert float((draft.choose(found)[:-1] == said[1:]).double().mean()) > 0.4
