"""Exchanges answers of all ranks, within a time limit, over the store that the process group was made with.

A collective would not do: if it times out or a peer dies, its group is unusable and cannot say which rank is missing.
A rendezvous names the missing rank, makes all ranks agree if everyone came, and leaves them in step for the next one.
"""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any

import torch.distributed as dist

from simplegraph.base.errors import ConfigError, RankError

logger = logging.getLogger("simplegraph")

_ALL_CAME = "all"
_torch: Any = dist  # for attributes without types; builds without distributed do not have them


class Rendezvous:
    """Lets the ranks of a group meet, once for every question and in the same order.

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
        """Return each rank's answer, in order of ranks, as soon as all have come.

        Args:
            question: names this meeting; it is an error if another rank comes for a different one.
            answer: this rank's answer, any JSON value.

        Raises:
            RankError: a rank did not come in time, came for another question, or left with an exception; raised on
                every rank that came.
        """
        if self.size == 1:
            return [answer]
        words = self._meet(json.dumps({"question": question, "answer": answer}))
        self._refuse_disorder(question, words)
        return [word["answer"] for word in words]

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks, at their next meeting, that this rank has failed and why; does not wait."""
        if self.size == 1:
            return
        left = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        try:
            self._store.set(self._key(self.rank), json.dumps({"left": left}))
        except RuntimeError as lost:  # the exception being raised says more, and the others will time out
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
            places = "; ".join(f"rank {rank} at {found}" for rank, found in enumerate(questions))
            raise RankError(
                f"the ranks are not at the same place: {places}. Every rank must make the same calls, with batches of "
                "the same sizes, in the same order."
            )

    def _key(self, whose: int | str, round: int | None = None) -> str:
        return f"{self._round if round is None else round}/{whose}"


def require_group(group: Any, timeout: float = 1.0) -> Any:
    """Return the process group; the default one for None.

    Raises:
        ConfigError: there is none, it was destroyed, this rank is not in it, or `timeout` is invalid.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout is {timeout!r}; expected seconds, above 0.")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group before, on every rank."
        )
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, dist.ProcessGroup):
        raise ConfigError(
            f"group is {group!r}; expected a process group that this rank is in, from torch.distributed.new_group, or "
            "None for all ranks."
        )
    if found not in _torch.distributed_c10d._world.pg_map:
        raise ConfigError("the process group was destroyed; make a new one.")
    return found
