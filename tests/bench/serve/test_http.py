"""The engine behind HTTP: answers are the engine's, bad requests are refused, callers who leave cancel theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from bench.engine import Engine, EngineConfig, SamplingParams  # noqa: E402
from bench.models.workload import Workload  # noqa: E402
from bench.serve.http import MOST_BYTES, Server  # noqa: E402

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
    "too large": (b" " * (MOST_BYTES + 1), 413, "bytes"),
    "too many prompts": ({"prompt": [[1]] * 65}, 400, "65"),
}


def test_a_bad_request_is_refused_with_what_was_found_and_the_next_is_served(engine: Engine) -> None:
    async def use(client: Any) -> None:
        for name, (body, status, word) in BAD.items():
            content = body if isinstance(body, bytes) else json.dumps(body)
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == status, name
            assert word in answer.json()["error"]["message"], (name, answer.json())
        good = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert good.status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'bench_answers_total{status="400"} 13.0' in metrics
        assert "bench_in_flight 0.0" in metrics
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"

    serve(Server(engine, "tiny"), use)


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
