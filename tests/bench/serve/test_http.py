"""The engine behind HTTP: answers are the engine's, bad requests are refused, callers who leave cancel theirs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from bench.engine import Engine, EngineConfig, SamplingParams  # noqa: E402
from bench.engine.request import FinishReason  # noqa: E402
from bench.models.workload import Workload  # noqa: E402
from bench.serve import http  # noqa: E402
from bench.serve.http import MAX_BYTES, MAX_STOP_LENGTH, Answer, Server, settings  # noqa: E402
from bench.serve.worker import Token  # noqa: E402

PROMPT = list(b"When in the Course of")


class Words:
    """A tokenizer of bytes, which need not be whole characters."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.fixture(scope="module")
def llama() -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        return Workload("bench/data/eagle/target", (1,), device, lm_head=True).build()


@pytest.fixture
def engine(llama: Any) -> Engine:
    config = EngineConfig(max_num_seqs=4, max_num_tokens=64, max_model_len=128, num_pages=33, capture_sizes=(1, 4, 64))
    engine = Engine(llama, config)
    with torch.inference_mode():
        engine.capture()
    return engine


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Any]:
    app = server.app()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield client


def serve(server: Server, use: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with client_of(server) as client:
            return await use(client)

    return asyncio.run(main())


def test_answers_are_the_engines_own_tokens_whole_and_streamed(engine: Engine) -> None:
    expected = engine.generate([PROMPT, PROMPT[:7]], SamplingParams(max_tokens=12))

    async def use(client: Any) -> None:
        body = {"prompt": [PROMPT, PROMPT[:7]], "max_tokens": 12, "temperature": 0}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        assert [choice["text"] for choice in answer["choices"]] == [bytes(ids).decode() for ids in expected]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"] == {"prompt_tokens": 28, "completion_tokens": 24, "total_tokens": 52}
        found: list[list[int]] = [[], []]
        text = ["", ""]
        async with client.stream(
            "POST", "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        ) as streamed:
            lines = [line async for line in streamed.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert events[-1]["usage"] == answer["usage"]
        for event in events[:-1]:
            (choice,) = event["choices"]
            found[choice["index"]] += choice["token_ids"]
            text[choice["index"]] += choice["text"]
        assert found == expected
        assert text == [choice["text"] for choice in answer["choices"]]

    serve(Server(engine, "tiny", Words()), use)


def test_a_text_ends_before_a_stop_text_that_several_tokens_make(engine: Engine) -> None:
    (tokens,) = engine.generate([PROMPT], SamplingParams(max_tokens=24))
    whole = bytes(tokens).decode()
    stop = whole[10:14]

    async def use(client: Any) -> None:
        for stream in (False, True):
            body = {"prompt": bytes(PROMPT).decode(), "max_tokens": 24, "temperature": 0, "stop": [stop, "\0"]}
            answer = await client.post("/v1/completions", json=body | {"stream": stream})
            lines = [answer.text] if not stream else answer.text.split("\n\n")[:-2]
            choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
            assert "".join(choice["text"] for choice in choices) == whole[: whole.index(stop)]
            assert choices[-1]["finish_reason"] == "stop"

    serve(Server(engine, "tiny", Words()), use)


BAD: dict[str, tuple[Any, int, str]] = {
    "no json": (b"{", 400, "JSON"),
    "no prompt": ({}, 400, "prompt"),
    "empty prompt": ({"prompt": []}, 400, "empty"),
    "unknown token": ({"prompt": [70000]}, 400, "70000"),
    "text without tokenizer": ({"prompt": "hello"}, 400, "token ids"),
    "too long": ({"prompt": [1] * 100, "max_tokens": 100}, 400, "max_model_len"),
    "negative temperature": ({"prompt": [1], "temperature": -1}, 400, "temperature"),
    "temperature that is a text": ({"prompt": [1], "temperature": "hot"}, 400, "temperature"),
    "no tokens": ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
    "several answers": ({"prompt": [1], "n": 2}, 400, "n"),
    "five stops": ({"prompt": [1], "stop": ["a"] * 5}, 400, "stop"),
    "unknown field": ({"prompt": [1], "temprature": 1}, 400, "temprature"),
    "another model": ({"prompt": [1], "model": "gpt"}, 404, "gpt"),
    "too large": (b" " * (MAX_BYTES + 1), 413, "bytes"),
    "too many prompts": ({"prompt": [[1]] * 65}, 400, "65"),
    "more prompts than may run": ({"prompt": [[1]] * 9}, 400, "9 prompts"),
    "a seed that no generator takes": ({"prompt": [1], "seed": 2**70}, 400, "seed"),
    "a negative one": ({"prompt": [1], "seed": -(2**70)}, 400, "seed"),
    "one of 5000 digits": (b'{"prompt": [1], "seed": 1' + b"0" * 5000 + b"}", 400, ""),
    "a large top_k": ({"prompt": [1], "top_k": 2**70}, 400, "top_k"),
    "a large max_tokens": ({"prompt": [1], "max_tokens": 2**70}, 400, "max_tokens"),
    "a large token": ({"prompt": [2**70]}, 400, "prompt"),
    "a large stop token": ({"prompt": [1], "stop_token_ids": [2**70]}, 400, "stop_token_ids"),
    "many stop tokens": ({"prompt": [1], "stop_token_ids": [1] * 100_000}, 400, "stop_token_ids"),
    "a temperature that is no number": (b'{"prompt": [1], "temperature": NaN}', 400, "temperature"),
    "top_p of zero": ({"prompt": [1], "top_p": 0}, 400, "top_p"),
    "half a token": ({"prompt": [1.5]}, 400, "prompt"),
    "a truth": ({"prompt": [True]}, 400, "prompt"),
    "a stop text of a megabyte": ({"prompt": [1], "stop": "a" * (MAX_BYTES - 100)}, 400, "stop"),
    "a long text": ({"prompt": "a" * (MAX_BYTES - 100)}, 400, "token ids"),
    "many bad entries": ({"prompt": [None] * 150_000}, 400, "prompt"),
    "half a character": (b'{"prompt": "\\ud800"}', 400, ""),
    "a long name": ({"prompt": [1], "model": "m" * 10_000}, 400, "model"),
}


def test_a_bad_request_is_refused_with_what_was_found_and_the_next_is_served(engine: Engine) -> None:
    async def use(client: Any) -> None:
        for name, (body, status, word) in BAD.items():
            content = body if isinstance(body, bytes) else json.dumps(body)
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == status, name
            assert word in answer.json()["error"]["message"], (name, answer.json())
            assert len(answer.content) < 1000, name
        good = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert good.status_code == 200
        metrics = (await client.get("/metrics")).text
        refused = sum(status == 400 for _, status, _ in BAD.values())
        assert f'bench_answers_total{{status="400"}} {refused}.0' in metrics
        assert "bench_in_flight 0.0" in metrics
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"

    serve(Server(engine, "tiny", most=8), use)


@pytest.mark.parametrize(
    "body", [{"seed": 2**63 - 1, "top_k": 2**31 - 1}, {"seed": -(2**63)}, {"temperature": 1e-46}, {"top_p": 1e-46}]
)
def test_the_largest_and_smallest_values_are_served(engine: Engine, body: dict[str, Any]) -> None:
    (greedy,) = engine.generate([PROMPT], SamplingParams(max_tokens=8))

    async def use(client: Any) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 8} | body
        answers = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        first, *others = (answer.json()["choices"][0]["token_ids"] for answer in answers)
        assert others == [first] * 2
        assert "seed" in body or first == greedy

    serve(Server(engine, "tiny"), use)


def test_whatever_one_request_raises_the_others_are_served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add = engine.add

    def failing(prompt: list[int], params: SamplingParams) -> Any:
        if prompt == [13]:
            raise OverflowError("too large")
        return add(prompt, params)

    class Failing(Words):
        def decode(self, tokens: list[int]) -> str:
            if 13 in asked:
                raise LookupError("no such token")
            return super().decode(tokens)

        def encode(self, text: str) -> list[int]:
            if text == "bad":
                raise MemoryError("the text is too large")
            return super().encode(text)

    asked: set[int] = set()

    async def use(client: Any) -> None:
        monkeypatch.setattr(engine, "add", failing)
        good = {"prompt": PROMPT, "max_tokens": 40}
        running = asyncio.ensure_future(client.post("/v1/completions", json=good))
        for prompt, word in (([[1, 2], [13]], "too large"), ("bad", "too large")):
            answer = await asyncio.wait_for(client.post("/v1/completions", json={"prompt": prompt}), 30)
            assert (answer.status_code, word in answer.text) == (500, True)
        assert (await running).status_code == 200
        asked.add(13)
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={"prompt": [1], "stream": stream})
            assert (answer.status_code, "no such token" in answer.text) == (200 if stream else 500, True)
        asked.clear()
        assert (await client.post("/v1/completions", json=good)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        while server.worker.in_flight or not engine.idle:
            await asyncio.sleep(0.01)

    server = Server(engine, "tiny", Failing())
    serve(server, use)
    assert server.worker.accepted == server.worker.answered + server.worker.cancelled


def test_a_thread_that_ends_answers_those_who_wait_and_health_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine.add

    def ending(prompt: list[int], params: SamplingParams) -> Any:
        if prompt == [13]:
            raise SystemExit("ended")
        return add(prompt, params)

    async def use(client: Any) -> None:
        monkeypatch.setattr(engine, "add", ending)
        prompts = [PROMPT, PROMPT, [13], [13], PROMPT]
        asked = [client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 100}) for prompt in prompts]
        answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
        assert [answer.status_code for answer in answers] == [503] * 5
        health = await client.get("/health")
        assert (health.status_code, "ended" in health.text) == (503, True)
        assert server.worker.in_flight == 0

    server = Server(engine, "tiny")
    serve(server, use)
    assert server.worker.accepted == server.worker.answered + server.worker.cancelled


