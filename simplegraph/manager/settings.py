"""The settings as keyword arguments, so that editors complete them and type checkers refuse a typo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from simplegraph.base.config import BatchDim, CudaGraphMode, PadRule

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack

ModeName = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


class CudaGraphSettings(TypedDict, total=False):
    """Keyword arguments for the fields of `CudaGraphConfig`, which says what each one does."""

    mode: CudaGraphMode | ModeName
    capture_sizes: Sequence[int] | None
    max_num_seqs: int | None
    max_num_tokens: int | None
    uniform_query_len: int
    batch_dims: Mapping[str, BatchDim]
    pad_values: Mapping[str, PadRule]
    length_dims: Mapping[str, int]
    lengths: Sequence[int] | None
    padding: bool
    exact_shapes: bool
    outputs: Literal["clone", "static"]
    capture: Literal["lazy", "upfront"]
    on_capture_failure: Literal["eager", "raise"]
    verify: int
    max_signatures: int
    on_too_many_signatures: Literal["eager", "flush"]
    state_key: Callable[[Any], Hashable] | None
    decode_capture_sizes: Sequence[int] | None
    training: bool
    debug: bool
    progress: bool
