"""The inputs that FlashAttention's schedule is computed from."""

from __future__ import annotations

import torch

from simplegraph.attention import BatchMetadata
from simplegraph.attention.backends.flash_attention import host_lengths


def test_a_schedule_made_before_the_graph_is_of_the_step_that_the_graph_makes(device: torch.device) -> None:
    built = BatchMetadata(max_num_tokens=8, max_num_reqs=4, max_model_len=24, page_size=4, device=device)
    view = built.set(2, [7, 9], [[5, 2, 9], [8, 1, 3]], ahead=3, num_tokens=8, num_reqs=4)
    assert host_lengths(view).tolist() == view.seq_lens.tolist() == [7, 9, 0, 0]
    assert not view.batch.behind
    built.advance([8, 11])
    assert view.batch.behind
    found = host_lengths(view)
    assert found.tolist() == [8, 11, 0, 0]
    assert (found.dtype, found.device) == (view.seq_lens.dtype, view.seq_lens.device)
    built.set(2, [7, 9], [[5, 2, 9], [8, 1, 3]])
    assert not view.batch.behind
