"""The Llama with torch's own tensor parallelism: `parallelize_module`, on DTensors over the same weights.

Users shard like this. The layers are column- then row-parallel as in `bench.models.shard`; torch computes the sums
by functional collectives, which copy their inputs.
"""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench.models.joined import Joined
from bench.models.llama import Llama

COLUMNS = ("self_attn.qkv_proj", "mlp.gate_up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def with_dtensors(llama: Llama, mesh: DeviceMesh) -> Llama:
    """Make a model of DTensors from a rank's part of a Llama; it shares the part's weights and caches.

    Joined projections stay joined: a rank's heads of queries, keys and values, and its columns of gate and up, are one
    shard of one weight, so that there are as many GEMMs as before.

    Args:
        llama: built with a `Shard`; not changed.
        mesh: all the ranks, in one dimension.
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(llama.parameters(), llama.buffers())}
    copied = copy.deepcopy(llama, shared)
    for layer in copied.model.layers:
        for name in (*COLUMNS, *ROWS):
            parent_name, _, name_there = name.partition(".")
            parent = getattr(layer, parent_name)
            dim = 0 if name in COLUMNS else 1
            setattr(parent, name_there, _linear(getattr(parent, name_there), mesh, dim))
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    parallelize_module(copied, mesh, plan)
    return copied


def _linear(part: nn.Linear | Joined, mesh: DeviceMesh, dim: int) -> nn.Linear:
    """Make a linear layer over all ranks; `part` has this rank's slice of the weight."""
    with torch.device("meta"):
        whole = nn.Linear(1, 1, bias=part.bias is not None)
    whole.weight = _distributed(part.weight, mesh, Shard(dim))
    if part.bias is not None:
        whole.bias = _distributed(part.bias, mesh, Shard(0) if dim == 0 else Replicate())
    whole.out_features, whole.in_features = whole.weight.shape
    return whole.eval()


def _distributed(local: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    # The ranks' parts have equal shapes, so no communication is needed.
    return nn.Parameter(DTensor.from_local(local.detach(), mesh, [placement], run_check=False), requires_grad=False)
