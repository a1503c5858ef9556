"""Tensor parallelism: each rank's part of the weights, and the all-reduce that completes a layer's output.

Projections into heads and into the MLP are split by columns, those back by rows, each with one all-reduce.
Embeddings, norms and lm_head are on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaConfig

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class Shard(NamedTuple):
    """A rank's share of a model that all ranks of the default process group run together."""

    rank: int = 0
    size: int = 1

    def config(self, config: LlamaConfig) -> LlamaConfig:
        """Return the config of this rank's part: fewer heads, a narrower MLP, everything else unchanged.

        Raises:
            ValueError: the ranks do not divide the heads or the MLP evenly.
        """
        if self.size == 1:
            return config
        uneven = [f"{name}={getattr(config, name)}" for name in SPLIT if getattr(config, name) % self.size]
        if uneven:
            raise ValueError(
                f"--tp {self.size} does not divide {' and '.join(uneven)}; take a number of ranks that divides "
                f"{', '.join(SPLIT)}."
            )
        own = copy.deepcopy(config)
        own.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name in SPLIT:
            setattr(own, name, getattr(config, name) // self.size)
        return own

    def split_rows(self, model: nn.Module) -> None:
        """Make the projections back to the hidden size sum over the ranks."""
        for parent in [module for module in model.modules() if self.size > 1]:
            for name in ROWS:
                whole = getattr(parent, name, None)
                if isinstance(whole, nn.Linear):
                    setattr(parent, name, RowParallel(whole.in_features, whole.out_features, whole.bias is not None))

    @staticmethod
    def split_dim(name: str) -> int | None:
        """Return the dimension in which ranks split a parameter; None if each rank has all of it."""
        layer, _, kind = name.rpartition(".")
        layer = layer.rpartition(".")[2]
        if layer in COLUMNS:
            return 0
        return 1 if layer in ROWS and kind == "weight" else None

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter, by its name in the checkpoint."""
        dim = self.split_dim(name)
        return whole if dim is None or self.size == 1 else self.slice(whole, dim)

    def slice(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of equal parts along `dim`."""
        return whole.chunk(self.size, dim)[self.rank]

    def whole_shape(self, name: str, part: Tensor) -> list[int]:
        """Return the shape of the whole parameter of which `part` is this rank's."""
        shape, dim = list(part.shape), self.split_dim(name)
        if dim is not None:
            shape[dim] *= self.size
        return shape


WHOLE = Shard()


class RowParallel(nn.Linear):
    """A linear layer whose input features are split over the ranks."""

    def forward(self, hidden: Tensor) -> Tensor:
        out = F.linear(hidden, self.weight)
        dist.all_reduce(out)
        return out if self.bias is None else out + self.bias

    def stages(self, hidden: Tensor) -> Stages:
        """Do as `forward`, and yield while the ranks sum."""
        out = F.linear(hidden, self.weight)
        work = dist.all_reduce(out, async_op=True)
        yield
        work.wait()
        return out if self.bias is None else out + self.bias


# A part of a forward; it yields while ranks sum, so that another micro-batch can compute.
Stages = Generator[None, None, Tensor]
Project = Callable[[nn.Linear, Tensor], Stages]


def at_once(linear: nn.Linear, hidden: Tensor) -> Stages:
    """Run a projection without a yield."""
    return linear(hidden)
    yield


def handing_over(linear: nn.Linear, hidden: Tensor) -> Stages:
    """Run a projection, and yield while the ranks sum, if they do."""
    if isinstance(linear, RowParallel):
        return (yield from linear.stages(hidden))
    return linear(hidden)


def finish(stages: Stages) -> Tensor:
    """Run stages to their end, and return their result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: Tensor = end.value
            return result


def normal_part(part: Tensor, whole_shape: list[int], dim: int | None, shard: Shard, **normal: object) -> None:
    """Fill a part with its slice of the randomly drawn whole, so that any number of ranks has the same model."""
    if shard.size == 1 or dim is None:
        part.normal_(**normal)  # type: ignore[arg-type]
        return
    whole = torch.empty(whole_shape, dtype=part.dtype, device=part.device).normal_(**normal)  # type: ignore[arg-type]
    part.copy_(shard.slice(whole, dim))
