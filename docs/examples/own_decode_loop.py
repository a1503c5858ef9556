"""A decode loop of your own, as speech models have: each step is one replay on a cache of fixed length."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaModel, StaticCache

import simplegraph as sg

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
# Or the decoder of a text-to-speech model, which has embeddings and heads of its own for the codes of a sound.
decoder = LlamaModel(config).to(device).eval()
codes = torch.nn.Embedding(99, 64, device=device)
head = torch.nn.Linear(64, 99, device=device)


def plain_loop(prompt: Tensor, steps: int) -> Tensor:
    """Decode with a cache that grows: `prompt` is (1, length, 64) of float32, the codes are (1, steps) of int64."""
    cache, embeddings, decoded = DynamicCache(config=config), prompt, []
    for _ in range(steps):
        hidden = decoder(inputs_embeds=embeddings, past_key_values=cache, use_cache=True).last_hidden_state
        decoded.append(head(hidden[:, -1:]).argmax(-1))
        embeddings = codes(decoded[-1])
    return torch.cat(decoded, dim=1)


cache = StaticCache(config=config, max_cache_len=128)  # its memory stays where it is, so that a graph may read it


@sg.wrap
def step(code: Tensor, position: Tensor) -> Tensor:
    """Decode one code after another: both are (1, 1) of int64."""
    hidden = decoder(inputs_embeds=codes(code), position_ids=position, past_key_values=cache, use_cache=True)
    return head(hidden.last_hidden_state).argmax(-1)


def graphed_loop(prompt: Tensor, steps: int) -> Tensor:
    """Decode as `plain_loop` does; the prompt runs eagerly, all steps after it are replays."""
    cache.reset()
    hidden = decoder(inputs_embeds=prompt, past_key_values=cache, use_cache=True).last_hidden_state
    decoded = [head(hidden[:, -1:]).argmax(-1)]
    for length in range(prompt.shape[1], prompt.shape[1] + steps - 1):
        decoded.append(step(decoded[-1], torch.full((1, 1), length, device=device)))
    return torch.cat(decoded, dim=1)


def main() -> None:
    """Decode from prompts of several lengths, and compare with the loop without graphs."""
    with torch.inference_mode():
        for length in (5, 9, 23, 5):
            prompt = torch.randn(1, length, 64, device=device)
            assert torch.equal(graphed_loop(prompt, 40), plain_loop(prompt, 40))
    print(step.graph_report())
    assert step.graph_stats.captures == 1
    assert step.graph_stats.replays > 100


if __name__ == "__main__":
    main()
