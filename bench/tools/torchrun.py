"""Ranks of a benchmark that torchrun has started."""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from bench.models.shard import Shard
    from simplegraph import RankGroup

SECONDS = 120.0  # time limit for ranks to wait for each other


def check_launched(parser: argparse.ArgumentParser, tp: int) -> None:
    """Exit with the command line's usage if the number of processes is not that of ranks."""
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != tp:
        parser.error(
            f"--tp {tp} needs {tp} processes, and there {'is' if found == 1 else 'are'} {found}: "
            f"torchrun --nproc-per-node {tp} -m {parser.prog.split()[-1]} --tp {tp}"
        )


def rank() -> int:
    """Return this process's rank, even before torch.distributed is initialised."""
    return int(os.environ.get("RANK", "0"))


def start(tp: int, name: str, device: str | None = None) -> tuple[Shard, RankGroup | None, torch.device]:
    """Connect to the other ranks; return this rank's part of a model, the group, and its device.

    Args:
        tp: number of ranks; with 1 there is no group.
        name: of this benchmark run, the same on all ranks: several runs share torchrun's store.
        device: "cuda" or "cpu"; the GPU where there is one by default.
    """
    # Imported here, since command lines are parsed before torch is loaded.
    import torch
    import torch.distributed as dist

    from bench.models.shard import Shard
    from bench.tools.measure import device_of, with_index
    from simplegraph import RankGroup

    found = device_of(device)
    if tp == 1:
        return Shard(), None, with_index(found)
    if found.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = datetime.timedelta(seconds=SECONDS)
    store, number, size = next(dist.rendezvous("env://", timeout=timeout))
    backend = "cpu:gloo,cuda:nccl" if found.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=number, world_size=size, timeout=timeout)
    return Shard(number, size), RankGroup(timeout=SECONDS), with_index(found)


def finish() -> None:
    """Disconnect from the other ranks; graphs must be dropped before."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def clock() -> Callable[[], float]:
    """Make a clock that returns rank 0's seconds on all ranks, so that they make the same decisions by time."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return time.perf_counter
    now = torch.zeros(1, dtype=torch.float64)

    def shared() -> float:
        now[0] = time.perf_counter()
        dist.broadcast(now, 0)
        return float(now)

    return shared
