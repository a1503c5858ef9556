"""An attention backend of one's own, and its comparison with float64."""

import torch

import simplegraph as sg
from simplegraph.attention import AttentionBackend
from tests.support.attention_engine import AttentionEngine

device = "cuda" if torch.cuda.is_available() else "cpu"


class DecodeBackend(AttentionBackend):
    """One token a request: gathers all pages that a request can have, and masks those beyond its length."""

    support = sg.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    name = "decode"

    def run(self, layer, q, out, metadata):
        table, length = metadata.block_table[: len(q)], metadata.seq_lens[: len(q)]
        places = torch.arange(table.shape[1] * self.cache.page_size, device=q.device)
        seen = (places < length[:, None])[:, :, None, None]
        # NaN in an unwritten page would come through a mask, and padding rows see nothing.
        keys, values = (
            pages(layer)[table]
            .flatten(1, 2)
            .where(seen, 0)
            .repeat_interleave(self.num_heads // self.cache.num_kv_heads, 2)
            for pages in (self.cache.keys, self.cache.values)
        )
        scores = torch.einsum("rhd,rshd->rhs", q, keys) * self.scale
        weights = scores.masked_fill(~seen[..., 0].transpose(1, 2), -1e9).softmax(-1)
        out.copy_(torch.einsum("rhs,rshd->rhd", weights, values))


with torch.inference_mode():
    served = AttentionEngine(DecodeBackend, device, mode="FULL_DECODE_ONLY", capture_sizes=[1, 4, 8])
    served.manager.capture(served.forward)
    for seed in range(8):
        mode, error = served.step(served.requests("decode", 1 + seed, seed), seed)
        assert (mode, error < 1e-4) == (sg.CudaGraphMode.FULL, True)
