"""Errors and interrupts at any step of a call, and what must be true after one."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_twin import Raised, difference
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.context import CALLS
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.select import graph_device
from simplegraph.manager.table import GraphHooks

WIDTH = 6
SIZE = 4


class Fault(LookupError):
    """An error that a test makes."""


@dataclasses.dataclass
class Bomb:
    """Raises once, when it is armed and reached.

    Attributes:
        error: what it raises; fired: True once it has.
    """

    error: BaseException
    armed: bool = False

    def __post_init__(self) -> None:
        self._fired = ctypes.c_bool()  # a flag in Python would be put back with a capture that it stops

    @property
    def fired(self) -> bool:
        return self._fired.value

    def __call__(self, *args: Any) -> None:
        if self.armed and not self.fired:
            self._fired.value = True
            raise self.error

    def around(self, function: Callable[..., Any], *, late: bool) -> Callable[..., Any]:
        """The function, with this before it, or after it."""

        def exploding(*args: Any, **kwargs: Any) -> Any:
            if not late:
                self()
            result = function(*args, **kwargs)
            if late and self.armed and not self.fired:
                del result  # the traceback would keep what no caller ever got
                self()
            return result

        return exploding


class Hooks(GraphHooks):
    """Raises in one of the manager's hooks."""

    def __init__(self, bomb: Bomb, where: str) -> None:
        setattr(self, where, bomb)


class Subject(nn.Module):
    """Reads weights, counts in a buffer, writes to an input, and meets its bomb where it is told to."""

    def __init__(self, bomb: Bomb, where: Callable[[Any, str], bool] = lambda x, place: False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.bomb, self.where = bomb, where
        self.filled: dict[str, int] = {}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.meet(x, "begin")
        self.filled["seen"] = 1
        h = self.first(x)
        self.count += 1
        self.meet(x, "middle")
        h = self.part(torch.tanh(h) + self.count)
        y.add_(1)
        result = self.last(h) + torch.rand(WIDTH, device=x.device)
        self.meet(x, "end")
        return result

    def meet(self, x: Tensor, place: str) -> None:
        if self.where(x, place):
            self.bomb()

    def part(self, h: Tensor) -> Tensor:
        return h * 2


class Keeps(Subject):
    """Keeps tensors in Python, so that its capture is refused and put back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: list[Tensor] = []
        self.latest: Any = None

    def part(self, h: Tensor) -> Tensor:
        self.kept.append(h.sum(0))
        self.latest = {"h": h}
        return h * 2


class Breaks(Subject):
    """Has an eager break in the middle, which meets the bomb too."""

    def part(self, h: Tensor) -> Tensor:
        return self.broken(h)

    @sg.eager_break
    def broken(self, h: Tensor) -> Tensor:
        self.meet(h, "break")
        return h * 2


@dataclasses.dataclass
class Trial:
    """A subject with graphs and its eager twin, which has no bomb."""

    kind: type[Subject]
    device: torch.device
    bomb: Bomb
    where: Callable[[Any, str], bool] = lambda x, place: False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        module, self.eager = (self._made(bomb) for bomb in (self.bomb, Bomb(Fault("a twin has no bomb"))))
        self.graphs = graph_device(self.device)
        settings = {"capture_sizes": [SIZE], "batch_dims": {"x": 0, "y": 0}, "progress": False} | self.settings
        self.model: Any = sg.wrap(module, **settings)
        self.turn = 0
        self.before = self.around()

    def _made(self, bomb: Bomb) -> Subject:
        torch.manual_seed(1)
        return self.kind(bomb, self.where if bomb is self.bomb else lambda x, place: False).to(self.device).eval()

    def around(self) -> dict[str, Any]:
        """Everything of the process that a call must leave as it was."""
        return {
            "stream": self.graphs.current_stream(),
            "capturing": self.graphs.is_capturing(),
            "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            "gc": gc.isenabled(),
            "autocast cache": torch.is_autocast_cache_enabled(),
            "context": CALLS.context,
            "locks": [self._free(lock) for lock in self._locks()],
        }

    def _locks(self) -> list[Any]:
        manager = self.model.graph_manager
        return [CAPTURE_LOCK, *([manager.pool.lock] if manager is not None else [])]

    @staticmethod
    def _free(lock: Any) -> bool:
        """True if another thread can have the lock."""
        found: list[bool] = []

        def take() -> None:
            found.append(lock.acquire(timeout=1))
            if found[0]:
                lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return found[0]

    def check_around(self) -> None:
        now, before = self.around(), self.before
        assert all(now.pop("locks")), "a lock is held"
        assert now == {name: value for name, value in before.items() if name != "locks"}

    def call(self) -> Any:
        """One call of both; the twin is left out if the bomb went off and the state is as before the call."""
        self.turn += 1
        x, y = torch.randn(SIZE, WIDTH, device=self.device), torch.zeros(SIZE, WIDTH, device=self.device)
        copies, before = (x.clone(), y.clone()), self.state(self.model)
        fired = self.bomb.fired
        torch.manual_seed(self.turn)
        try:
            actual: Any = self.model(x, y)
        except BaseException as error:
            actual = Raised(error)
        drawn = torch.rand(3, device=self.device)
        self.check_around()
        if isinstance(actual, Raised):
            self.check_error(actual.error, fired)
            if difference(self.state(self.model), before) is None:
                return actual
        torch.manual_seed(self.turn)
        expected = self.eager(*copies)
        if not isinstance(actual, Raised):
            self.same(actual, expected, "the result")
            self.same(y, copies[1], "the input written to")
            self.same(drawn, torch.rand(3, device=self.device), "the random numbers drawn next")
        self.same(self.state(self.model), self.state(self.eager), "the state")
        return actual

    def check_error(self, error: BaseException, fired: bool) -> None:
        """It is the bomb's, as it is or as the cause of a clear one."""
        assert self.bomb.fired, f"raised without a fault: {error!r}"
        assert not fired, f"raised again by a fault that was over: {error!r}"
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        assert self.bomb.error in causes, f"raised {error!r}, which hides {self.bomb.error!r}"
        assert error is self.bomb.error or isinstance(error, sg.SimpleGraphError)

    @staticmethod
    def same(actual: Any, expected: Any, what: str) -> None:
        found = difference(actual, expected)
        assert found is None, f"{what}: {found}"

    @staticmethod
    def state(module: Any) -> dict[str, Any]:
        held = {name: copy.deepcopy(getattr(module, name, None)) for name in ("filled", "kept", "latest")}
        return held | {name: value.clone() for name, value in module.state_dict().items()}

    def run(self, first: int, then: int = 6) -> list[Any]:
        """Calls before the bomb is armed, and after."""
        with torch.no_grad():
            results = [self.call() for _ in range(first)]
            self.bomb.armed = True
            results += [self.call() for _ in range(then)]
            assert not torch.is_grad_enabled()
        return results


def planted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bomb: Bomb, *, late: bool) -> None:
    """Put a bomb into a function or method of the library.

    What begins a block is left as it is or not begun: between its end and the block, Python itself has no way back.
    """
    if late and name == "__enter__":
        pytest.skip("the block has begun, and nothing is there that could end it")
    monkeypatch.setattr(owner, name, bomb.around(getattr(owner, name), late=late))
