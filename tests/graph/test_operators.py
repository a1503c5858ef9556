"""Arguments that an operator writes to, even if its schema does not say so."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from simplegraph.base.tensors import storage_key
from simplegraph.program.observe import MemoryObserver


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_batch_norm_writes_its_statistics_in_training_only(
    training: bool, inference: bool, device: torch.device
) -> None:
    x = torch.randn(4, 3, device=device)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    before = mean.clone()
    observer = MemoryObserver()
    with torch.inference_mode(inference), torch.no_grad(), observer:
        F.batch_norm(x, mean, var, training=training)
    assert (not torch.equal(mean, before)) is training
    assert ({storage_key(mean), storage_key(var)} <= observer.written) is training
    assert storage_key(x) not in observer.written
