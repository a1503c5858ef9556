"""``python -m bench.host_overhead.consensus``: time per step to agree on its shape, between ranks of this host."""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from bench.tools import command
from bench.tools.measure import Figures
from bench.tools.options import Options, count, numbers
from bench.tools.tables import grid
from simplegraph import CudaGraphMode, ShapeConsensus
from simplegraph.distributed.ranks import Vote

SIZES = (1, 2, 4)
STEPS, WARMUP = 5000, 200


def measure(size: int, steps: int = STEPS) -> Figures:
    """Measure the median and p99 microseconds of a step's agreement, on the slowest of `size` ranks.

    Raises:
        RuntimeError: a rank failed; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, size, port, steps, queue)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"ranks ended with {[process.exitcode for process in ranks]}.")
    taken = [queue.get() for _ in ranks]
    return {name: max(one[name] for one in taken) for name in taken[0]}


def _rank(rank: int, size: int, port: int, steps: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    consensus, seconds = ShapeConsensus(), []
    for step in range(WARMUP + steps):
        began = time.perf_counter()
        agreed = consensus.agree(Vote(CudaGraphMode.FULL, step + rank))
        seconds.append(time.perf_counter() - began)
        if agreed.num_tokens != step + size - 1:
            raise RuntimeError(f"step {step}: the ranks agreed on {agreed}.")
    seconds = sorted(seconds[WARMUP:])
    queue.put({"median_us": statistics.median(seconds) * 1e6, "p99_us": seconds[int(0.99 * steps)] * 1e6})
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class ConsensusPlan:
    """Numbers of ranks, and steps that the figures are of."""

    sizes: tuple[int, ...] = SIZES
    steps: int = STEPS


def measure_all(plan: ConsensusPlan, device: torch.device) -> Figures:
    """Measure every number of ranks."""
    return {"results": {size: measure(size, plan.steps) for size in plan.sizes}}


def render(figures: Figures) -> str:
    """Format the figures as a table, with a row for every number of ranks."""
    rows = [(size, *(f"{value:.1f}" for value in found.values())) for size, found in figures["results"].items()]
    return grid([("ranks", "median us", "p99 us"), *rows])


OPTIONS: Options = {
    "--sizes": {"type": numbers, "help": "numbers of ranks; 1,2,4 by default"},
    "--steps": {"type": count, "help": "steps that the figures are of"},
}
main = command.of(
    "bench.host_overhead.consensus",
    __doc__,
    OPTIONS,
    lambda device: ConsensusPlan(),
    measure_all,
    render,
    of_graphs=False,
)


if __name__ == "__main__":
    main()
