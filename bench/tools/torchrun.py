"""Ranks of a benchmark, as torchrun starts them."""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.tools.options import count

if TYPE_CHECKING:
    import torch

    from bench.models.shard import Shard
    from simplegraph import RankGroup

SECONDS = 120.0  # that ranks wait for each other


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--tp N``."""
    parser.add_argument("--tp", type=count, default=1, help="ranks of tensor parallelism: torchrun --nproc-per-node N")


def check_launched(parser: argparse.ArgumentParser, tp: int) -> None:
    """End with the command line's usage where there are not as many processes as ranks."""
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != tp:
        parser.error(
            f"--tp {tp} needs {tp} processes, and there {'is' if found == 1 else 'are'} {found}: "
            f"torchrun --nproc-per-node {tp} -m {parser.prog.split()[-1]} --tp {tp}"
        )


def rank() -> int:
    """This process's, before torch.distributed is initialised too."""
    return int(os.environ.get("RANK", "0"))


def start(tp: int, name: str, device: str | None = None) -> tuple[Shard, RankGroup | None, torch.device]:
    """Meet the other ranks; this one's part of a model, the group, and the device of this rank.

    Args:
        tp: how many ranks there are; 1 meets nobody.
        name: of this meeting, the same on all ranks: processes of several benchmarks share torchrun's store.
        device: "cuda" or "cpu"; the GPU where there is one by default.
    """
    # Here: the command lines are read before torch is loaded.
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
    """Part from the other ranks; graphs must be dropped before."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def clock() -> Callable[[], float]:
    """Seconds, as rank 0 sees them on all ranks: what is decided by time is then decided alike."""
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
