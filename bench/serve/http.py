"""An OpenAI-compatible server of completions on the reference engine: ``python -m bench.serve --http``.

POST /v1/completions takes a text, token ids, or a list of either, and answers whole or as server-sent events. Beside
OpenAI's fields it takes `top_k` and `stop_token_ids`, and each choice has its `token_ids`. A caller who disconnects
cancels the request. GET /v1/models, /health and /metrics (Prometheus).

`Completion` bounds every parameter. A body is read and tokenized on another thread than the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import prometheus_client as prometheus
import pydantic
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.request import MAX_TOP_K, SEEDS, FinishReason, RequestError, shown
from bench.engine.start import start
from bench.generate import encode, load_tokenizer, stop_tokens
from bench.models.llama import Llama
from bench.serve.worker import EngineStopped, EngineWorker, QueueFull, Stream, Token

MAX_BYTES = 2**20  # of a body
MAX_PROMPTS = 64  # of a request
MAX_STOP_TOKENS = 64
MAX_STOP_LENGTH = 256  # characters of a stop text
MAX_CONNECTIONS = 512  # at once, those that have sent no request yet included
HEAD_SECONDS = 10.0  # after which a connection without a whole head of a request is closed, at the latest twice that
BODY_SECONDS = 30.0  # for the whole body
_MAX_STOPS = 4  # as OpenAI has it
_MAX_NAME = 256  # characters of a name
_SHUTDOWN_SECONDS = 20  # for requests that run when the process is told to end
_log = logging.getLogger("bench.serve")
_GAUGES = {
    "in_flight": "Requests that are running or waiting",
    "free_pages": "Pages of the KV cache that no request owns",
    "tasks": "Tasks of the event loop",
    "accepted": "Requests that the engine has taken",
    "answered": "Accepted requests that ran to their end",
    "cancelled": "Accepted requests that were ended before, since their callers left or a stop text came",
}
_ids = itertools.count()


# Lists end at their first bad entry: the errors of all of a large body would take seconds to make.
TokenId = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], pydantic.Field(fail_fast=True)]
Prompts = Annotated[list[Tokens], pydantic.Field(fail_fast=True)]
Texts = Annotated[list[str], pydantic.Field(fail_fast=True)]
StopText = Annotated[str, pydantic.Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Name = Annotated[str, pydantic.Field(max_length=_MAX_NAME)]


class StreamOptions(pydantic.BaseModel, extra="forbid"):
    """Options of a streamed answer."""

    include_usage: bool = False


class Completion(pydantic.BaseModel, extra="forbid", strict=True):
    """A request, with OpenAI's names and defaults. Fields with one value are those that the engine does not serve.

    Bounds each value; what depends on the engine's sizes, such as the length of a prompt, the engine bounds.
    """

    prompt: str | Tokens | Texts | Prompts
    model: Name | None = None
    max_tokens: int = pydantic.Field(16, ge=1, lt=2**31)
    temperature: float = pydantic.Field(1.0, ge=0, le=2)
    top_p: float = pydantic.Field(1.0, gt=0, le=1)
    top_k: int = pydantic.Field(0, ge=0, le=MAX_TOP_K)
    seed: int | None = pydantic.Field(None, ge=SEEDS[0], le=SEEDS[1])
    stop: StopText | Annotated[list[StopText], pydantic.Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[Tokens, pydantic.Field(max_length=MAX_STOP_TOKENS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Name | None = None
    n: Literal[1] = 1
    best_of: Literal[1, None] = None
    echo: Literal[False] = False
    logprobs: None = None
    suffix: None = None
    logit_bias: None = None
    presence_penalty: Literal[0, None] = None
    frequency_penalty: Literal[0, None] = None

    def stops(self) -> list[str]:
        """Return the texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt."""
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if one else list(self.prompt)
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(f"the request has {len(prompts)} prompts; expected {MAX_PROMPTS} at most.")
        try:
            return [encode(prompt, tokenizer) if isinstance(prompt, str) else prompt for prompt in prompts]
        except ValueError as error:
            raise RequestError(str(error)) from None

    def sampling(self, stop_tokens: Sequence[int]) -> SamplingParams:
        """Return the engine's parameters."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop_token_ids=(*stop_tokens, *self.stop_token_ids),
        )


class Part(NamedTuple):
    """New text and tokens of one prompt's answer; `reason` says why it is the last."""

    prompt: int
    text: str
    token_ids: list[int]
    reason: str | None

    def choice(self) -> dict[str, Any]:
        """Format it as OpenAI does."""
        return {
            "index": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.reason,
            "logprobs": None,
        }