def test_long_bodies_and_stop_texts_do_not_stop_the_event_loop(engine: Engine) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            gaps.append(time.perf_counter() - before)

    async def use(client: Any) -> None:
        ticking = asyncio.ensure_future(tick())
        stops = ["a" * (MAX_STOP_LENGTH - 1) + end for end in "bcde"]
        for body in ({"stop": "a" * (MAX_BYTES - 100)}, {"prompt": [None] * 150_000}, {"stop": stops}):
            await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 16} | body)
        ticking.cancel()

    serve(Server(engine, "tiny", Words()), use)
    assert max(gaps) < 5  # seconds, on a slow machine; it was 35


def test_text_is_that_of_all_tokens_up_to_the_first_stop_text_and_costs_the_same_for_each_token() -> None:
    draw, pieces = random.Random(0), ["a", "b", "ab", "é", "€", "😀", "\0"]
    decoded: list[int] = []

    class Counting(Words):
        def decode(self, tokens: list[int]) -> str:
            decoded.append(len(tokens))
            return super().decode(tokens)

    for _ in range(300):
        tokens = list("".join(draw.choices(pieces, k=60)).encode())
        for at in draw.sample(range(len(tokens)), draw.randrange(3)):
            tokens[at] = 0x80  # no character
        stops = ["".join(draw.choices(pieces, k=draw.randint(2, 6))) for _ in range(draw.randrange(4))]
        answer, parts = Answer(0, Counting(), stops), []
        for index, token in enumerate(tokens):
            reason = FinishReason.LENGTH if index == len(tokens) - 1 else None
            parts.append(answer.add(Token(0, token, reason)))
            if parts[-1].reason is not None:
                break
        whole = bytes(answer.tokens).decode(errors="replace")
        found = [whole.index(stop) for stop in stops if stop in whole]
        assert "".join(part.text for part in parts) == whole[: min(found, default=None)]
        assert parts[-1].reason == ("stop" if found else "length")
    assert max(decoded) < 20


