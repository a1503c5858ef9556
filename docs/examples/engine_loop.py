"""An engine's loop with `CudaGraphManager`: requests come and go, every step is one replay."""

from __future__ import annotations

import torch
from torch import nn

import simplegraph as sg

WORDS, WIDTH, MOST = 100, 32, 8  # a vocabulary, a state for each request, requests at once
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Model(nn.Module):
    """Stands for a model: reads a token and a state of each request, writes the state, returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(WORDS, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Compute logits (rows, words)."""
        new = self.cell(self.embedding(tokens), states[slots])
        states[slots] = new
        return self.head(new)


class Engine:
    """Owns the buffers that graphs read: their addresses never change, only what is in them."""

    def __init__(self) -> None:
        self.model = Model().to(device).eval()
        self.tokens = torch.zeros(MOST, dtype=torch.long, device=device)
        self.slots = torch.zeros(MOST, dtype=torch.long, device=device)
        self.states = torch.zeros(MOST + 1, WIDTH, device=device)  # slot 0 is for padding rows
        self.manager = sg.CudaGraphManager(device=device, capture_sizes=[1, 2, 4, 8], name="engine", progress=False)

    def forward(self, mode: sg.CudaGraphMode, batch: sg.BatchDescriptor) -> torch.Tensor:
        """Run the model on as many rows of the buffers as the batch has, padding included."""
        rows = batch.num_tokens
        return self.model(self.tokens[:rows], self.states, self.slots[:rows])

    def step(self, tokens: list[int], slots: list[int]) -> list[int]:
        """Take one step for each request, and return its next token."""
        batch = self.manager.dispatch(num_tokens=len(tokens))
        padding = [0] * batch.padding
        self.tokens[: len(tokens) + batch.padding] = torch.tensor(tokens + padding, device=device)
        self.slots[: len(tokens) + batch.padding] = torch.tensor(slots + padding, device=device)
        logits = self.manager.run(batch, self.forward)
        return logits[: len(tokens)].argmax(-1).tolist()


def main() -> None:
    """Serve ten requests of different lengths, five at a time at most."""
    engine = Engine()
    with torch.inference_mode():
        print(engine.manager.capture(engine.forward))
        engine.states.zero_()  # the warmup ran for real
        waiting = [[number, 4 + number] for number in range(10)]  # a first token, and how many to generate
        running: dict[int, list[int]] = {}  # by slot: the last token, how many are left
        answered = 0
        while waiting or running:
            for slot in range(1, 6):
                if slot not in running and waiting:
                    running[slot] = waiting.pop(0)
                    engine.states[slot] = 0
            chosen = engine.step([token for token, _ in running.values()], list(running))
            for slot, token in zip(list(running), chosen, strict=True):
                left = running[slot][1] - 1
                running[slot] = [token, left]
                if not left:
                    del running[slot]
                    answered += 1
    print(engine.manager.report())
    assert answered == 10
    assert engine.manager.stats.replays > 10
    assert not engine.manager.stats.eager


if __name__ == "__main__":
    main()
