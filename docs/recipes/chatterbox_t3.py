"""The decoder of chatterbox's T3: each step of `inference` is a replay on a cache of fixed length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from chatterbox.models.t3 import T3
from chatterbox.models.t3.llama_configs import LLAMA_CONFIGS
from chatterbox.models.t3.modules.cond_enc import T3Cond
from torch import Tensor, nn
from transformers import StaticCache
from transformers.modeling_outputs import BaseModelOutputWithPast

import simplegraph as sg


# Recipe
class GraphDecoder(nn.Module):
    """Takes the place of `t3.tfmr`: prompts run eagerly, and each code after them is one replay."""

    def __init__(self, decoder: nn.Module, longest: int) -> None:
        super().__init__()
        self.config, cache = decoder.config, StaticCache(config=decoder.config, max_cache_len=longest)

        def run(embeddings: Tensor, at: Tensor) -> Tensor:
            at = {"position_ids": at, "cache_position": at[0]}
            return decoder(inputs_embeds=embeddings, past_key_values=cache, **at).last_hidden_state

        self.cache, self.prompt, self.step, self.length = cache, run, sg.wrap(run), 0

    def forward(self, inputs_embeds: Tensor, past_key_values: Any = None, **others: Any) -> BaseModelOutputWithPast:
        run, start = (self.prompt, 0) if past_key_values is None else (self.step, self.length)
        if start == 0:
            self.cache.reset()
        self.length = start + inputs_embeds.shape[1]
        at = torch.arange(start, self.length, device=inputs_embeds.device).expand(inputs_embeds.shape[0], -1)
        hidden = run(inputs_embeds, at)
        return BaseModelOutputWithPast(hidden, self.cache, (hidden,))


# Comparison
def main() -> dict[str, Callable[[], object]]:
    """Compare the codes of some texts, and return what speaks them, to be timed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    LLAMA_CONFIGS["Llama_520M"]["num_hidden_layers"] = 30 if device == "cuda" else 2
    t3 = T3().to(device).eval()
    prompt, emotion = torch.randint(6000, (1, 150)), torch.full((1, 1, 1), 0.5)
    voice = T3Cond(torch.randn(1, 256), cond_prompt_speech_tokens=prompt, emotion_adv=emotion).to(device=device)

    def codes(decoder: nn.Module, length: int) -> Tensor:
        t3.tfmr = decoder
        torch.manual_seed(length)
        text = torch.randint(1, 200, (1, length))
        text[:, 0], text[:, -1] = t3.hp.start_text_token, t3.hp.stop_text_token
        return t3.inference(t3_cond=voice, text_tokens=text.expand(2, -1), max_new_tokens=40)  # two rows: guided

    plain, graphed = t3.tfmr, GraphDecoder(t3.tfmr, longest=512)
    for length in (7, 12, 9, 7):
        assert torch.equal(codes(graphed, length), codes(plain, length))
    print(graphed.step.graph_report())
    assert graphed.step.graph_stats.replays > 100
    return {"plain": lambda: codes(plain, 9), "graphs": lambda: codes(graphed, 9)}


if __name__ == "__main__":
    main()
