"""``python -m bench.spec_decode.train_eagle``: trains a tiny target on a text's bytes, and both kinds of draft for it.

They have meaningful acceptance without a real checkpoint. `data/eagle` has the trained weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from bench.models.eagle import TINY, Eagle, Eagle3, build_eagle, draft_config
from bench.models.joined import Joined
from bench.models.llama import Attention, CacheShape, Llama, build_llama
from bench.spec_decode.pairs import KINDS
from bench.tools import text
from bench.tools.measure import device_of, say
from bench.tools.options import count

VOCAB = 256
DRAFT_STEPS = 3  # steps of the draft on its own states in training, as when it drafts


class DenseStep(NamedTuple):
    """Causal attention of whole sequences, one after the other, without a cache; differentiable."""

    cos: Tensor
    sin: Tensor
    count: int

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        heads = [part.unflatten(0, (self.count, -1)).transpose(1, 2) for part in (q, k, v)]
        found = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        out.copy_(found.transpose(1, 2).flatten(0, 1))


def tiny_config() -> LlamaConfig:
    """Make a config of two layers of 128, one token per byte, and heads of 64, which all attention backends support."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=None,
    )


def main(arguments: list[str] | None = None) -> int:
    """Train, and write the checkpoints."""
    parser = argparse.ArgumentParser(prog="python -m bench.spec_decode.train_eagle", description=__doc__)
    parser.add_argument("--out", type=Path, default=TINY, help="a folder for each model goes here")
    parser.add_argument("--target-steps", type=count, default=500, help="of training")
    parser.add_argument("--draft-steps", type=count, default=600, help="of training, each draft")
    parser.add_argument("--length", type=count, default=128, help="tokens of a training sequence")
    parser.add_argument("--count", type=count, default=16, help="sequences of a step")
    options = parser.parse_args(arguments)
    device = device_of()
    torch.manual_seed(0)
    data = text.token_ids(text.TEXT.stat().st_size, VOCAB).to(device)
    target = build_llama(tiny_config(), CacheShape(1, 16), 1, device=device, dtype=torch.float32)

    def batches(steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            starts = torch.randint(len(data) - options.length, (options.count, 1), device=device)
            yield data[starts + torch.arange(options.length, device=device)]

    train(target, batches(options.target_steps), lambda ids: target_loss(target, ids), "target")
    save(target, target.config, options.out / "target")
    for kind in KINDS:
        draft = build_eagle(kind, target)
        train(draft, batches(options.draft_steps), lambda ids, draft=draft: draft_loss(draft, target, ids), kind)
        save(draft, draft_config(target.config), options.out / kind)
    return 0


def train(model: nn.Module, batches: Iterator[Tensor], loss_of: Callable[[Tensor], Tensor], name: str) -> None:
    """Train by Adam with a warmup and a linear decay."""
    steps = list(batches)
    weights = trainable(model)
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - step / len(steps))
    )
    started = time.perf_counter()
    for step, ids in enumerate(steps):
        loss = loss_of(ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == len(steps) - 1:
            say(f"{name}: step {step}, loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s")
    for weight in weights:
        weight.requires_grad_(False)


def trainable(model: nn.Module) -> list[Tensor]:
    """List the weights; joined projections count as one, since their parts share its memory."""
    joined = [module for module in model.modules() if isinstance(module, Joined)]
    parts = {id(parameter) for module in joined for part in module._parts for parameter in part.parameters()}
    own = [p for p in model.parameters() if id(p) not in parts and p.is_floating_point()]
    return [*own, *(module.weight for module in joined)]


def target_loss(target: Llama, ids: Tensor) -> Tensor:
    """Compute the loss of the next byte."""
    hidden, _ = run_target(target, ids, ())
    return F.cross_entropy(target.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def run_target(target: Llama, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Compute final hidden states of whole sequences, (B, L, hidden_size), and the states that a draft takes."""
    taps: list[Tensor] = []
    decoder = target.model
    hidden = decoder.run_layers(
        decoder.embed_tokens(ids.flatten()),
        dense_step(decoder.rotary_emb, ids),
        lambda layer, state: taps.extend([state] * layers.count(layer)),
    )
    states = torch.cat(taps, dim=-1) if layers else hidden
    return hidden.unflatten(0, ids.shape), states


def dense_step(rotary: Any, ids: Tensor) -> DenseStep:
    """Make the attention of whole sequences, (B, L)."""
    positions = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0])
    return DenseStep(*rotary(positions, torch.float32), ids.shape[0])


def draft_loss(draft: Eagle | Eagle3, target: Llama, ids: Tensor) -> Tensor:
    """Compute the loss of the draft's tokens against the target's, over several steps on its own states.

    The draft at a position sees the next token and, from the second step on, its own state instead of the target's.
    """
    with torch.no_grad():
        final, states = run_target(target, ids, draft.aux_layers)
        wanted = target.head(final).log_softmax(-1)
    step = dense_step(draft.rotary_emb, ids)
    hidden, total = draft.fuse(states), torch.zeros((), device=ids.device)
    for ahead in range(1, DRAFT_STEPS + 1):
        # Inputs of position i in step n: the token after i, and the state of step n - 1 for position i.
        found, carried = draft.run(ids.roll(-1, dims=1).flatten(), hidden, step)
        valid = ids.shape[1] - 1
        logits = draft.logits(found).unflatten(0, ids.shape)[:, ahead - 1 : valid]
        total = total + 0.8 ** (ahead - 1) * F.cross_entropy(
            logits.flatten(0, 1), wanted[:, ahead : valid + 1].exp().flatten(0, 1)
        )
        # A state belongs to the position after the one it was computed at.
        hidden = carried.unflatten(0, ids.shape).roll(1, dims=1).flatten(0, 1)
    return total


def save(model: nn.Module, config: LlamaConfig, folder: Path) -> None:
    """Save the weights in half precision, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (p.detach().half() if p.is_floating_point() else p.detach()).clone().contiguous()
        for name, p in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors")
    kept = config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    kept.pop("transformers_version", None)
    (folder / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    say(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    sys.exit(main())
