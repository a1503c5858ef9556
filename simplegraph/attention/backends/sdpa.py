"""The reference backend: torch's own attention over gathered pages. Correct on any device, graph-safe, not fast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.base.config import AttentionCGSupport


class SDPABackend(AttentionBackend):
    """Calls `scaled_dot_product_attention` for every token over all the pages that its request can have.

    No shape depends on a length, so it can be captured for any batch, on the emulator and on a GPU.
    """

    support = AttentionCGSupport.ALWAYS
    name = "SDPA"
    features = ("window", "softcap", "sinks")
    reads_lengths_on_device = True

    def run(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> None:
        if self.softcap is not None or self.sinks is not None:  # torch's operator has neither
            self.run_with_lse(layer, q, out, metadata)
            return
        grouped, keys, values, mask = self._gather_inputs(layer, q, metadata)
        result = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=self.scale)
        out.view(grouped.shape).copy_(result)

    def run_with_lse(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> Tensor:
        grouped, keys, values, mask = self._gather_inputs(layer, q, metadata)
        scores = grouped.float() @ keys.float().transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        total = lse = scores.logsumexp(dim=-1, keepdim=True)
        if self.sinks is not None:
            total = torch.logaddexp(lse, self.sinks[layer].float().view(*grouped.shape[1:3], 1))
        out.view(grouped.shape).copy_((scores - total).exp() @ values.float())
        return lse.flatten(1)

    def _gather_inputs(self, layer: int, q: Tensor, metadata: CommonMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gather queries (T, num_kv_heads, group, head_dim), keys and values (T, num_kv_heads, S, head_dim), a mask."""
        request, length = self._visible(metadata)
        places = torch.arange(metadata.block_table.shape[1] * self.cache.page_size, device=q.device)
        seen = places < length[:, None]
        # Padding rows see one key, which is 0: a softmax over nothing is NaN.
        mask = places < length.clamp(min=1)[:, None]
        if self.window is not None:
            inside = places >= (length - self.window)[:, None]
            seen, mask = seen & inside, mask & inside
        keys = self._gather(self.cache.keys(layer), metadata.block_table, request, seen)
        values = self._gather(self.cache.values(layer), metadata.block_table, request, seen)
        # The query heads that share a key head are laid out as the tokens of one longer query.
        grouped = (q.shape[0], self.cache.num_kv_heads, -1, self.cache.head_dim)
        return q.reshape(grouped), keys, values, mask[:, None, None, :]

    def _visible(self, metadata: CommonMetadata) -> tuple[Tensor, Tensor]:
        """Return each token's request and the number of keys it sees, its own included; 0 for padding."""
        starts, device = metadata.query_start_loc, metadata.slot_mapping.device
        token = torch.arange(metadata.num_tokens, device=device, dtype=starts.dtype)
        index = torch.searchsorted(starts, token, right=True) - 1
        request = index.clamp(max=metadata.num_reqs - 1)
        behind = starts[request + 1] - 1 - token
        length = metadata.seq_lens[request] - behind
        return request, torch.where(index < metadata.num_reqs, length, 0)

    def _gather(self, pages: Tensor, block_table: Tensor, request: Tensor, seen: Tensor) -> Tensor:
        """Gather each token's pages: (T, num_kv_heads, max_blocks * page_size, head_dim), 0 where not seen."""
        table = block_table.index_select(0, request)
        gathered = pages.index_select(0, table.flatten()).view(*table.shape, *pages.shape[1:])
        if self.cache.layout == "NHD":
            gathered = gathered.transpose(2, 3)
        # A mask is not enough: unwritten places and those of other requests may be NaN, and NaN times 0 is NaN.
        return gathered.transpose(1, 2).flatten(2, 3).where(seen[:, None, :, None], 0)
