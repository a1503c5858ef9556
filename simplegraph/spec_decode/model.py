"""What a draft model is to a drafter."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DraftModel(Protocol):
    """What drafts: a layer or a few, over `attend`.

    Attributes:
        state_size: elements of the target's state of one token, as `load` gets it.
        hidden_size: elements of the state that the draft hands on from one token to the next.
    """

    @property
    def state_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states, (T, state_size), as the draft's, (T, hidden_size)."""

    def __call__(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One step; runs inside `attending`.

        Args:
            input_ids: (T,) int64, the token that came after each position.
            positions: (T,) int64.
            hidden: (T, hidden_size), the state at each position.

        Returns:
            (T, n), what `choose` reads, and (T, hidden_size), the states to hand on.
        """

    def choose(self, hidden: Tensor) -> Tensor:
        """The next token of each row, (R, n) to (R,) int64, in the target's vocabulary."""
