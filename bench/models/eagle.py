"""EAGLE and EAGLE-3 draft heads over simplegraph's paged attention: one decoder layer on the target's hidden states.

Weights have the names of the public checkpoints. The embedding and, for EAGLE, lm_head are the target's.

Source: Li et al., EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840); where states are taken and normed as in
vLLM's ``llama_eagle`` and ``llama_eagle3``.
"""

from __future__ import annotations

import abc
import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bench.models.checkpoint import CheckpointError, load_checkpoint, load_tensors, read_checkpoint
from bench.models.joined import Joined
from bench.models.llama import (
    Attention,
    CacheShape,
    DecoderLayer,
    Llama,
    LlamaStep,
    build_llama,
    materialize,
    randomize,
)
from bench.models.llama_kinds import load_config
from bench.models.rotary import RotaryEmbedding
from bench.models.serving_step import ServingStep
from bench.tools.files import DATA

if TYPE_CHECKING:
    from transformers import LlamaConfig

TINY = DATA / "eagle"
_NO_CACHE = CacheShape(1, 1)  # the layers' own caches are not used: the backend has one


class Draft(nn.Module, abc.ABC):
    """Base of both kinds: a decoder layer with its own rotary positions.

    Args:
        config: of the draft: one layer of the target's hidden size.
        target: the target model, which provides the weights that the draft lacks.
    """

    def __init__(self, config: LlamaConfig, target: Llama) -> None:
        super().__init__()
        _check_target(config, target)
        self.config, self.hidden_size = config, config.hidden_size
        self.rotary_emb = RotaryEmbedding(config)
        self._target = (target,)  # in a tuple, so that it is not registered as a submodule
        self._table: Tensor | None = None
        self._earlier: list[Tensor | None] = []  # graphs of other engines read them

    def tabulate(self, max_positions: int) -> None:
        """Use a table of cosines and sines from now on: one kernel per step instead of ten.

        Args:
            max_positions: positions are below this.
        """
        if self._table is not None and len(self._table) >= max_positions:
            return
        self._earlier.append(self._table)
        weight = self.fc.weight
        positions = torch.arange(max_positions, device=weight.device)
        self._table = torch.stack(self.rotary_emb(positions, weight.dtype), dim=1)  # (positions, 2, 1, head_dim)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step; return the input of `choose`, and the states for the next step."""
        if self._table is None:
            return self.run(input_ids, hidden, ServingStep(*self.rotary_emb(positions, hidden.dtype)))
        return self.run(input_ids, hidden, ServingStep(*self._table.index_select(0, positions).unbind(1)))

    @abc.abstractmethod
    def run(self, input_ids: Tensor, hidden: Tensor, step: LlamaStep) -> tuple[Tensor, Tensor]:
        """Run one step, with any attention."""


