"""What a drafter runs on: the protocol of draft models, the buffers of its graphs, the drafts that the target reads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from simplegraph.attention.metadata.step_arrays import check_counts
from simplegraph.base.errors import InputError


class DraftModel(Protocol):
    """A model of one or a few layers that drafts tokens; its attention calls `attend`.

    Attributes:
        state_size: elements of the target's state of one token, as passed to `EagleDrafter.load`.
        hidden_size: elements of the state that the draft passes from one token to the next.
    """

    @property
    def state_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def fuse(self, states: Tensor) -> Tensor:
        """Convert the target's states, (T, state_size), to the draft's, (T, hidden_size)."""

    def __call__(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step, inside `attending`.

        Args:
            input_ids: (T,) int64, the token that follows each position.
            positions: (T,) int64.
            hidden: (T, hidden_size), the state at each position.

        Returns:
            (T, n), the input of `choose`, and (T, hidden_size), the states for the next step.
        """

    def choose(self, hidden: Tensor) -> Tensor:
        """Choose the next token of each row: (R, n) to (R,) int64, in the target's vocabulary."""


class Proposals:
    """The drafts of each running request, by the request's slot.

    Drafters of different K may share it: entries that a drafter does not fill are -1, no draft.

    Args:
        num_slots: the most requests that run at once.
        num_draft_tokens: the most drafts per request of any drafter.
        device: device of the tokens.

    Attributes:
        tokens: (num_slots + 1, num_draft_tokens) int64; the last row is a scratch row for padding.

    Raises:
        ConfigError: a count is below 1.
    """

    def __init__(self, num_slots: int, num_draft_tokens: int, device: torch.device | str) -> None:
        check_counts(num_slots=num_slots, num_draft_tokens=num_draft_tokens)
        self.num_slots, self.num_draft_tokens = num_slots, num_draft_tokens
        with torch.inference_mode(False):
            self.tokens = torch.full((num_slots + 1, num_draft_tokens), -1, dtype=torch.int64, device=device)


class DraftBuffers:
    """The buffers that a drafter's graphs read and write, at fixed addresses; none is a graph's output or the target's.

    Args:
        model: the draft model.
        max_num_tokens: the most tokens in a step of the target.
        max_num_reqs: the most requests that are drafted for at once.
        proposals: receives the drafts.
        dtype: of states.

    Attributes:
        input_ids, positions: (max_num_tokens,) int64; states: (max_num_tokens, state_size): inputs of the prefill.
        last: (max_num_reqs,) int64, the row of each request's last token; slots: (max_num_reqs,) int64, its row of
            `Proposals.tokens`.
        tokens, last_positions: (max_num_reqs,) int64; hidden: (max_num_reqs, hidden_size): of the draft's last step.
    """

    def __init__(
        self, model: DraftModel, max_num_tokens: int, max_num_reqs: int, proposals: Proposals, dtype: torch.dtype
    ) -> None:
        self._proposals, device = proposals.tokens, proposals.tokens.device
        self._scratch = proposals.num_slots
        # Not inference tensors, even if built in inference mode: those refuse writes outside of it.
        with torch.inference_mode(False):
            ids = torch.zeros(2, max_num_tokens, dtype=torch.int64, device=device)
            self.input_ids, self.positions = ids
            self.states = torch.zeros(max_num_tokens, model.state_size, dtype=dtype, device=device)
            reqs = torch.zeros(4, max_num_reqs, dtype=torch.int64, device=device)
            self.last, self.slots, self.tokens, self.last_positions = reqs
            self.forget()
            self.hidden = torch.zeros(max_num_reqs, model.hidden_size, dtype=dtype, device=device)
            # -1 for drafts beyond this drafter's K.
            shape = (max_num_reqs, proposals.num_draft_tokens)
            self._drafts = torch.full(shape, -1, dtype=torch.int64, device=device)

    def forget(self) -> None:
        """Make a warmup, of any size, read the first row and write its drafts to the scratch slot."""
        self.last.zero_()
        self.slots.fill_(self._scratch)

    def load(self, input_ids: Tensor, positions: Tensor, states: Tensor, last: Tensor, slots: Tensor) -> None:
        """Copy the target's results into the buffers; see `EagleDrafter.load`.

        Raises:
            InputError: the states' shape or dtype is not the draft model's, or there are too many rows.
        """
        tokens, reqs, shape = input_ids.shape[0], last.shape[0], (input_ids.shape[0], self.states.shape[1])
        if states.shape != shape or states.dtype is not self.states.dtype:
            raise InputError(
                f"states is {tuple(states.shape)} of {states.dtype}; the draft was made for {shape} of "
                f"{self.states.dtype}. Use a draft that was trained for this target."
            )
        most_tokens, most_reqs = len(self.input_ids), len(self.last)
        if tokens > most_tokens or reqs > most_reqs:
            raise InputError(f"{tokens} tokens and {reqs} requests; the drafter holds {most_tokens} and {most_reqs}.")
        targets = [self.input_ids[:tokens], self.positions[:tokens], self.last[:reqs], self.slots[:reqs]]
        torch._foreach_copy_(targets, [input_ids, positions, last, slots])
        self.states[:tokens].copy_(states)

    def finish(self, position: int) -> None:
        """Make a warmup of the decode steps begin at `position`; past all limits, it writes no keys."""
        self.last_positions.fill_(position)

    def last_rows(self, seq_lens: Tensor) -> Tensor:
        """Return the row of each request's last token, (R,) int64; the first row for padding, whose length is 0."""
        return torch.where(seq_lens > 0, self.last[: seq_lens.shape[0]], 0)

    def add(self, tokens: Tensor) -> None:
        """Store the drafts of the steps after the first, (R, steps) int64."""
        reqs, steps = tokens.shape
        self._drafts[:reqs, 1 : 1 + steps].copy_(tokens)

    def keep(self, tokens: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Store the first drafts, (R,) int64, and what the next step reads beside them: positions and states."""
        reqs = tokens.shape[0]
        self._drafts[:reqs, 0].copy_(tokens)
        torch._foreach_copy_([self.tokens[:reqs], self.last_positions[:reqs]], [tokens, positions])
        self.hidden[:reqs].copy_(hidden)

    def publish(self, seq_lens: Tensor) -> None:
        """Write the drafts to the proposals; those of padding, whose length is 0, to the scratch slot."""
        reqs = seq_lens.shape[0]
        # A graph larger than the target's also has rows that an earlier batch left here.
        slots = torch.where(seq_lens > 0, self.slots[:reqs], self._scratch)
        self._proposals.index_copy_(0, slots, self._drafts[:reqs])
