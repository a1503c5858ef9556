"""Groups of ranks, which capture together and run each step in one mode and padded size. Not loaded for one rank.

If one rank replays a collective and another runs it eagerly, it hangs, or worse: NCCL requires that all ranks
launch it from the graph of the same capture. So all ranks capture the same sizes, with the same settings, in the same
order, and a size that fails on one rank is dropped on all ranks.

Ranks exchange answers over the store of the process group, within a time limit. A collective is not suitable: after a
timeout or the end of a rank, its group is unusable, and does not tell which rank is missing.
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import ConfigError, RankError, ReplayError
from simplegraph.device.protocol import GraphDevice
from simplegraph.distributed.ranks import SingleRank, Vote

logger = logging.getLogger("simplegraph")

_ALL_CAME = "all"
_ORDER = (CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL)
_torch: Any = dist  # for attributes without types, or that some builds of torch lack
_made: collections.Counter[str] = collections.Counter()  # the number of RankGroups of each process group


class Rendezvous:
    """Lets the ranks of a group exchange answers, question after question, in the same order on all ranks.

    Args:
        name: the same on all ranks, and unique among the rendezvous of this process group.
        rank, size: this rank's number, and the number of ranks.
        timeout: seconds that a rank waits for the others.

    Raises:
        RankError: the store is no longer reachable.
    """

    def __init__(self, name: str, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._round = 0
        self._store: Any = None
        if size > 1:
            store = _torch.distributed_c10d._get_default_store()
            # A separate connection if torch supports it: waiting blocks all other threads that use the same one.
            try:
                store = store.clone() if hasattr(store, "clone") else store
            except RuntimeError as error:
                raise self._lost(error) from error
            self._store = _torch.PrefixStore(f"simplegraph/{name}", store)

    def ask(self, question: str, answer: Any) -> list[Any]:
        """Return the answers of all ranks, in the order of ranks, as soon as all have answered.

        Args:
            question: the name of the question; it is an error if another rank answers a different question.
            answer: this rank's answer, any JSON value.

        Raises:
            RankError: a rank did not answer in time, answered another question, or left with an exception. Raised on
                every rank that answered.
        """
        if self.size == 1:
            return [answer]
        words = self._meet(json.dumps({"question": question, "answer": answer}))
        self._refuse_disorder(question, words)
        return [word["answer"] for word in words]

    def leave(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks at their next question, without waiting."""
        if self.size == 1:
            return
        cause = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        try:
            self._store.set(self._key(self.rank), json.dumps({"left": cause}))
        except RuntimeError as lost:  # the original exception is raised, and the other ranks time out
            logger.warning("simplegraph: rank %d could not tell the others: %s", self.rank, lost)
        self._round += 1

    def _meet(self, word: str) -> list[dict[str, Any]]:
        keys = [self._key(rank) for rank in range(self.size)]
        verdict = _ALL_CAME
        try:
            self._store.set(keys[self.rank], word)
            try:
                self._store.wait(keys, datetime.timedelta(seconds=self.timeout))
            except dist.DistStoreError:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                verdict = ", ".join(map(str, missing)) or _ALL_CAME
            # The first verdict counts for all: a rank that comes after others have given up must not go on.
            verdict = self._store.compare_set(self._key("verdict"), "", verdict).decode()
            words = self._store.multi_get(keys) if verdict == _ALL_CAME else []
            if self._round:  # all ranks are in this round, so they have read the answers of the last one
                self._store.delete_key(self._key(self.rank, self._round - 1))
                if self.rank == 0:
                    self._store.delete_key(self._key("verdict", self._round - 1))
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            self._round += 1
        if verdict != _ALL_CAME:
            question = json.loads(word)["question"]
            raise RankError(
                f"rank {verdict} did not come within {self.timeout:g} s, where rank {self.rank} was at {question}. It "
                "died, or took another path: every rank must make the same calls in the same order."
            )
        return [json.loads(word) for word in words]

    def _lost(self, error: RuntimeError) -> RankError:
        return RankError(
            f"rank {self.rank} lost the store of the process group; the rank that holds it is probably gone: "
            f"{next(iter(str(error).splitlines()), '')}"
        )

    def _refuse_disorder(self, question: str, words: list[dict[str, Any]]) -> None:
        for rank, word in enumerate(words):
            if "left" in word:
                raise RankError(f"rank {rank} left with {word['left']}, where rank {self.rank} was at {question}.")
        questions = [word["question"] for word in words]
        if len(set(questions)) > 1:
            places = "; ".join(f"rank {rank} at {place}" for rank, place in enumerate(questions))
            raise RankError(
                f"the ranks are not at the same place: {places}. Every rank must make the same calls, with batches of "
                "the same sizes, in the same order."
            )

    def _key(self, whose: int | str, round: int | None = None) -> str:
        return f"{self._round if round is None else round}/{whose}"