class Listening:
    """The server's connections on a port, in a thread."""

    def __init__(self, app: Any) -> None:
        import uvicorn

        self.server = uvicorn.Server(uvicorn.Config(app, **settings(("127.0.0.1", 0))))
        self._thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> tuple[str, int]:
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)
        address: tuple[str, int] = self.server.servers[0].sockets[0].getsockname()
        return address

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/comp", b""),
        (HEAD, b"408"),
        (HEAD + b'{"prompt"', b"408"),
        (b"GET /health HTTP/1.1\r\n", b""),
    ],
)
def test_a_connection_that_sends_no_request_is_closed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.5)
    with Listening(Server(engine, "tiny").app()) as address, socket.create_connection(address, 30) as caller:
        caller.sendall(sent)
        found = b"".join(iter(lambda: caller.recv(4096), b""))  # up to the end, which the server makes
        assert found.split(b" ")[1:2] == ([answer] if answer else [])


def test_connections_above_the_bound_are_refused_and_those_that_are_open_are_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 3)
    with Listening(Server(engine, "tiny").app()) as address, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(4)]
        assert callers[3].recv(4096).startswith(b"HTTP/1.1 503 ")
        callers[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert callers[0].recv(4096).startswith(b"HTTP/1.1 200 ")
        callers[1].close()
        while (answer := _health(address)) != b"200":
            assert answer == b"503"


def _health(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, 30) as caller:
        caller.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return caller.recv(4096).split(b" ")[1]


def test_requests_above_the_bound_are_refused_and_the_others_answered(engine: Engine) -> None:
    async def use(client: Any) -> None:
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(9)))
        assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 4
        assert len({tuple(a.json()["choices"][0]["token_ids"]) for a in answers if a.status_code == 200}) == 1
        assert {a.headers.get("retry-after") for a in answers if a.status_code == 429} == {"1"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    serve(Server(engine, "tiny", most=5), use)


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_ends_the_request_and_its_pages_are_free(engine: Engine, stream: bool) -> None:
    pages = [group.num_free for group in engine.scheduler.groups]
    server = Server(engine, "tiny")

    async def use(client: Any) -> None:
        messages = [
            {
                "type": "http.request",
                "body": json.dumps({"prompt": PROMPT, "max_tokens": 100, "stream": stream}).encode(),
            }
        ]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                left.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        scope |= {"raw_path": b"/v1/completions", "asgi": {"version": "3.0"}, "app": server_app(client)}
        task = asyncio.ensure_future(server_app(client)(scope, receive, send))
        while not server.worker.accepted:
            await asyncio.sleep(0.01)
        if not stream:
            left.set()
        await asyncio.wait_for(task, 30)
        while server.worker.in_flight or not engine.idle:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions", json={"prompt": PROMPT})).status_code == 200

    serve(server, use)
    assert [group.num_free for group in engine.scheduler.groups] == pages


def test_a_caller_who_leaves_within_the_body_is_no_error_of_the_server(engine: Engine) -> None:
    async def use(client: Any) -> None:
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return messages.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        scope |= {"raw_path": b"/v1/completions", "asgi": {"version": "3.0"}, "app": server_app(client)}
        await server_app(client)(scope, receive, send)
        assert sent[0]["status"] == 499
        totals = (await client.get("/metrics")).text
        assert "bench_accepted 0.0" in totals
        assert (await client.post("/v1/completions", json={"prompt": PROMPT})).status_code == 200
        totals = (await client.get("/metrics")).text
        assert "bench_accepted 1.0" in totals
        assert "bench_answered 1.0" in totals

    serve(Server(engine, "tiny"), use)


def server_app(client: Any) -> Any:
    return client._transport.app


def test_a_step_that_fails_ends_its_requests_and_the_server_says_that_it_has_stopped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    async def use(client: Any) -> None:
        monkeypatch.setattr(engine, "step", fail)
        answer = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert (answer.status_code, "the device is gone" in answer.text) == (503, True)
        assert (await client.post("/v1/completions", json={"prompt": PROMPT})).status_code == 503
        assert (await client.get("/health")).status_code == 503
        assert "bench_in_flight 0.0" in (await client.get("/metrics")).text

    serve(Server(engine, "tiny"), use)
