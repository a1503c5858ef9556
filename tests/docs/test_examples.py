"""Each file under docs/examples runs as a user would run it, and is shown on their page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import DOCS, blocks, text_of, unprinted

EXAMPLES = DOCS / "examples"
# What each needs beside the core; without it a user is told by pip's line.
NEEDS = {
    "encoder_service": ("transformers", "fastapi", "httpx", "prometheus_client"),
    "generate": ("transformers",),
    "own_decode_loop": ("transformers",),
    "training_loop": (),
    "own_lengths": (),
    "engine_loop": (),
    "diffusion": ("diffusers",),
}

pytestmark = pytest.mark.proofs


def load(name: str) -> dict[str, Any]:
    """Run an example's file, but not its `main`."""
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"pip install {package.replace('_', '-')}")
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def shown_output(name: str) -> str:
    """What the page shows below an example's file."""
    every = blocks(EXAMPLES / "index.md")
    at = next(at for at, block in enumerate(every) if block.note == f"{name}.py")
    assert every[at + 1].kind == "text"
    return every[at + 1].text


@pytest.mark.parametrize("name", [name for name in NEEDS if name != "encoder_service"])
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name)["main"]()
    shown, printed = shown_output(name), capsys.readouterr().out
    assert "replays" in printed
    if NEEDS[name]:
        shown, printed = without_nodes(shown), without_nodes(printed)
    assert torch.cuda.is_available() or unprinted(shown, printed) == []  # a GPU's names are others


def without_nodes(report: str) -> str:
    """Leave out how many nodes each graph has: other versions of a package run other operators."""
    return re.sub(r"^( +FULL(?: +\d+){3}) +\d+", r"\1 #", report, flags=re.MULTILINE)


def test_the_service_answers_as_the_model_does_from_graphs_and_has_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    service = load("encoder_service")
    from fastapi.testclient import TestClient
    from prometheus_client import REGISTRY

    try:
        with TestClient(service["app"]) as client:
            assert unprinted(shown_output("encoder_service"), capsys.readouterr().out) == []
            before = client.get("/graphs").json()
            for lengths in ([3], [5, 9, 16], [40], [17, 2], [64] * 8, [5, 6, 7]):
                tokens = [[1 + place % 90 for place in range(length)] for length in lengths]
                answer = client.post("/embed", json={"tokens": tokens}).json()
                for found, ids in zip(answer, tokens, strict=True):
                    with torch.no_grad():
                        alone = type(service["model"]).forward(service["model"], torch.tensor([ids]))
                    torch.testing.assert_close(torch.tensor(found), alone[0][0].mean(0), rtol=1e-3, atol=1e-4)
            after = client.get("/graphs").json()
            assert after["captures"] == before["captures"] > 0, "no request waited for a capture"
            proofs = after["eager"].pop("proof")
            # The first padded call of all is compared with eager, too.
            others = {name: count for name, count in before["eager"].items() if name != "proof"}
            assert after["eager"] == {**others, "first_call": 1}
            assert after["replays"] - before["replays"] + proofs + 1 >= 6
            assert "simplegraph_replays_total" in client.get("/metrics").text
            for odd in ("no", [], [[]], [[-1]], [[10**6]], [[1] * 65], [[1]] * 9):
                assert client.post("/embed", json={"tokens": odd}).status_code == 422
    finally:
        for collector in [each for each in REGISTRY._collector_to_names if "Graph" in type(each).__name__]:
            REGISTRY.unregister(collector)


def test_the_page_shows_every_example() -> None:
    files = sorted(path.name for path in Path(EXAMPLES).glob("*.py"))
    assert sorted(f"{name}.py" for name in NEEDS) == files
    page = text_of(EXAMPLES / "index.md")
    assert [name for name in files if f"{{literalinclude}} {name}" not in page] == []
