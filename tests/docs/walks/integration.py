"""An integration of one's own: graphs for a part of a library's object, and its comparison with the plain one."""

import torch
from torch import nn

import simplegraph as sg
from simplegraph.base.errors import ConfigError
from simplegraph.integrations.graphed_parts import GraphedParts

device = "cuda" if torch.cuda.is_available() else "cpu"


class Scorer:
    """A library's service: an encoder for texts, and a head."""

    def __init__(self):
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(device).eval()
        self.head = nn.Linear(16, 2).to(device).eval()

    def score(self, rows):
        return self.head(self.encoder(rows)).softmax(-1)


def graph_scorer(scorer, **settings):
    """Run a scorer's encoder through graphs from now on; the handle's `remove` undoes it."""
    encoder = getattr(scorer, "encoder", None)
    if not isinstance(encoder, nn.Module):
        raise ConfigError(f"graph_scorer got a {type(scorer).__name__}; expected an object with a module `encoder`.")
    graphs = GraphedParts(scorer)
    graphs.put("encoder", sg.wrap(encoder, batch_dims={"input": 0}, progress=False, **settings), [(scorer, "encoder")])
    return graphs


scorer, plain = Scorer(), Scorer()
with torch.inference_mode(), graph_scorer(scorer, capture_sizes=[1, 2, 4]) as graphs:
    for rows in (3, 1, 4) * 4:
        x = torch.randn(rows, 16, device=device)
        torch.testing.assert_close(scorer.score(x), plain.score(x), rtol=1e-3, atol=1e-4)
    assert graphs.report().parts["encoder"].stats.replays >= 3
assert type(scorer.encoder) is nn.Sequential