def require_group(group: Any, timeout: float = 1.0) -> Any:
    """Return the process group; the default group for None.

    Raises:
        ConfigError: there is no such group, it was destroyed, this rank is not in it, or `timeout` is invalid.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout is {timeout!r}; expected seconds, above 0.")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group before, on every rank."
        )
    process_group = group if group is not None else dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"group is {group!r}; expected a process group that this rank is in, from torch.distributed.new_group, or "
            "None for all ranks."
        )
    if process_group not in _torch.distributed_c10d._world.pg_map:
        raise ConfigError("the process group was destroyed; make a new one.")
    return process_group


class RankGroup(SingleRank):
    """The ranks whose graphs contain collectives with each other. Construct it on all ranks, in the same order.

    Pass it as `ranks` to `wrap` or `CudaGraphManager`. One group may serve several models that all ranks capture in
    the same order.

    Args:
        group: a `torch.distributed` process group of these ranks; None for all ranks.
        communicators: further groups whose collectives the graphs contain, beside `group`.
        timeout: seconds that a rank waits for the others around a capture, before the waiting ranks raise `RankError`.
            A hang in a collective of eager code, warmups included, ends at the timeout of the process group.

    Raises:
        ConfigError: torch.distributed is not initialised, this rank is not in a group, or `timeout` is invalid.

    Source: NCCL's user guide, "Using NCCL with CUDA Graphs", which requires uniform captures on all ranks.
    """

    def __init__(self, group: Any = None, *, communicators: Sequence[Any] = (), timeout: float = 120.0) -> None:
        super().__init__()
        self._group = require_group(group, timeout)
        self._groups = [self._group, *(require_group(communicator) for communicator in communicators)]
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        name = str(self._group.group_name)
        _made[name] += 1
        self._rendezvous = Rendezvous(f"{name}/{_made[name]}", self.rank, self.size, timeout)
        # Private to torch: the public functions take as long as a replay.
        self._alive: Mapping[Any, Any] = dist.distributed_c10d._world.pg_map

    def check_alive(self) -> None:
        """Refuse to replay after a process group was destroyed. Fast, since it runs at every replay.

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
        """Surround an action of all ranks: an exception on one rank raises a RankError on the others."""
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
            settings: settings that must be equal on all ranks, by name.
            captures: the graphs to capture, in order, as text.
            device: the device to capture on.

        Raises:
            ConfigError: settings differ, or a group cannot communicate from this device.
            RankError: the ranks would capture different graphs, or a rank did not answer.
        """
        self.check_alive()
        self._check_backends(device.torch_device.type)
        answers = self._ask("a capture", [dict(settings), captures])
        for name in dict.fromkeys(name for rank_settings, _ in answers for name in rank_settings):
            if difference := _difference([rank_settings.get(name, "") for rank_settings, _ in answers]):
                raise ConfigError(
                    f"ranks differ in {name}: {difference}. Graphs with collectives must be captured alike; give every "
                    "rank the same settings."
                )
        if difference := _difference([captures for _, captures in answers]):
            raise RankError(
                f"ranks are about to capture different graphs: {difference}. Every rank must run batches of the same "
                "sizes in the same order; data parallel ranks agree on a size with a ShapeConsensus."
            )
        with self.seconds.timed("communicators"):
            self._connect(device.torch_device)
            device.synchronize()
        self._ask("the begin of a capture", None)

    def _connect(self, device: torch.device) -> None:
        """Run a first collective on every communicator, since its setup is not allowed inside a capture."""
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
            backend = backends.get(device_type)
            if backend is None or (device_type == "cuda" and backend != "nccl"):
                wanted = "nccl" if device_type == "cuda" else "gloo"
                raise ConfigError(
                    f"the process group has {backend or 'no backend'} for {device_type} tensors, whose collectives no "
                    f"graph can hold; make it with {wanted}, such as init_process_group('cpu:gloo,cuda:nccl')."
                )


def _difference(values: Sequence[str]) -> str:
    """Describe the first rank whose value differs from rank 0's; empty if there is none."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    return "" if other is None else f"rank 0 has {values[0] or 'none'}, rank {other} has {values[other] or 'none'}"


class ShapeConsensus:
    """Lets ranks agree on a step by a small all-reduce on the CPU. Construct it on all ranks, in the same order.

    Pass it as `consensus` to `CudaGraphManager`, whose `dispatch` then asks all ranks. With one rank, nothing is
    exchanged.

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
        self._numbers = array.array("q", [0, 0, 0])  # the same memory as Python numbers and as a tensor
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.int64)
        self._group: Any = None
        if self.size > 1:
            # A separate group, since it must be on the CPU, and not be ordered with the model's collectives.
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
