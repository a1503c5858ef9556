"""An OpenAI-compatible server of completions on the reference engine: ``python -m bench.serve --http``.

POST /v1/completions takes a text, token ids, or a list of either, and answers whole or as server-sent events. Beside
OpenAI's fields it takes `top_k` and `stop_token_ids`, and each choice has its `token_ids`. A caller who disconnects
cancels the request. GET /v1/models, /health and /metrics (Prometheus).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import prometheus_client as prometheus
import pydantic
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.request import FinishReason, RequestError
from bench.engine.start import start
from bench.generate import encode, load_tokenizer, stop_tokens
from bench.models.llama import Llama
from bench.serve.worker import EngineStopped, EngineWorker, QueueFull, Stream, Token

MOST_BYTES = 2**20  # of a body
MOST_PROMPTS = 64  # of a request
_MOST_STOPS = 4  # as OpenAI has it
_GAUGES = {
    "in_flight": "Requests that are running or waiting",
    "free_pages": "Pages of the KV cache that no request owns",
    "tasks": "Tasks of the event loop",
    "accepted": "Requests that the engine has taken",
    "answered": "Accepted requests that ran to their end",
    "cancelled": "Accepted requests that were ended before, since their callers left or a stop text came",
}
_ids = itertools.count()


class StreamOptions(pydantic.BaseModel, extra="forbid"):
    """Options of a streamed answer."""

    include_usage: bool = False


class Completion(pydantic.BaseModel, extra="forbid", strict=True):
    """A request, with OpenAI's names and defaults. Fields with one value are those that the engine does not serve."""

    prompt: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    max_tokens: int = pydantic.Field(16, ge=1)
    temperature: float = pydantic.Field(1.0, ge=0, le=2)
    top_p: float = pydantic.Field(1.0, gt=0, le=1)
    top_k: int = pydantic.Field(0, ge=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
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
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS or not all(stops):
            raise RequestError(f"stop is {stops!r}; expected at most {_MOST_STOPS} texts, none of them empty.")
        return stops

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt."""
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if one else list(self.prompt)
        if len(prompts) > MOST_PROMPTS:
            raise RequestError(f"the request has {len(prompts)} prompts; expected {MOST_PROMPTS} at most.")
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
    """The text of one prompt's answer so far, held back where it may become a stop text or half a character."""

    def __init__(self, prompt: int, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self._prompt, self._tokenizer, self._stops, self._sent = prompt, tokenizer, stops, 0

    def add(self, token: Token) -> Part:
        """Take a token, and return the text that no later token can change."""
        new_tokens = [] if token.token is None else [token.token]
        self.tokens += new_tokens
        reason = None if token.finished is None else str(token.finished)
        text = self._text()
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            text, reason = text[:found], str(FinishReason.STOP)
        elif reason is None:
            text = text[: len(text) - self._uncertain(text)]
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return Part(self._prompt, new, new_tokens, reason)

    def _uncertain(self, text: str) -> int:
        """Count the characters at the end that may be the beginning of a stop text, or of another character."""
        begun = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(begun, default=int(text.endswith("\N{REPLACEMENT CHARACTER}")))

    def _text(self) -> str:
        """Return the whole text; token ids where there is no tokenizer."""
        return " ".join(map(str, self.tokens)) if self._tokenizer is None else self._tokenizer.decode(self.tokens)


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
            asked = Completion.model_validate_json(await _body(request))
            return await self._answer(request, asked)
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

    async def _answer(self, request: Request, asked: Completion) -> Response:
        if asked.model not in (None, self.name):
            raise _Refused(404, f"the model is {asked.model!r}; this server has {self.name!r}.")
        stops, prompts = asked.stops(), asked.prompts(self._tokenizer)
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
        if len(body) > MOST_BYTES:
            raise _Refused(413, f"the body is above {MOST_BYTES} bytes.")
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


def run(llama: Llama, name: str, folder: Path, config: EngineConfig, address: tuple[str, int], most: int) -> None:
    """Capture the graphs, and serve until the process is told to end."""
    engine = start(config, llama)
    stops = stop_tokens(llama.config)
    server = Server(engine, name, load_tokenizer(folder), stops, most)
    uvicorn.run(server.app(), host=address[0], port=address[1], log_level="warning")
