"""Where a test can run."""

from __future__ import annotations

import pytest
import torch

# Of a test that looks at what kernels of a CPU do, or that starts a program whose shapes are full ones on a GPU.
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of the emulator, and a GPU is there")
