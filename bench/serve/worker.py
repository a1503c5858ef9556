"""Runs an engine on a thread of its own, for callers on an event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bench.engine import Engine, EngineError, SamplingParams
from bench.engine.request import FinishReason, Request, RequestError

_log = logging.getLogger("bench.serve")
_CLOSE_SECONDS = 10.0  # for the step that runs; the process ends without it after that


class QueueFull(EngineError):
    """As many requests are in the engine as it may have."""


class EngineStopped(EngineError):
    """The engine's thread has ended; no request can be served."""


class Token(NamedTuple):
    """One token for the prompt of that index; None for a request that was cancelled or failed.

    `finished` is the reason why it is the last, or None; `error` is set where a step failed.
    """

    prompt: int
    token: int | None
    finished: FinishReason | None
    error: BaseException | None = None


@dataclasses.dataclass(eq=False)
class Stream:
    """One request of a caller, and where its tokens go."""

    tokens: asyncio.Queue[Token]
    prompt: int
    request: Request | None = None


class EngineWorker:
    """Serves requests of an event loop with an engine, whose steps run on another thread.

    Args:
        engine: with its graphs captured; only this uses it from now on.
        most: requests that may be running or waiting at once.

    Attributes:
        streams: the requests that have not ended, of the engine's thread.
        accepted: how many requests the engine took; answered, cancelled: how they ended.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self.streams: dict[Request, Stream] = {}
        self.accepted = self.answered = self.cancelled = 0
        self._error: BaseException | None = None
        # Of the event loop: what a caller waits for is here until it has come, so that all of it can be ended.
        self._let_in: dict[Stream, None] = {}
        self._asked: dict[asyncio.Future[None], None] = {}
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """Why no request can be served any more; None while the thread lives and has not failed."""
        if self._error is None and not self._thread.is_alive():
            return EngineStopped("its thread has ended")
        return self._error

    @property
    def in_flight(self) -> int:
        """Requests that were let in and have not ended: they are running or waiting."""
        return len(self._let_in)

    async def submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> tuple[asyncio.Queue[Token], list[Stream]]:
        """Queue a request for each prompt; their tokens come in one queue, with the prompts' indices.

        Raises:
            RequestError: one of them cannot be served, or they are more than `most`; then none is queued.
            QueueFull: there is no room for all of them now.
            EngineStopped: the thread has ended.
        """
        if self.error is not None:
            raise EngineStopped(f"the engine has stopped: {self.error}")
        if len(prompts) > self.most:
            raise RequestError(f"the request has {len(prompts)} prompts; this server runs {self.most} at most.")
        if self.in_flight + len(prompts) > self.most:
            raise QueueFull(f"{self.in_flight} of {self.most} requests are in the engine; try again later.")
        tokens: asyncio.Queue[Token] = asyncio.Queue()
        streams = [Stream(tokens, index) for index in range(len(prompts))]
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._let_in |= dict.fromkeys(streams)
        self._asked[accepted] = None
        self._commands.put(lambda: self._add(prompts, params, streams, accepted))
        try:
            await accepted
        except asyncio.CancelledError:  # the caller is gone before the engine's thread has looked
            self.cancel(streams)
            raise
        finally:
            self._asked.pop(accepted, None)
        return tokens, streams

    def cancel(self, streams: Sequence[Stream]) -> None:
        """End requests that have not ended."""
        self._commands.put(lambda: self._cancel(streams))

    async def close(self) -> None:
        """End the thread, and with it all requests; give up on a step that does not end."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.error("a step of the engine has not ended after %g s", _CLOSE_SECONDS)
            self._stopped(EngineStopped("it was closed"))

    def _stopped(self, error: BaseException) -> None:
        """Tell all callers that wait; on the event loop, where no other can come between."""
        self._error = error
        for accepted in list(self._asked):
            _settle(accepted, EngineStopped(f"the engine has stopped: {error}"))
        for stream in list(self._let_in):
            self._put(stream, None, FinishReason.CANCELLED, error)

    # On the engine's thread.

    def _run(self) -> None:
        error: BaseException = EngineStopped("it was closed")
        try:
            with torch.inference_mode():
                while self._obey():
                    self._deliver()
        except BaseException as failure:
            error = failure
            _log.exception("the engine's step failed")
        finally:  # whatever happens: its callers are told, and later ones refused
            self._error = error
            self.cancelled += len(self.streams)
            self.streams.clear()
            self._tell(self._stopped, error)

    def _obey(self) -> bool:
        """Run the commands that have come; wait for one where there is nothing else to do. False at the end."""
        while True:
            try:
                command = self._commands.get(block=self.engine.idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _deliver(self) -> None:
        """Run a step, and hand on its tokens."""
        if self.engine.idle:
            return
        for request, token, finished in self.engine.step():
            stream = self.streams.get(request)
            if stream is None:
                continue
            if finished is None:
                self._tell(self._put, stream, token, None)
            else:
                self._end(stream, finished, token=token)

    def _add(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        streams: Sequence[Stream],
        accepted: asyncio.Future[None],
    ) -> None:
        try:
            for prompt, stream in zip(prompts, streams, strict=True):
                stream.request = self.engine.add(prompt, params)
                self.streams[stream.request] = stream
                self.accepted += 1
        except Exception as error:  # of this request: the others go on
            self._cancel(streams)
            self._tell(self._let_go, streams)
            self._tell(_settle, accepted, error)
        else:
            self._tell(_settle, accepted)

    def _cancel(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            if stream.request in self.streams:
                self.engine.cancel(stream.request)
                self._end(stream, FinishReason.CANCELLED)

    def _end(self, stream: Stream, finished: FinishReason, token: int | None = None) -> None:
        if stream.request is not None:
            self.streams.pop(stream.request)
        self.cancelled += finished is FinishReason.CANCELLED
        self.answered += finished is not FinishReason.CANCELLED
        self._tell(self._put, stream, token, finished)

    # Called by it, on the event loop.

    def _put(
        self, stream: Stream, token: int | None, finished: FinishReason | None, error: BaseException | None = None
    ) -> None:
        stream.tokens.put_nowait(Token(stream.prompt, token, finished, error))
        if finished is not None:
            self._let_go([stream])

    def _let_go(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self._let_in.pop(stream, None)

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _settle(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)
