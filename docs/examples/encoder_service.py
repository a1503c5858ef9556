"""An encoder behind FastAPI: captured before the first request, served from threads, with metrics.

pip install ".[transformers,prometheus]" fastapi uvicorn  # in the folder of simplegraph's sources
python encoder_service.py  # or: uvicorn encoder_service:app

curl localhost:8000/embed -H "content-type: application/json" -d '{"tokens": [[5, 6, 7], [8, 9]]}'
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Annotated

import torch
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from transformers import BertConfig, BertModel

from simplegraph.integrations import prometheus
from simplegraph.integrations.transformers import graph_encoder

device = "cuda" if torch.cuda.is_available() else "cpu"
# BertModel.from_pretrained(...) in a real service; this one has random weights.
config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertModel(config).to(device).eval()
graphs = graph_encoder(model)
SIZES, LENGTHS = [1, 2, 4, 8], [16, 32, 64]
lock = threading.Lock()  # one call at a time: a batch fills the GPU


Token = Annotated[int, Field(ge=0, lt=config.vocab_size)]
Text = Annotated[list[Token], Field(min_length=1, max_length=LENGTHS[-1])]


class Texts(BaseModel):
    """Token ids of some texts, each as long as it is. What no graph was captured for is refused (422)."""

    tokens: Annotated[list[Text], Field(min_length=1, max_length=SIZES[-1])]


@contextlib.asynccontextmanager
async def warmed_up(app: FastAPI) -> AsyncIterator[None]:
    """Capture all sizes and lengths, so that no request waits for it."""
    print(graphs.capture(sizes=SIZES, lengths=LENGTHS, inputs=["input_ids", "attention_mask"]))
    yield
    graphs.remove()


app = FastAPI(lifespan=warmed_up)
prometheus.register()


@app.post("/embed")
def embed(texts: Texts) -> list[list[float]]:
    """Return the mean of each text's hidden states. A plain `def`: FastAPI runs it in a thread, not in its loop."""
    longest = max(map(len, texts.tokens))
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in texts.tokens], device=device)
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in texts.tokens], device=device)
    with lock, torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return means.tolist()


@app.get("/metrics")
def metrics() -> Response:
    """Return every wrapper's counters; a mounted `make_asgi_app` would redirect to /metrics/."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@app.get("/graphs")
def report() -> dict[str, object]:
    """Return captures, replays and reasons for eager calls."""
    return graphs.report().to_dict()


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app)
