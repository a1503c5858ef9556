"""Steps that the device makes of one another, as the host knows them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_step import LENGTH, metadata

from simplegraph import CaptureSizeError, CudaGraphManager, InputError, ReplayError
from simplegraph.attention import ContextShare


def test_a_step_that_the_device_writes_is_known_by_its_shape(device: torch.device) -> None:
    first, second = metadata(device), metadata(device)
    first.set([2, 2], [7, 22], [[5, 2, 9], [8, 1, 3, 4, 6, 7]], ahead=4)
    second.follow(first.batch, 4, 4)
    batch = second.batch
    assert (batch.num_reqs, batch.num_tokens, batch.padded_reqs, batch.padded_tokens) == (2, 2, 4, 4)
    assert (batch.query_lens, batch.seq_lens.tolist()) == ({1}, [11, LENGTH])
    assert second.live(4, 4) is second.view(4, 4)
    with pytest.raises(CaptureSizeError, match="the step to follow has 2 requests, the graph only 1"):
        second.follow(first.batch, 1, 4)
    with pytest.raises(CaptureSizeError, match="expected 1 to 16 tokens and 1 to 6 requests"):
        second.follow(first.batch, 7, 4)
    with pytest.raises(InputError, match="was set with ahead=4; expected at least 5"):
        second.follow(first.batch, 4, 5)


def test_a_step_that_goes_on_from_the_one_before_sends_nothing(device: torch.device) -> None:
    built = metadata(device)
    view = built.set(2, [7, 9], [[5, 2, 9, 8], [8, 1, 3, 4]], ahead=6, num_tokens=8, num_reqs=4)
    before = [view.seq_lens.tolist(), view.slot_mapping.tolist(), view.block_table.tolist()]
    version = built.batch.version
    built.advance([8, 12], ahead=3)
    batch = built.batch
    assert (batch.seq_lens.tolist(), batch.ahead, batch.version) == ([8, 12], 3, version + 1)
    assert built.live(8, 4) is view
    assert [view.seq_lens.tolist(), view.slot_mapping.tolist(), view.block_table.tolist()] == before
    built.advance([13, 15])  # all that the pages were set for
    assert built.batch.seq_lens.dtype == "int32"


@pytest.mark.parametrize(
    ("lengths", "ahead", "message"),
    [
        ([8, 8], 0, r"seq_lens\[1\] is 8 after 9; expected no less, and at most 15"),
        ([14, 9], 0, r"seq_lens\[0\] is 14 after 7; expected no less, and at most 13"),
        ([12, 9], 2, r"seq_lens\[0\] is 12 after 7; expected no less, and at most 11.*with ahead=2"),
        ([7, 9], 7, r"seq_lens\[0\] is 7 after 7; expected no less, and at most 6"),
        ([-(1 << 62), 9], 0, r"seq_lens\[0\] is -4611686018427387904 after 7"),
        ([8], 0, "seq_lens has 1 entries; the step that is set has 2 requests"),
        ([8.0, 9.0], 0, "seq_lens is float64"),
    ],
)
def test_a_step_goes_on_within_its_pages_only(lengths: list[int], ahead: int, message: str) -> None:
    built = metadata()
    with pytest.raises(ReplayError, match="no batch is set"):
        built.advance([1])
    built.set(2, [7, 9], [[5, 2, 9, 8], [8, 1, 3, 4]], ahead=6)
    version = built.batch.version
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            built.advance(lengths, ahead=ahead)
    assert (built.batch.version, built.batch.seq_lens.tolist()) == (version, [7, 9])
    built.advance([9, 9], ahead=4)
    with pytest.raises(InputError, match="is 8 after 9"):
        built.advance([8, 9], ahead=4)


def test_lengths_may_change_in_the_callers_array_afterwards() -> None:
    built = metadata()
    built.set(1, [7], [[5, 2, 9]], ahead=3)
    lengths = np.array([9])
    built.advance(lengths)
    lengths[:] = 0
    assert built.batch.seq_lens.tolist() == [9]
    with pytest.raises(InputError, match="is 8 after 9"):
        built.advance([8])


def test_a_step_that_follows_another_metadatas_forgets_the_one_that_was_moved_on() -> None:
    built, other = metadata(), metadata()
    built.set(1, [7, 9], [[5, 2, 9], [8, 1, 3]], ahead=3)
    built.advance([8, 9])
    other.set(1, [3], [[4]], ahead=1)
    built.follow(other.batch, 2, 1)
    with pytest.raises(InputError, match="seq_lens has 2 entries; the step that is set has 1 requests"):
        built.advance([9, 10])


def test_a_step_moved_on_inside_a_capture_is_refused(device: torch.device) -> None:
    built = metadata(device)
    built.set(1, [7], [[5, 2, 9]], ahead=3)
    manager = CudaGraphManager(device=device, capture_sizes=[2], progress=False)
    with pytest.raises(InputError, match="inside a capture"):
        manager.capture(lambda mode, descriptor: built.advance([8]))
    assert built.batch.seq_lens.tolist() == [8], "by the warmup, which is a real run, and not by the capture"


def test_a_step_at_the_models_limit_needs_no_pages_beyond() -> None:
    built = metadata()
    built.set(1, [LENGTH - 2], [list(range(1, 7))], ahead=9)
    built.advance([LENGTH], ahead=9)
    with pytest.raises(InputError, match=f"at most {LENGTH}"):
        built.advance([LENGTH + 1], ahead=9)
    shared = metadata(share=ContextShare(0, 2))
    shared.set(1, [4], [[1]])
    with pytest.raises(InputError, match="context parallel ranks cannot advance"):
        shared.advance([5])
