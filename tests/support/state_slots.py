"""An oracle for engines with state slots: each request goes on where the last step with its slot ended."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_continued(metadata: Any) -> None:
    """From now on refuse a step of which a request does not go on where its slot's state ended, or begin.

    Args:
        metadata: a `StateMetadata`, or what stands in its place.
    """
    ends: dict[int, int] = {}  # slot -> tokens that its state has seen
    write: Any = metadata.set

    def checked(query_lens: Any, seq_lens: Any, slots: Any, **shape: Any) -> Any:
        view = write(query_lens, seq_lens, slots, **shape)
        before = np.asarray(seq_lens) - np.asarray(query_lens)
        for slot, seen, length in zip(slots, before.tolist(), seq_lens, strict=True):
            assert seen in (0, ends.get(int(slot), 0)), f"slot {slot} has seen {ends.get(int(slot), 0)}, not {seen}"
            ends[int(slot)] = int(length)
        return view

    metadata.set = checked
