"""Outputs of a wrapped module, and reasons why it ran eagerly."""

from __future__ import annotations

import torch


def close(actual, expected):
    # A padded batch may be given to another GEMM kernel on a GPU, so bits may differ.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def reasons(model) -> dict[str, int]:
    return {reason.value: count for reason, count in model.graph_stats.eager.items()}
