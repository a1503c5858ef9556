"""Runs a function on several ranks, each a process of its own on gloo, and brings back what each returned."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Of the process group: what bounds a collective whose peer never comes. NCCL's first one sets up the communicator, and
# took 8 seconds on a busy machine.
COLLECTIVE_TIMEOUT = {"gloo": 6.0, "nccl": 60.0}
GONE = "the process ended without a word"
# Imported once, by the server that ranks are forked from; none of it touches a device.
PRELOADED = ["torch.distributed.tensor.parallel", "simplegraph.attention", "pytest", "transformers", "hypothesis"]
# Imported, too, where there is no GPU: some of what these import might touch one.
PRELOADED_ELSEWHERE = [
    "torch._dynamo",
    "transformers.models.llama.configuration_llama",
    "simplegraph.serve.runner",
]

# Asking whether there is a GPU must not start CUDA in the server: what is forked from it then could not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class RanksHung(AssertionError):
    pass


def run_ranks(body: Callable[..., Any], size: int, *args: Any, limit: float = 90.0, backend: str = "gloo") -> list[Any]:
    """Return the results of `body(rank, size, *args)` on each rank; an exception is returned as its text.

    Every process is ended before this returns, whatever happened. They are forked from a server that has imported
    torch, which would otherwise be most of a test's time; each is new all the same.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED if torch.cuda.is_available() else PRELOADED + PRELOADED_ELSEWHERE)
    port = _free_port()
    processes, ends = [], []
    for rank in range(size):
        end, other = context.Pipe()
        process = context.Process(target=_main, args=(other, body, rank, size, port, backend, args), daemon=True)
        process.start()
        other.close()
        processes.append(process)
        ends.append(end)
    try:
        return [_result(end, limit) for end in ends]
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def values(results: list[Any]) -> list[Any]:
    """The results, none of which may be an exception."""
    for rank, result in enumerate(results):
        assert not isinstance(result, Failed), f"rank {rank}: {result.text}"
    return results


class Failed:
    """An exception of a rank."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Failed({self.text!r})"


def _result(end: Any, limit: float) -> Any:
    try:
        if not end.poll(limit):
            raise RanksHung(f"a rank gave no result within {limit} s")
        return end.recv()
    except EOFError:
        return Failed(GONE)


def _main(pipe: Any, body: Callable[..., Any], rank: int, size: int, port: int, backend: str, args: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    torch.set_num_threads(1)
    try:
        timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT["nccl" if "nccl" in backend else "gloo"])
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
        torch.manual_seed(0)
        pipe.send(body(rank, size, *args))
    except BaseException as error:
        pipe.send(Failed("".join(traceback.format_exception(error))))
    try:
        pipe.recv()  # until all results are in: rank 0 holds the store, and others may still have to ask it
    finally:
        os._exit(0)  # a torn-down process group may wait for ranks that a test let die


def _free_port() -> int:
    """A port for rank 0 to listen on, below those that systems hand out by themselves.

    One of those could be given to another process, such as a test beside this one, before rank 0 takes it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
