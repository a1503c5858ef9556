"""Random numbers that a forward draws on the CPU and never reads: replays draw again, so that later ones follow.

Not seen: what is printed of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from simplegraph.graph.failures import current_user_location
from simplegraph.graph.operators import without_modes
from simplegraph.graph.tensors import storage_key

_weak: Callable[[Any], Any] = StorageWeakRef
# Private to torch; where it is absent, what is drawn could be read unseen.
_negative: Callable[[Tensor], Tensor] | None = getattr(torch, "_neg_view", None)


class UnreadDraws:
    """Draws of one capture from the CPU's own generator, which is where it was again after `end`.

    Attributes:
        again: draws the same amount, in the same order.
    """

    def __init__(self) -> None:
        self.again: list[Callable[[], object]] = []
        self._drawn: dict[int, tuple[Any, str]] = {}  # by storage key, where it was drawn
        self._interrupted: str | None = None
        self.begin()

    def begin(self) -> None:
        """Note where the generator is."""
        self._first = self._last = torch.default_generator.get_state()

    def can_draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if an operator makes a tensor of numbers from the CPU's own generator, and reads none."""
        given = any(map(_holds_tensor, (*args, *kwargs.values())))
        own = kwargs.get("generator") in (None, torch.default_generator)
        made = all(result.alias_info is None for result in func._schema.returns) and len(func._schema.returns) == 1
        return _negative is not None and not given and own and made

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw, and return a tensor that cannot be read unseen: as the negative of what its memory holds."""
        where = f"({func.overloadpacket}) at {current_user_location()}"
        with without_modes():
            self._look(where)
            drawn = func(*args, **kwargs)
            self._last = torch.default_generator.get_state()
            self.again.append(functools.partial(func, *args, **kwargs))
            self._drawn[storage_key(drawn)] = _weak(drawn.untyped_storage()), where
            return drawn if _negative is None else _negative(drawn)

    def _look(self, where: str) -> None:
        """Note if somebody else drew or set the generator meanwhile: then it is not known where a replay leaves it."""
        if not torch.equal(torch.default_generator.get_state(), self._last):
            self._interrupted = self._interrupted or where

    def drawn_at(self, tensor: Tensor) -> str | None:
        """Say where a tensor was drawn; None if it was not."""
        storage, where = self._drawn.get(storage_key(tensor), (None, None))
        return where if storage is not None and not storage.expired() else None

    def end(self) -> None:
        """Put the generator back, if nothing else used it."""
        if self.again:
            with without_modes():
                self._look(next(iter(self._drawn.values()))[1])
                if self._interrupted is None:
                    torch.default_generator.set_state(self._first)

    @property
    def refused(self) -> str | None:
        """Name the place of draws that are still held, or lie among draws of others; None if replays can draw them."""
        return self._interrupted or next((at for held, at in self._drawn.values() if not held.expired()), None)


def _holds_tensor(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, Tensor) for item in items)
