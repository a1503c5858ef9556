"""Keeps ranks together in their captures, since their graphs hold collectives with each other.

A collective that one rank replays and another runs eagerly hangs, or worse: NCCL requires that all ranks launch it
from the graph of the same capture. So all ranks capture the same sizes, with the same settings, in the same order, and
a size that fails on one rank is dropped on all.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from simplegraph.base.errors import ConfigError, RankError, ReplayError
from simplegraph.device.protocol import GraphDevice
from simplegraph.distributed.rendezvous import Rendezvous, require_group

_made: collections.Counter[str] = collections.Counter()  # RankGroups of each group, so that all ranks number them alike


class Stopwatch(dict[str, float]):
    """Seconds of wall time by part; parts may come again, but not within each other."""

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that a block takes, whatever happens in it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self[part] = self.get(part, 0.0) + time.perf_counter() - started


class SingleRank:
    """The ranks of a model that has one, and the questions that `RankGroup` asks all of its.

    Attributes:
        seconds: what the parts of the last capture session took; see `CaptureSummary`.
    """

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self.seconds = Stopwatch()

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Wrap an action of all ranks: an exception on one rank is raised on the others as well."""
        return contextlib.nullcontext()

    def begin(self, settings: Mapping[str, str], captures: str, device: GraphDevice) -> None:
        """Start a capture session; see `RankGroup.begin`."""

    def failure(self, what: str, error: Exception | None) -> tuple[int, str] | None:
        """Return the first rank on which `what` failed and its message; None if it succeeded on all ranks.

        Raises:
            RankError: a rank did not come, or is at another point of the program.
        """
        return self.failures(what, {} if error is None else {what: error}).get(what)

    def failures(self, what: str, errors: Mapping[str, Exception]) -> dict[str, tuple[int, str]]:
        """Return what failed on any rank, by name: the first rank that it failed on, and its message.

        Args:
            what: was done to all of them.
            errors: of this rank, by name.

        Raises:
            RankError: a rank did not come, or is at another point of the program.
        """
        words = self._ask(f"the result of {what}", {name: str(error) for name, error in errors.items()})
        found: dict[str, tuple[int, str]] = {}
        for rank, messages in enumerate(words):
            for name, message in messages.items():
                found.setdefault(name, (rank, message))
        return found

    def any(self, what: str, flag: bool) -> bool:
        """True if `flag` is True on any rank.

        Raises:
            RankError: a rank did not come, or is at another point of the program.
        """
        return any(self._ask(what, flag))

    def _ask(self, question: str, answer: Any) -> list[Any]:
        """Return the answers of all ranks."""
        return [answer]


class RankGroup(SingleRank):
    """The ranks whose graphs hold collectives with each other. Construct it on all of them, in the same order.

    Pass it as `ranks` to `wrap` or `CudaGraphManager`. One group may serve several models that all ranks capture in
    the same order.

    Args:
        group: a `torch.distributed` process group of these ranks; None for all ranks.
        communicators: further groups whose collectives the graphs hold, if there are any beside `group`.
        timeout: seconds that a rank waits for the others around a capture, before all that came raise `RankError`.
            A hang in a collective of eager code, warmups included, ends at that group's own timeout.

    Raises:
        ConfigError: torch.distributed is not initialised, this rank is not in a group, or `timeout` is invalid.

    Source: NCCL's user guide, "Using NCCL with CUDA Graphs", which requires uniform captures on all ranks.
    """

    def __init__(self, group: Any = None, *, communicators: Sequence[Any] = (), timeout: float = 120.0) -> None:
        super().__init__()
        self._group = require_group(group, timeout)
        self._groups = [self._group, *(require_group(each) for each in communicators)]
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        name = str(self._group.group_name)
        _made[name] += 1
        self._rendezvous = Rendezvous(f"{name}/{_made[name]}", self.rank, self.size, timeout)
        # Private to torch, since the public functions take as long as a replay.
        self._alive: Mapping[Any, Any] = dist.distributed_c10d._world.pg_map

    def check_alive(self) -> None:
        """Refuse to replay after a process group was destroyed; cheap enough for every replay.

        Raises:
            ReplayError: a process group was destroyed, so a graph's collectives have no peers.
        """
        for group in self._groups:
            if group not in self._alive:
                raise ReplayError(
                    "the process group that the graphs' collectives belong to was destroyed. Drop the graphs before "
                    "the group (reset_graphs, or CudaGraphManager.reset), and capture again with a new RankGroup."
                )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wrap an action of all ranks: an exception on one rank is raised on the others as well."""
        try:
            yield
        except RankError:
            raise  # the other ranks raise it as well
        except BaseException as error:
            self._rendezvous.leave(error)
            raise

    def begin(self, settings: Mapping[str, str], captures: str, device: GraphDevice) -> None:
        """Start a capture session: compare the ranks' plans, set up communicators, synchronize.

        Args:
            settings: everything that must be the same on all ranks, by name.
            captures: the graphs to capture, in order, as text.
            device: the device to capture on.

        Raises:
            ConfigError: settings differ, or a group cannot communicate from this device.
            RankError: the ranks are about to capture different graphs, or one did not come.
        """
        self.check_alive()
        self._check_backends(device.torch_device.type)
        answers = self._ask("a capture", [dict(settings), captures])
        _refuse_differences([settings for settings, _ in answers])
        _refuse_other_captures([captures for _, captures in answers])
        with self.seconds.timed("communicators"):
            self._connect(device.torch_device)
            device.synchronize()
        self._ask("the begin of a capture", None)

    def _connect(self, device: torch.device) -> None:
        """Run a first collective of every communicator, which sets it up; that is not allowed inside a capture."""
        try:
            for group in self._groups:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} could not set up the communicators for a capture; another rank is probably gone: "
                f"{next(iter(str(error).splitlines()), '')}"
            ) from error

    def _ask(self, question: str, answer: Any) -> list[Any]:
        with self.seconds.timed("meetings"):
            return self._rendezvous.ask(question, answer)

    def _check_backends(self, device_type: str) -> None:
        for group in self._groups:
            backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
            found = backends.get(device_type)
            if found is None or (device_type == "cuda" and found != "nccl"):
                wanted = "nccl" if device_type == "cuda" else "gloo"
                raise ConfigError(
                    f"the process group has {found or 'no backend'} for {device_type} tensors, whose collectives no "
                    f"graph can hold; make it with {wanted}, such as init_process_group('cpu:gloo,cuda:nccl')."
                )


def _refuse_other_captures(captures: Sequence[str]) -> None:
    if len(set(captures)) > 1:
        other = next(rank for rank, found in enumerate(captures) if found != captures[0])
        raise RankError(
            f"ranks are about to capture different graphs: rank 0 {captures[0] or 'none'}; rank {other} "
            f"{captures[other] or 'none'}. Every rank must run batches of the same sizes in the same order; data "
            "parallel ranks agree on a size with a ShapeConsensus."
        )


def _refuse_differences(answers: Sequence[Mapping[str, str]]) -> None:
    """Refuse settings that are not the same on all ranks, and name the first of them."""
    names = dict.fromkeys(name for answer in answers for name in answer)
    for name in names:
        values = [answer.get(name) for answer in answers]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise ConfigError(
                f"ranks differ in {name}: rank 0 has {values[0]}, rank {other} has {values[other]}. "
                "Graphs with collectives must be captured alike; give every rank the same settings."
            )
