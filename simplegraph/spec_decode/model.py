"""The protocol of draft models."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
