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
from bench.engine.request import FinishReason, Request

_log = logging.getLogger("bench.serve")


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
    ended: bool = False

    def put(self, token: int | None, finished: FinishReason | None, error: BaseException | None = None) -> None:
        """Hand on a token; on the event loop."""
        self.ended = self.ended or finished is not None
        self.tokens.put_nowait(Token(self.prompt, token, finished, error))


class EngineWorker:
    """Serves requests of an event loop with an engine, whose steps run on another thread.

    Args:
        engine: with its graphs captured; only this uses it from now on.
        most: requests that may be running or waiting at once.

    Attributes:
        streams: the requests that have not ended.
        error: what ended the thread, if something did.
        in_flight: requests that were let in and have not ended: they are running or waiting.
        accepted: how many requests the engine took; answered, cancelled: how they ended.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self.streams: dict[Request, Stream] = {}
        self.error: BaseException | None = None
        self.accepted = self.answered = self.cancelled = 0
        self.in_flight = 0  # of the event loop
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> tuple[asyncio.Queue[Token], list[Stream]]:
        """Queue a request for each prompt; their tokens come in one queue, with the prompts' indices.

        Raises:
            QueueFull: there is no room for all of them.
            EngineStopped: the thread has ended.
            RequestError: one of them cannot be served; then none is queued.
        """
        if self.error is not None:
            raise EngineStopped(f"the engine has stopped: {self.error}")
        if self.in_flight + len(prompts) > self.most:
            raise QueueFull(f"{self.in_flight} of {self.most} requests are in the engine; try again later.")
        tokens: asyncio.Queue[Token] = asyncio.Queue()
        streams = [Stream(tokens, index) for index in range(len(prompts))]
        accepted: asyncio.Future[None] = self._loop.create_future()
        self.in_flight += len(streams)
        self._commands.put(lambda: self._add(prompts, params, streams, accepted))
        try:
            await accepted
        except asyncio.CancelledError:  # the caller is gone before the engine's thread has looked
            self.cancel(streams)
            raise
        return tokens, streams

    def cancel(self, streams: Sequence[Stream]) -> None:
        """End requests that have not ended."""
        self._commands.put(lambda: self._cancel(streams))

    async def close(self) -> None:
        """End the thread, and with it all requests."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # On the engine's thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._obey():
                    self._deliver()
            self.error = self.error or EngineStopped("it was closed")
        except BaseException as error:  # its callers are told, and later ones refused
            _log.exception("the engine's step failed")
            self.error = error
        for stream in list(self.streams.values()):
            self._end(stream, FinishReason.CANCELLED, self.error)
        while not self._commands.empty():  # of callers that came meanwhile: `_add` refuses them
            command = self._commands.get()
            if command is not None:
                command()

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
                self._tell(stream.put, token, None)
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
            if self.error is not None:
                raise EngineStopped(f"the engine has stopped: {self.error}")
            for prompt, stream in zip(prompts, streams, strict=True):
                stream.request = self.engine.add(prompt, params)
                self.streams[stream.request] = stream
                self.accepted += 1
        except EngineError as error:
            self._cancel(streams)
            missing = [stream for stream in streams if stream.request is None]
            self._tell(self._let_go, len(missing))
            self._tell(_settle, accepted, error)
        else:
            self._tell(_settle, accepted)

    def _cancel(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            if stream.request in self.streams:
                self.engine.cancel(stream.request)
                self._end(stream, FinishReason.CANCELLED)

    def _end(
        self, stream: Stream, finished: FinishReason, error: BaseException | None = None, token: int | None = None
    ) -> None:
        if stream.request is not None:
            self.streams.pop(stream.request)
        self.cancelled += finished is FinishReason.CANCELLED
        self.answered += finished is not FinishReason.CANCELLED
        self._tell(self._let_go, 1)
        self._tell(stream.put, token, finished, error)

    def _let_go(self, count: int) -> None:
        self.in_flight -= count

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _settle(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)