class Eagle(Draft):
    """EAGLE: embedding and previous state are joined to one input of a decoder layer, whose output is the next state.

    Args:
        config: of the draft: one layer of the target's hidden size.
        target: whose tokens are drafted; its embedding and lm_head are used.
        fc_bias: True if the layer that joins the two has a bias.
    """

    def __init__(self, config: LlamaConfig, target: Llama, *, fc_bias: bool = False) -> None:
        super().__init__(config, target)
        self.state_size = hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=fc_bias)
        layer = DecoderLayer(config, _NO_CACHE, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs are the states; none: the states are the final ones."""
        return ()

    def fuse(self, states: Tensor) -> Tensor:
        """Return the target's states unchanged."""
        return states

    def run(self, input_ids: Tensor, hidden: Tensor, step: LlamaStep) -> tuple[Tensor, Tensor]:
        """Return the next states twice: for `choose`, and for the next step."""
        embedded = self._target[0].model.embed_tokens(input_ids)
        hidden = self.layers[0](self.fc(torch.cat((embedded, hidden), dim=-1)), step)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the target's vocabulary."""
        return self._target[0].head(hidden)

    def choose(self, hidden: Tensor) -> Tensor:
        """Return the most likely tokens."""
        return self.logits(hidden).argmax(dim=-1)


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads a token's embedding together with its state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        layer = DecoderLayer(config, _NO_CACHE, 0)
        self.self_attn, self.mlp = _widened(layer.self_attn, 2 * config.hidden_size), layer.mlp
        self._norm_before_residual = getattr(config, "norm_before_residual", False)

    def forward(self, embedded: Tensor, hidden: Tensor, step: LlamaStep) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        hidden = self.self_attn(torch.cat((self.input_layernorm(embedded), normed), dim=-1), step)
        hidden = residual + hidden
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(Draft):
    """EAGLE-3: fuses the states of three target layers, and has a small vocabulary of its own.

    Args:
        config: of the draft; ``draft_vocab_size`` if it has its own vocabulary.
        target: whose tokens are drafted.
        own_embedding: True if it has its own embedding.
    """

    def __init__(self, config: LlamaConfig, target: Llama, *, own_embedding: bool = False) -> None:
        super().__init__(config, target)
        hidden = config.hidden_size
        vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.state_size = 3 * hidden
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.d2t = nn.Parameter(torch.zeros(vocab, dtype=torch.int64), requires_grad=False)  # target id - draft id
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if own_embedding else None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs are the states: an early, a middle and a late one."""
        count = len(self._target[0].model.layers)
        return min(2, count - 1), count // 2, max(count - 3, 0)

    def fuse(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def run(self, input_ids: Tensor, hidden: Tensor, step: LlamaStep) -> tuple[Tensor, Tensor]:
        """Return normed states for `choose`, and the states themselves for the next step."""
        embedding = self._target[0].model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        hidden = self.layers[0](embedding(input_ids), hidden, step)
        return self.norm(hidden), hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the draft's vocabulary."""
        return self.lm_head(hidden)

    def choose(self, hidden: Tensor) -> Tensor:
        """Return the most likely tokens, as ids of the target's vocabulary."""
        ids = self.logits(hidden).argmax(dim=-1)
        return ids + self.d2t.index_select(0, ids)


def draft_config(target: LlamaConfig, *, draft_vocab_size: int | None = None) -> LlamaConfig:
    """Make the config of a draft of the target's shape: one layer, for EAGLE-3 with its own vocabulary."""
    config = copy.deepcopy(target)
    config.num_hidden_layers = 1
    config.draft_vocab_size = draft_vocab_size or target.vocab_size
    return config


def build_eagle(kind: str, target: Llama, *, draft_vocab_size: int | None = None, seed: int = 1) -> Eagle | Eagle3:
    """Build a draft with random weights, on the target's device and in its dtype.

    Args:
        kind: "eagle" or "eagle3".
        target: whose tokens are drafted.
        draft_vocab_size: of an EAGLE-3 draft, whose ids are spread over the target's; the target's by default.
        seed: of the weights.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in ("eagle", "eagle3"):
        raise ValueError(f"the kind of draft is {kind!r}; expected 'eagle' or 'eagle3'.")
    config = draft_config(target.config, draft_vocab_size=draft_vocab_size)
    with torch.device("meta"):
        draft = Eagle(config, target) if kind == "eagle" else Eagle3(config, target)
    _materialize(draft, target)
    randomize(draft, config.initializer_range, seed)
    if isinstance(draft, Eagle3):
        ids = torch.arange(len(draft.d2t))
        draft.d2t.copy_(ids * (config.vocab_size // len(ids)) - ids)
    return draft


def load_eagle(folder: Path | str, target: Llama) -> Eagle | Eagle3:
    """Load a draft from a folder in the public format, to the target's device and dtype.

    Raises:
        CheckpointError: files are missing or unreadable, the draft is for another target, or tensors do not match.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json.")
    config = load_config(folder)
    tensors = {_named(name): tensor for name, tensor in read_checkpoint(folder).items()}
    fused = tensors.get("fc.weight")
    if fused is None:
        raise CheckpointError(f"{folder} has no fc.weight; expected an EAGLE or EAGLE-3 draft.")
    with torch.device("meta"):
        draft: Eagle | Eagle3
        try:
            if fused.shape[1] == 3 * fused.shape[0]:
                draft = Eagle3(config, target, own_embedding="embed_tokens.weight" in tensors)
            else:
                draft = Eagle(config, target, fc_bias="fc.bias" in tensors)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error
    _materialize(draft, target)
    if isinstance(draft, Eagle3):
        draft.d2t.zero_()
        tensors.setdefault("d2t", draft.d2t)  # if it is missing, the vocabularies are the same
        dropped = {"t2d"}  # the inverse of d2t, for training
    else:
        dropped = {"embed_tokens.weight", "lm_head.weight"}  # the target's
    load_tensors(draft, [(name, tensor) for name, tensor in tensors.items() if name not in dropped], folder)
    if isinstance(draft, Eagle3):
        _check_ids(draft, folder)
    return draft


def tiny_pair(
    kind: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Llama, Eagle | Eagle3]:
    """Load the tiny target of `data/eagle` and its draft, trained by `bench.spec_decode.train_eagle`."""
    config = load_config(TINY / "target")
    target = build_llama(config, _NO_CACHE, 1, device=device, dtype=dtype, random_weights=False)
    load_checkpoint(target, TINY / "target")
    return target, load_eagle(TINY / kind, target)


def _named(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _materialize(draft: Eagle | Eagle3, target: Llama) -> None:
    weight = target.model.embed_tokens.weight
    materialize(draft, weight.device, weight.dtype)
    draft.rotary_emb.reset()


def _check_target(config: LlamaConfig, target: Llama) -> None:
    wanted = target.config
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(wanted, name):
            raise ValueError(
                f"the draft's {name} is {getattr(config, name)}, the target's {getattr(wanted, name)}; expected a "
                "draft that was trained for this target."
            )
    if config.num_hidden_layers != 1:
        raise ValueError(f"the draft has {config.num_hidden_layers} layers; expected 1.")


def _check_ids(draft: Eagle3, folder: Path) -> None:
    ids = draft.d2t + torch.arange(len(draft.d2t), device=draft.d2t.device)
    if int(ids.min()) < 0 or int(ids.max()) >= draft.config.vocab_size:
        raise CheckpointError(
            f"{folder}: d2t leads to token ids from {int(ids.min())} to {int(ids.max())}; the target has "
            f"{draft.config.vocab_size}."
        )


def _widened(attention: Attention, size: int) -> Attention:
    """Replace the attention's projections by ones for inputs of another size."""
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(attention, name)
        setattr(attention, name, nn.Linear(size, old.out_features, bias=old.bias is not None))
    attention.qkv_proj = Joined(attention.q_proj, attention.k_proj, attention.v_proj)
    return attention
