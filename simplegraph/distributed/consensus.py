"""Makes data parallel and expert parallel ranks run a step in one mode and one padded size."""

from __future__ import annotations

import array
import datetime
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import RankError
from simplegraph.distributed.rendezvous import require_group

_ORDER = (CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL)


class Vote(NamedTuple):
    """A rank's proposal for a step, or the outcome for all ranks.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        num_tokens: padded rows; 0 if a rank has nothing to run.
        num_active_loras: LoRA adapters in use.
    """

    mode: CudaGraphMode
    num_tokens: int
    num_active_loras: int = 0


class Consensus(Protocol):
    """Protocol by which ranks agree; an engine that has such an exchange already may pass its own."""

    def agree(self, vote: Vote) -> Vote:
        """Return the outcome, the same on each rank: the lowest mode, the largest of the other numbers.

        Raises:
            RankError: the ranks did not reach an agreement.
        """


class ShapeConsensus:
    """Agrees by one small all-reduce on the CPU. Construct it on all ranks of the group, in the same order.

    Pass it as `consensus` to `CudaGraphManager`, whose `dispatch` then asks all ranks. A group of one rank exchanges
    nothing.

    Args:
        group: a `torch.distributed` process group of the ranks; None for all ranks.
        timeout: seconds that a step waits for the other ranks.

    Raises:
        ConfigError: torch.distributed is not initialised, this rank is not in the group, or `timeout` is invalid.

    Source: vLLM's data parallel coordination; per-rank decisions deadlock (vLLM #25906).
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0) -> None:
        members = require_group(group, timeout)
        self.rank: int = dist.get_rank(members)
        self.size: int = dist.get_world_size(members)
        self._numbers = array.array("q", [0, 0, 0])  # written as Python numbers, reduced as a tensor
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.int64)
        self._group: Any = None
        if self.size > 1:
            # A separate group: always on the CPU, and not ordered with the model's collectives.
            self._group = dist.new_group(
                dist.get_process_group_ranks(members),
                backend="gloo",
                timeout=datetime.timedelta(seconds=timeout),
                use_local_synchronization=True,
            )

    def agree(self, vote: Vote) -> Vote:
        """Return the outcome for all ranks; see `Consensus.agree`."""
        if self.size == 1:
            return vote
        self._numbers[0] = -_ORDER.index(vote.mode)
        self._numbers[1], self._numbers[2] = vote.num_tokens, vote.num_active_loras
        try:
            dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} found no agreement on a step of {vote.num_tokens} tokens: a rank died or came too "
                f"late, or the process group was destroyed ({next(iter(str(error).splitlines()), '')})."
            ) from error
        mode, num_tokens, num_active_loras = self._numbers
        return Vote(_ORDER[-mode], num_tokens, num_active_loras)
