"""Text by `generate` of transformers, decoded by graphs: same call, same tokens.

It needs ``pip install ".[transformers]"``, in the folder of simplegraph's sources.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from simplegraph.integrations.transformers import graph_generation

device = "cuda" if torch.cuda.is_available() else "cpu"
# LlamaForCausalLM.from_pretrained(...) and its tokenizer; this one has random weights.
shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(vocab_size=1000, num_hidden_layers=2, eos_token_id=None, pad_token_id=0, **shape)
torch.manual_seed(0)
model = LlamaForCausalLM(config).to(device).eval()


def main() -> None:
    """Generate with and without graphs, and compare."""
    prompts = torch.randint(1, 1000, (3, 12), device=device)
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    with graph_generation(model, max_batch_size=4, max_length=64) as graphs:
        graphs.capture()  # all sizes and lengths; or leave it out, and they are captured as they come
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        print(graphs.report())
    print("the same tokens:", torch.equal(tokens, expected))
    assert torch.equal(tokens, expected)
    assert graphs.stats.replays > 20


if __name__ == "__main__":
    main()
