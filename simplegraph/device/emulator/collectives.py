"""Launch collectives in a capture: they do not run, and have a stream of their own, which must be joined."""

from __future__ import annotations

import functools
from typing import Any

import torch

from simplegraph.base.operators import OperatorMode


class Launches:
    """The collectives that one capture launched, and whether it waited for each of them."""

    def __init__(self) -> None:
        self._works: list[Any] = []  # owned: torch calls our `wait` only while the Python object lives

    def launch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the operator returns, without a word to the other ranks: one may fail to get here at all."""
        with _Unsent(self._works):
            return func(*args, **kwargs)

    @property
    def unwaited(self) -> list[str]:
        """Name those that were not waited for; on a GPU their stream is not joined."""
        return [work.name for work in self._works if not work.waited]


class _Unsent(OperatorMode):
    """Takes the place of whatever sends; functional collectives end in the same operators."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._works = works

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        work = _work_type()(func._schema.name)
        self._works.append(work)
        # They return the handle, most of them behind the tensors that they write to, which come first.
        return work.boxed() if len(func._schema.returns) == 1 else (args[0], work.boxed())


@functools.cache
def _work_type() -> Any:
    class Work(torch.distributed.Work):  # not every build of torch has it
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.waited = False

        def wait(self, timeout: Any = None) -> bool:
            self.waited = True
            return True

    return Work
