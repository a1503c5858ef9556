"""The callers of ``python -m bench.serve.http_load``: most ask, some leave early, some send what no server should get.

By itself: ``locust -f bench/serve/locustfile.py --host http://127.0.0.1:8000``. The greedy tokens of every answer must
be those that ``python -m bench.generate`` prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.parse
from typing import Any

from locust import HttpUser, between, task

MODEL = os.environ.get("SERVED_MODEL", "bench/data/eagle/target")
COUNT = 32  # tokens of an answer
PROMPTS = [list(text) for text in (b"When in the Course", b"We hold these truths", b"The history of the", b"He has")]
UNSERVABLE: list[Any] = [{"prompt": []}, {"prompt": [10**9]}, {"prompt": [1], "max_tokens": 10**9}]  # says the engine
BAD: list[Any] = [
    *UNSERVABLE,
    b"\x00\xff{",
    {"prompt": [1], "temperature": -1},
    {"prompt": [1], "n": 5},
    {"prompt": {"a": 1}},
    b"[" * 100_000,
    b"x" * (2**20 + 1),
    {"prompt": [1], "seed": 2**70},
    {"prompt": [1], "seed": -(2**70)},
    b'{"prompt": [1], "seed": 1' + b"0" * 5000 + b"}",
    {"prompt": [1], "top_k": 2**70},
    {"prompt": [1], "max_tokens": 2**70},
    {"prompt": [1], "stop_token_ids": [2**70]},
    {"prompt": [1], "stop_token_ids": [1] * 100_000},
    {"prompt": [1], "top_p": 0},
    b'{"prompt": [1], "temperature": NaN}',
    {"prompt": [1.5]},
    {"prompt": [True]},
    {"prompt": [None] * 150_000},
    {"prompt": "a" * 1_000_000},
    {"prompt": [1], "max_tokens": 4, "stop": "a" * 1_000_000},
    {"prompt": [1], "max_tokens": 4, "stop": ["a" * 200_000] * 4},
    {"prompt": [[1]] * 65},  # more than one request may have
    {"prompt": [[1]] * 64},  # more than the load's server runs
    {"prompt": [1], "model": "m" * 100_000},
]
# At the bounds, and beyond what float32 tells apart from 0: these are answered.
EXTREME: list[dict[str, Any]] = [
    {"temperature": 1, "seed": 2**63 - 1, "top_k": 2**31 - 1},
    {"temperature": 2, "seed": -(2**63), "top_p": 1e-300},
    {"temperature": 1e-300},
    {"temperature": 1e-46, "top_k": 1},
    {"stop": ["a" * 255 + end for end in "bcde"]},
    {"stop_token_ids": [2**31 - 1] * 64},
]
SEED = 2**40

GARBAGE = [
    random.Random(0).randbytes(1000),
    b"\r\n" * 5000,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 100_000,
]
HALVES = [
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
]


def expected_tokens(*settings: str) -> list[list[int]]:
    """Generate the answers by the command, each prompt's beside the others'."""
    prompts = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    command = [
        sys.executable,
        "-m",
        "bench.generate",
        "--model",
        MODEL,
        "--max-tokens",
        str(COUNT),
        "--prompt",
        *prompts,
        *settings,
    ]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [list(map(int, line.split())) for line in printed.splitlines()]


EXPECTED = expected_tokens()
SAMPLED = expected_tokens("--temperature", "1", "--seed", str(SEED))


class Caller(HttpUser):
    """Asks, waits for the answer, and asks again."""

    wait_time = between(0.0, 0.1)

    def _body(self, **settings: Any) -> tuple[int, dict[str, Any]]:
        index = random.randrange(len(PROMPTS))
        return index, {"prompt": PROMPTS[index], "max_tokens": COUNT, "temperature": 0} | settings

    @task(6)
    def ask(self) -> None:
        """Wait for a whole answer."""
        index, body = self._body()
        with self.client.post("/v1/completions", json=body, catch_response=True) as answer:
            if answer.status_code == 429:
                answer.success()  # the bound holds
            elif answer.status_code != 200 or answer.json()["choices"][0]["token_ids"] != EXPECTED[index]:
                answer.failure(f"status {answer.status_code}, or other tokens than bench.generate's")

    @task(3)
    def draw(self) -> None:
        """Ask for random tokens with a seed, which are the same whatever runs beside them."""
        index, body = self._body(temperature=1, seed=SEED)
        with self.client.post("/v1/completions", json=body, catch_response=True, name="seeded") as answer:
            if answer.status_code == 429:
                answer.success()
            elif answer.status_code != 200 or answer.json()["choices"][0]["token_ids"] != SAMPLED[index]:
                answer.failure(f"status {answer.status_code}, or other tokens than bench.generate's")

    @task(2)
    def reach(self) -> None:
        """Ask with values at their bounds."""
        _, body = self._body(**random.choice(EXTREME))
        with self.client.post("/v1/completions", json=body, catch_response=True, name="extreme") as answer:
            if answer.status_code in (200, 429):
                answer.success()
            else:
                answer.failure(f"status {answer.status_code}")

    @task(2)
    def linger(self) -> None:
        """Open connections that never send a whole request; some wait until the server closes them."""
        place = urllib.parse.urlsplit(self.host)
        began, failed = time.perf_counter(), None
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                connection = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=10))
                connection.sendall(random.choice(HALVES))
            if random.random() < 0.1:
                connection.settimeout(60)
                try:
                    while connection.recv(4096):
                        pass
                except OSError as error:
                    failed = error
        took = 1000 * (time.perf_counter() - began)
        self.environment.events.request.fire(
            request_type="TCP", name="half open", response_time=took, response_length=0, exception=failed, context={}
        )

    @task(4)
    def listen(self) -> None:
        """Read a stream to its end."""
        self._stream("stream", None)

    @task(3)
    def leave(self) -> None:
        """Leave after some tokens, or before the first."""
        self._stream("left early", random.randrange(8))

    @task(2)
    def misbehave(self) -> None:
        """Send what must be refused."""
        body = random.choice(BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.client.post("/v1/completions", data=content, catch_response=True, name="bad") as answer:
            # A full engine is not asked; what the door refuses is wrong at any time.
            if answer.status_code in (400, 404, 413) or (answer.status_code == 429 and body in UNSERVABLE):
                answer.success()
            else:
                answer.failure(f"status {answer.status_code}, of {content[:80]!r}")

    @task(1)
    def garble(self) -> None:
        """Send what is no request, or half of one, and leave."""
        place = urllib.parse.urlsplit(self.host)
        began = time.perf_counter()
        with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
            connection.sendall(random.choice(GARBAGE))
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.recv(4096)
        took = 1000 * (time.perf_counter() - began)
        self.environment.events.request.fire(
            request_type="TCP", name="no HTTP", response_time=took, response_length=0, exception=None, context={}
        )

    def _stream(self, name: str, most: int | None) -> None:
        index, body = self._body(stream=True)
        found: list[int] = []
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True, name=name) as answer:
            if answer.status_code == 429:
                answer.success()
                return
            for line in answer.iter_lines(chunk_size=1):
                if line.startswith(b"data: {"):
                    found += json.loads(line[6:])["choices"][0]["token_ids"]
                if most is not None and len(found) >= most:
                    break
            answer.close()  # an unread rest closes the connection
            wanted = EXPECTED[index] if most is None else EXPECTED[index][: len(found)]
            if found != wanted:
                answer.failure("other tokens than bench.generate's")
            else:
                answer.success()