class Answer:
    """The text of one prompt's answer so far, held back where it may become a stop text or half a character.

    A token costs the decoding of the last few tokens, and a search in what is held back and in the new text.
    """

    def __init__(self, prompt: int, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self._prompt, self._tokenizer, self._stops = prompt, tokenizer, stops
        self._context = self._read = 0  # tokens before those that are decoded, and before those without text
        self._held = ""  # text that is not sent

    def add(self, token: Token) -> Part:
        """Take a token, and return the text that no later token can change."""
        new_tokens = [] if token.token is None else [token.token]
        self.tokens += new_tokens
        reason = None if token.finished is None else str(token.finished)
        text = self._held + self._new_text(last=reason is not None)
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        held = 0
        if found is not None:
            text, reason = text[:found], str(FinishReason.STOP)
        elif reason is None:
            held = max((_begun(stop, text) for stop in self._stops), default=0)
        sent, self._held = text[: len(text) - held], text[len(text) - held :]
        return Part(self._prompt, sent, new_tokens, reason)

    def _new_text(self, last: bool) -> str:
        """Return the text of the tokens that have given none; none while they end within a character."""
        # Tokens whose text is known are decoded once more before them, since some tokenizers strip the first space.
        before, text = self._text(self._context, self._read), self._text(self._context, len(self.tokens))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        self._context, self._read = self._read, len(self.tokens)
        return text[len(before) :]

    def _text(self, start: int, end: int) -> str:
        """Decode tokens; write their ids where there is no tokenizer."""
        tokens = self.tokens[start:end]
        return " ".join(map(str, tokens)) if self._tokenizer is None else self._tokenizer.decode(tokens)


def _begun(stop: str, text: str) -> int:
    """Count the characters at the end of a text with which a stop text may begin."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class Server:
    """Answers requests with an engine.

    Args:
        engine: with its graphs captured.
        name: of the model, in answers.
        tokenizer: None where prompts and answers are token ids.
        stop_tokens: that end every answer.
        most: requests that may be running or waiting; others are refused with status 429.
        registry: where the metrics go.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        tokenizer: Any = None,
        stop_tokens: Sequence[int] = (),
        most: int = 256,
        registry: prometheus.CollectorRegistry | None = None,
    ) -> None:
        self._engine, self.name, self._tokenizer = engine, name, tokenizer
        self._stop_tokens, self._most = stop_tokens, most
        self._worker: EngineWorker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.registry = registry or prometheus.CollectorRegistry()
        settings: Any = {"registry": self.registry}
        self._answers = prometheus.Counter("bench_answers", "Answers by status", ["status"], **settings)
        self._tokens = prometheus.Counter("bench_tokens", "Tokens that were generated", **settings)
        self._first = prometheus.Histogram("bench_first_token_seconds", "Time to the first token", **settings)
        gauges: dict[str, Callable[[], float]] = {
            "free_pages": lambda: sum(group.num_free for group in engine.scheduler.groups),
            "tasks": lambda: len(asyncio.all_tasks(self._loop)) if self._loop is not None else 0,
        }
        for gauge, text in _GAUGES.items():
            function = gauges.get(gauge, functools.partial(self._count, gauge))
            prometheus.Gauge(f"bench_{gauge}", text, **settings).set_function(function)

    def _count(self, name: str) -> int:
        return int(getattr(self._worker, name, 0))  # 0 before the start

    @property
    def worker(self) -> EngineWorker:
        """The engine's thread.

        Raises:
            EngineStopped: the application has not started.
        """
        if self._worker is None:
            raise EngineStopped("the engine has not started")
        return self._worker

    def app(self) -> FastAPI:
        """Return the ASGI application; the engine's thread lives as long as it does."""

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            self._worker = EngineWorker(self._engine, self._most)
            yield
            await self._worker.close()

        app = FastAPI(title="simplegraph's reference engine", lifespan=lifespan)
        app.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"], response_model=None)
        app.add_api_route("/metrics", self.metrics, methods=["GET"], response_model=None)
        return app

    async def models(self) -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "bench"}]}

    async def health(self) -> Response:
        """Answer 200 while requests are served, 503 once the engine has stopped."""
        error = self.worker.error
        return JSONResponse({"status": "ok" if error is None else str(error)}, 200 if error is None else 503)

    async def metrics(self) -> Response:
        """Answer in Prometheus' text format."""
        return Response(prometheus.generate_latest(self.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    async def complete(self, request: Request) -> Response:
        """Answer a completion."""
        try:
            body = await asyncio.wait_for(_body(request), BODY_SECONDS)
            asked, prompts = await asyncio.to_thread(self._read, body)
            return await self._answer(request, asked, prompts)
        except asyncio.TimeoutError:
            return self._refuse(408, f"the body has not come within {BODY_SECONDS:g} s.")
        except _Refused as refused:
            return self._refuse(refused.status, str(refused))
        except ClientDisconnect:
            return self._refuse(499, "the caller disconnected before the end of the body.")
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            return self._refuse(400, f"{where}: {first['msg']}", where)
        except RequestError as error:
            return self._refuse(400, str(error))
        except QueueFull as error:
            return self._refuse(429, str(error))
        except EngineStopped as error:
            return self._refuse(503, str(error))
        except Exception as error:
            _log.exception("a request failed")
            return self._refuse(500, f"the request failed: {type(error).__name__}: {shown(str(error))}")

    def _read(self, body: bytes) -> tuple[Completion, list[list[int]]]:
        """Read a body, and the token ids of its prompts; on another thread than the event loop's."""
        asked = Completion.model_validate_json(body)
        if asked.model not in (None, self.name):
            raise _Refused(404, f"the model is {asked.model!r}; this server has {self.name!r}.")
        return asked, asked.prompts(self._tokenizer)

    async def _answer(self, request: Request, asked: Completion, prompts: list[list[int]]) -> Response:
        stops = asked.stops()
        began = time.perf_counter()
        tokens, streams = await self.worker.submit(prompts, asked.sampling(self._stop_tokens))
        answers = [Answer(index, self._tokenizer, stops) for index in range(len(prompts))]
        parts = self._parts(tokens, streams, answers, began)
        head = {
            "id": f"cmpl-{next(_ids)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        asked_tokens = sum(map(len, prompts))
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            usage = (lambda: _usage(asked_tokens, answers)) if with_usage else None
            return StreamingResponse(self._events(parts, head, usage), media_type="text/event-stream")
        found = await _while_connected(request, _all(parts))
        texts = ["".join(part.text for part in found if part.prompt == index) for index in range(len(prompts))]
        reasons = {part.prompt: part.reason for part in found}
        choices = [
            Part(index, text, answers[index].tokens, reasons[index]).choice() for index, text in enumerate(texts)
        ]
        self._answers.labels(200).inc()
        return JSONResponse({**head, "choices": choices, "usage": _usage(asked_tokens, answers)})

    async def _parts(
        self, tokens: asyncio.Queue[Token], streams: list[Stream], answers: list[Answer], began: float
    ) -> AsyncGenerator[Part, None]:
        """Yield each prompt's new text as tokens come; end the requests when it is left."""
        left = set(range(len(answers)))
        try:
            while left:
                token = await tokens.get()
                if token.error is not None:
                    raise EngineStopped(f"the engine has stopped: {token.error}")
                if token.prompt not in left:
                    continue  # it ended by a stop text
                if not answers[token.prompt].tokens:
                    self._first.observe(time.perf_counter() - began)
                self._tokens.inc(token.token is not None)
                part = answers[token.prompt].add(token)
                if part.reason is not None:
                    left.discard(token.prompt)
                    self.worker.cancel([streams[token.prompt]])  # does nothing if the engine ended it
                yield part
        finally:
            self.worker.cancel([streams[index] for index in left])

    async def _events(
        self, parts: AsyncGenerator[Part, None], head: dict[str, Any], usage: Callable[[], dict[str, int]] | None
    ) -> AsyncIterator[str]:
        async with contextlib.aclosing(parts):
            try:
                async for part in parts:
                    yield _event({**head, "choices": [part.choice()]})
            except EngineStopped as error:
                yield _event(_error(503, str(error)))
                return
            except Exception as error:
                _log.exception("a request failed")
                yield _event(_error(500, f"the request failed: {type(error).__name__}: {shown(str(error))}"))
                return
        if usage is not None:
            yield _event({**head, "choices": [], "usage": usage()})
        self._answers.labels(200).inc()
        yield "data: [DONE]\n\n"

    def _refuse(self, status: int, message: str, param: str | None = None) -> Response:
        self._answers.labels(status).inc()
        return JSONResponse(_error(status, message, param), status, {"Retry-After": "1"} if status == 429 else None)


class _Refused(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _usage(prompt: int, answers: Sequence[Answer]) -> dict[str, int]:
    completion = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _body(request: Request) -> bytes:
    """Read the body, as far as it is not too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise _Refused(413, f"the body is above {MAX_BYTES} bytes.")
    return bytes(body)


async def _all(parts: AsyncGenerator[Part, None]) -> list[Part]:
    async with contextlib.aclosing(parts):
        return [part async for part in parts]


async def _while_connected(request: Request, work: Coroutine[Any, Any, list[Part]]) -> list[Part]:
    """Wait for the work, unless the caller disconnects before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Refused(499, "the caller disconnected.")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait((working, gone))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Connection(H11Protocol):
    """A connection of a caller, which is closed if it sends no request; above `MAX_CONNECTIONS` it is refused."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            head = (
                b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
            )
            transport.write(head)
            transport.close()
            return
        self.loop.call_later(HEAD_SECONDS, self._look, None)

    def _look(self, last: Any) -> None:
        """Close the connection if no request has come since the last look, and none is under way."""
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is last:
            self.transport.close()
        else:
            self.loop.call_later(HEAD_SECONDS, self._look, self.cycle)


def settings(address: tuple[str, int]) -> dict[str, Any]:
    """Return uvicorn's settings: of connections, and of the seconds that requests may run on after a signal."""
    return {
        "host": address[0],
        "port": address[1],
        "log_level": "warning",
        "http": Connection,
        "timeout_graceful_shutdown": _SHUTDOWN_SECONDS,
    }


def run(llama: Llama, name: str, folder: Path, config: EngineConfig, address: tuple[str, int], most: int) -> None:
    """Capture the graphs, and serve until the process is told to end."""
    engine = start(config, llama)
    stops = stop_tokens(llama.config)
    server = Server(engine, name, load_tokenizer(folder), stops, most)
    uvicorn.run(server.app(), **settings(address))
