"""Tensors of a capture that Python keeps outside the graph: the capture is refused, and says where they hang."""

from __future__ import annotations

import collections
import functools
import gc
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from simplegraph.base.errors import CaptureError
from simplegraph.device.select import graph_device
from simplegraph.program import escapes
from simplegraph.program.escapes import PythonState
from simplegraph.program.program import Program
from simplegraph.program.session import CaptureSession
from tests.support.sessions import record

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LAST: Any = None
HISTORY: list[Any] = []
RECENT: collections.deque[Any] = collections.deque(maxlen=4)
BY_SIZE: dict[int, Any] = {}
NAMES: dict[str, dict[str, Any]] = {"nested": {}}
LOCAL = threading.local()
ERRORS: list[BaseException] = []
SUSPENDED: list[Iterator[Tensor]] = []


class Slots:
    __slots__ = ("other", "seen")


class Plain:
    shared: Any = None

    def __init__(self, seen: Any = None) -> None:
        self.seen = seen


class Angles(NamedTuple):
    cos: Tensor


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = Plain()


SLOTS = Slots()
PLAIN = Plain()
ROTARY = Rotary()


@functools.lru_cache(maxsize=8)
def table(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows, device=device) + 1.0
    return angles.cos(), angles.sin()


@functools.cache
def endless(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, device=device) * 3


def in_a_global(y: Tensor) -> None:
    global LAST
    LAST = y


def in_a_list(y: Tensor) -> None:
    HISTORY.append((y, "row"))


def in_a_deque(y: Tensor) -> None:
    RECENT.append(y)


def in_a_dict(y: Tensor) -> None:
    BY_SIZE[len(y)] = Plain({"cos": y})


def in_a_nested_dict(y: Tensor) -> None:
    NAMES["nested"]["seen"] = y


def in_a_slot(y: Tensor) -> None:
    SLOTS.seen = y


def in_an_object(y: Tensor) -> None:
    PLAIN.seen = [y]


def in_a_named_tuple(y: Tensor) -> None:
    ROTARY.plain.seen = Angles(y)


def in_a_class(y: Tensor) -> None:
    Plain.shared = y


def in_a_cache(y: Tensor) -> None:
    table(len(y), y.device)


def in_an_endless_cache(y: Tensor) -> None:
    endless(len(y), y.device)


def in_a_default(y: Tensor, seen: list[Any] = []) -> None:  # noqa: B006
    seen.append(y)


def in_an_attribute_of_a_function(y: Tensor) -> None:
    in_an_attribute_of_a_function.seen = y  # type: ignore[attr-defined]


def in_a_thread_local(y: Tensor) -> None:
    LOCAL.seen = y


def in_a_generator(y: Tensor) -> None:
    def rows(y: Tensor) -> Iterator[Tensor]:
        yield y
        yield y + 1

    SUSPENDED.append(rows(y))
    next(SUSPENDED[-1])


def in_a_traceback(y: Tensor) -> None:
    def fail(y: Tensor) -> None:
        raise KeyError(str(y.shape))

    try:
        fail(y)
    except KeyError as error:
        ERRORS.append(error)


def in_a_closure() -> Callable[[Tensor], None]:
    seen = []

    def hook(y: Tensor) -> None:
        seen.append(y)

    hook.seen = seen  # type: ignore[attr-defined]
    return hook


HOOK = in_a_closure()


def in_a_variable() -> Callable[[Tensor], None]:
    seen = None

    def hook(y: Tensor) -> None:
        nonlocal seen
        seen = y

    return hook


VARIABLE = in_a_variable()
KEEPERS: list[tuple[Callable[[Tensor], None], str, bool]] = [
    (in_a_global, "the global LAST of tests.graph.test_escapes", True),
    (in_a_list, "the global HISTORY of tests.graph.test_escapes", True),
    (in_a_deque, "the global RECENT of tests.graph.test_escapes", True),
    (in_a_dict, "the global BY_SIZE of tests.graph.test_escapes", True),
    (in_a_nested_dict, "the global NAMES of tests.graph.test_escapes", True),
    (in_a_slot, "the global SLOTS of tests.graph.test_escapes", True),
    (in_an_object, "the global PLAIN of tests.graph.test_escapes", True),
    (in_a_named_tuple, "the attribute seen of a Plain", True),
    (in_a_class, "the attribute shared of class Plain", True),
    (in_a_cache, "the cache of table", True),
    (in_an_endless_cache, "the cache of endless", True),
    (in_a_default, "a default argument of in_a_default", True),
    (in_an_attribute_of_a_function, "the attribute seen of in_an_attribute_of_a_function", True),
    (HOOK, "in_a_closure.<locals>.hook", True),
    (VARIABLE, "the variable seen in the closure of in_a_variable.<locals>.hook", True),
    (in_a_thread_local, "the global LOCAL of tests.graph.test_escapes", True),
    (in_a_generator, "the global SUSPENDED of tests.graph.test_escapes", True),
    (in_a_traceback, "the global ERRORS of tests.graph.test_escapes", True),
]


def capture(run: Callable[[], Any]) -> Program:
    graphs = graph_device("cuda" if torch.cuda.is_available() else "cpu")
    with CaptureSession(graphs, graphs.new_pool(), thorough=False) as session:
        state = PythonState([run])
        state.before_captures()
        return record(session, run, label="batch size 4", probes=[state])


@pytest.mark.parametrize(("keep", "name", "gone"), KEEPERS, ids=[keeper[0].__name__ for keeper in KEEPERS])
def test_a_tensor_kept_anywhere_is_refused_by_name_and_taken_away(
    keep: Callable[[Tensor], None], name: str, gone: bool, device: torch.device
) -> None:
    x = torch.ones(4, device=device)
    made: list[int] = []

    def run() -> Tensor:
        y = x * 2
        made.append(y.untyped_storage().data_ptr())
        keep(y)
        return y

    with pytest.raises(CaptureError, match="exists only inside the graph") as error:
        capture(run)
    assert name in str(error.value)
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor and thing.layout is torch.strided]
    owning = [tensor for tensor in tensors if tensor.untyped_storage().resizable()]
    alive = [tensor for tensor in owning if tensor.untyped_storage().data_ptr() in made]
    assert ("undefined" in str(error.value)) == bool(alive)
    assert gone == (not alive)


def test_a_tensor_that_another_thread_holds_for_a_moment_does_not_escape(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A thread of autograd lets go of its last gradient after `backward` has returned."""
    x = torch.ones(4, device=device)
    asked, told = threading.Event(), threading.Event()

    def hold(tensors: list[Tensor]) -> None:
        asked.wait(10)
        tensors.clear()
        told.set()

    def moment(seconds: float) -> None:
        assert 0 < seconds < 0.1
        asked.set()
        told.wait(10)

    monkeypatch.setattr(escapes, "time", types.SimpleNamespace(sleep=moment, perf_counter=time.perf_counter))
    threads = []

    def run() -> Tensor:
        y = x * 2
        threads.append(threading.Thread(target=hold, args=([y],)))
        threads[0].start()
        return y

    capture(run)
    threads[0].join()
    assert told.is_set()
