"""Effects of the Python that runs in a capture cannot be seen afterwards."""

from __future__ import annotations

import collections
import copy
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device
from simplegraph.program.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("inference_mode")


class Stateful(nn.Module):
    """A linear layer, and one way of keeping state in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.s: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        self.keep(y)
        return y * self.scale()

    def keep(self, y: Tensor) -> None:
        """Change Python state."""

    def scale(self) -> float:
        return 1.0


class TupleState(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.s = (torch.zeros(4), torch.zeros(4))

    def keep(self, y: Tensor) -> None:
        self.s = (self.s[0] + y.sum(0), self.s[1])


class ListAppend(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.s = []

    def keep(self, y: Tensor) -> None:
        self.s.append(y)


class FreshDict(Stateful):
    def keep(self, y: Tensor) -> None:
        self.s = {"hidden": y}


class FreshObject(Stateful):
    def keep(self, y: Tensor) -> None:
        self.s = SimpleNamespaceLike(y)


class SimpleNamespaceLike:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Weights(Stateful):
    def keep(self, y: Tensor) -> None:
        self.l.weight.data = self.l.weight / self.l.weight.norm()


class TwoNames(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.s = self.other = {}

    def keep(self, y: Tensor) -> None:
        self.s["hidden"] = y


class Deque(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.s = collections.deque(maxlen=3)

    def keep(self, y: Tensor) -> None:
        self.s.append(y)


REFUSED = [ListAppend, FreshObject, Weights, Deque]
KEEPING = [*REFUSED, TupleState, FreshDict, TwoNames]  # a replay leaves what `TupleState` keeps


def described(module: nn.Module) -> Any:
    """State in a form that two modules can be compared by."""
    state = module.s
    if isinstance(state, SimpleNamespaceLike):
        state = vars(state)
    values = state.values() if isinstance(state, dict) else state if state is not None else ()
    return [value.clone() for value in values], [p.clone() for p in module.parameters()]


@pytest.mark.parametrize("kind", KEEPING)
def test_a_module_that_keeps_tensors_in_python_ends_in_eagers_state(kind: type[Stateful], device: torch.device) -> None:
    torch.manual_seed(1)
    eager = kind().to(device).eval()
    torch.manual_seed(1)
    module = kind().to(device).eval()
    if kind is TupleState:
        for one in (eager, module):
            one.s = tuple(t.to(device) for t in one.s)
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for turn in range(8):
        x = torch.randn(2 + 2 * (turn % 2), 4, device=device)
        torch.testing.assert_close(model(x), eager(x))
        (state, weights), (expected, expected_weights) = described(model), described(eager)
        assert len(state) == len(expected)
        torch.testing.assert_close(state, expected)
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("kind", REFUSED)
def test_after_a_refused_capture_of_all_sizes_calls_go_on_as_eagers(kind: type[Stateful], device: torch.device) -> None:
    module = kind().to(device).eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    model.capture_graphs(torch.randn(4, 4, device=device))
    assert model.graph_stats.captures == 0
    eager = copy.deepcopy(module)
    for _ in range(3):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), eager(x))
        torch.testing.assert_close(described(model), described(eager))


class Counter(Stateful):
    """Counts its runs in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.s = []
        self.k = 0

    def keep(self, y: Tensor) -> None:
        self.k += 1


def test_a_counter_in_python_counts_every_call_and_is_named_as_the_reason(device: torch.device) -> None:
    model = sg.wrap(Counter().to(device).eval(), capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    counts = []
    for _ in range(5):
        torch.testing.assert_close(model(x), model.l(x))
        counts.append(model.k)
    assert counts == [1, 2, 3, 4, 5], "no replay that forgets to count, and a capture is no call"
    assert model.graph_stats.captures == 0
    assert model.graph_stats.eager[sg.Reason.CAPTURE_FAILED] == 4
    assert "changes `k` whenever it runs" in model.graph_stats.failures["batch size 2"]


def test_warmups_of_all_sizes_count_and_captures_do_not(device: torch.device) -> None:
    model = sg.wrap(Counter().to(device).eval(), capture_sizes=[1, 2, 4], progress=False)
    summary = model.capture_graphs(torch.randn(4, 4, device=device))
    assert model.k == 1
    assert summary.captured == 0
    assert len(summary.failed) == 3
    assert all("changes `k` whenever" in str(error) for error in summary.failed.values())
    assert model.graph_stats.captures == 0


def _item_of_a_dict(m: Counter) -> None:
    m.s["calls"] += 1


def _list(m: Counter) -> None:
    m.s.append(1)


def _queue(m: Counter) -> None:
    m.s.rotate()


def _attribute_of_an_object(m: Counter) -> None:
    m.s.calls += 1


def _child(m: Counter) -> None:
    m.l.calls = getattr(m.l, "calls", 0) + 1


def _last_input(m: Counter) -> None:
    m.s = object()


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __repr__(self) -> str:
        return f"{self.calls} calls"


@pytest.mark.parametrize(
    ("change", "state", "name"),
    [
        (_item_of_a_dict, {"calls": 0}, "s.calls"),
        (_list, [0], "s"),
        (_queue, collections.deque([1, 2]), "s"),
        (_attribute_of_an_object, SimpleNamespace(calls=0), "s.calls"),
        (_attribute_of_an_object, Slotted(), "s.calls"),
        (_child, None, "l.calls"),
        (_last_input, None, "s"),
    ],
)
def test_python_state_that_every_run_changes_is_named_wherever_it_hangs(
    change: Any, state: Any, name: str, device: torch.device
) -> None:
    class Changing(Stateful):
        def keep(self, y: Tensor) -> None:
            change(self)

    module = Changing().to(device).eval()
    module.s = copy.deepcopy(state)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(3):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), module.l(x))
    named = name if " " in name else f"`{name}`"
    assert f"changes {named} whenever it runs" in model.graph_stats.failures["batch size 2"]
    twin = Changing().eval()
    twin.s = copy.deepcopy(state)
    for _ in range(3):
        change(twin)
    assert repr(module.s).split(" at ")[0] == repr(twin.s).split(" at ")[0], "each call counts once"


class CountsSome(Stateful):
    """Counts the calls of some batch sizes alone, as a model counts the prompts between single tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.s = collections.Counter()

    def keep(self, y: Tensor) -> None:
        if y.shape[0] > 2:
            self.s["large"] += 1
        self.s[y.shape[0]] += 1


def test_calls_of_a_size_that_comes_later_are_counted_once_each(device: torch.device) -> None:
    module = CountsSome().to(device).eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for rows in (2, 2, 2, 4, 4, 4, 3, 4, 2):
        x = torch.randn(rows, 4, device=device)
        torch.testing.assert_close(model(x), module.l(x))
    assert module.s == {"large": 5, 2: 4, 3: 1, 4: 4}


def test_values_set_again_and_caches_by_size_are_no_change(device: torch.device) -> None:
    class SetsAgain(Stateful):
        def keep(self, y: Tensor) -> None:
            self.s = {"shape": tuple(y.shape[1:]), "name": f"width {y.shape[1]}", "big": int("9" * 30)}
            self.shape, self.name, self.big = self.s.values()
            self.s = None
            self.sizes.setdefault(y.shape[0], 2.0 * y.shape[0])

    module = SetsAgain().to(device).eval()
    module.sizes = {}
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    model.capture_graphs(torch.randn(4, 4, device=device))
    assert model.graph_stats.captures == 2
    x = torch.randn(2, 4, device=device)
    torch.testing.assert_close(model(x), module.l(x))
    assert model.graph_stats.replays == 1


class Chunked(Stateful):
    """Convolves part after part, as the VAEs of videos do: what it keeps in between is made anew at every call."""

    def clear(self) -> None:
        self.place, self.kept = [0], [None] * 2

    def forward(self, x: Tensor) -> Tensor:
        self.clear()
        made = []
        for part in x.chunk(2, 1):
            made.append(part if self.kept[self.place[0]] is None else part + self.kept[self.place[0]])
            self.kept[self.place[0]] = part  # type: ignore[call-overload]
        self.place[0] += 1
        self.clear()
        return torch.cat(made, 1)


def test_lists_that_are_made_anew_with_equal_values_are_no_change(device: torch.device) -> None:
    model = sg.wrap(Chunked().to(device).eval(), capture_sizes=[2], progress=False)
    for _ in range(6):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), torch.cat([x[:, :2], x[:, 2:] + x[:, :2]], 1))
    assert model.graph_stats.replays >= 3
    assert (model.place, model.kept) == ([0], [None, None])


class Ended(Stateful):
    """Counts its calls in a list that it makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0, []]

    def forward(self, x: Tensor) -> Tensor:
        self.calls = [self.calls[0] + 1, [*self.calls[1], 1][-2:]]
        return x * 2


def test_a_list_that_is_made_anew_with_other_values_is_a_change(device: torch.device) -> None:
    model = sg.wrap(Ended().to(device).eval(), capture_sizes=[2], progress=False)
    for turn in range(1, 7):
        model(torch.randn(2, 4, device=device))
        assert model.calls[0] == turn
    assert model.graph_stats.replays == 0
    assert "calls" in str(model.graph_report())


def test_state_that_state_key_returns_may_change(device: torch.device) -> None:
    class Alternates(Stateful):
        k = 0

        def keep(self, y: Tensor) -> None:
            self.k = 1 - self.k

        def scale(self) -> float:
            return 1.0 + self.k

    model = sg.wrap(Alternates().to(device).eval(), capture_sizes=[2], progress=False, state_key=lambda m: m.k)

    def serve(*values: int) -> None:
        for k in values:
            model.k = k
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(model(x), model.l(x) * (2.0 - k))

    serve(0, 1, 0, 1, 0, 1, 0, 1)
    assert model.graph_stats.captures == 3  # one more, since it counts by itself once others set it, too
    assert model.graph_stats.failures == {}
    assert model.graph_stats.replays >= 4
    serve(1, 0, 0, 1, 1, 0)  # other than the runs left it


class FillsOnce(Stateful):
    """Fills a cache at its first call, in Python and of numbers alone."""

    def keep(self, y: Tensor) -> None:
        if self.s is None:
            self.s = [7]

    def scale(self) -> float:
        return float(self.s[0])


def test_a_cache_that_is_filled_once_is_no_obstacle(device: torch.device) -> None:
    model = sg.wrap(FillsOnce().to(device).eval(), capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(5):
        torch.testing.assert_close(model(x), model.l(x) * 7)
    assert model.graph_stats.replays >= 2


class Interrupts(Counter):
    """Changes its state, and is interrupted while it is captured."""

    def keep(self, y: Tensor) -> None:
        super().keep(y)
        self.s.append(y)
        if graph_device(y.device).is_capturing():
            raise KeyboardInterrupt


def test_an_interrupt_in_a_capture_leaves_the_state_of_the_calls_before(device: torch.device) -> None:
    model = sg.wrap(Interrupts().to(device).eval(), capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    model(x)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert model.k == 1
    assert len(model.s) == 1
    with sg.eager():
        torch.testing.assert_close(model(x), model.l(x))


def test_a_snapshot_finds_and_puts_back_what_each_kind_of_holder_held() -> None:
    module = nn.Module()
    module.numbers, module.names, module.queue = [1, 2], {"a"}, collections.deque([1])
    module.nested = {"deep": [{"x": 1}]}
    module.plain = SimpleNamespaceLike(torch.zeros(2))
    module.frozen = (torch.zeros(2, 3), [1])
    module.lin = nn.Linear(2, 2)
    weight, hidden, moved = module.lin.weight, module.plain.hidden, module.frozen[0]
    kept = moved.data_ptr()
    snapshot = Snapshot(module)
    assert snapshot.changes() == {}
    module.numbers.append(3)
    module.names.add("b")
    module.queue.popleft()
    module.nested["deep"][0]["x"] = 2
    module.plain.hidden = None
    moved.data = torch.ones(1)
    module.frozen[1].clear()
    module.lin.weight = nn.Parameter(torch.ones(2, 2))
    module.new = 1
    names = snapshot.changes().keys()
    assert {"numbers", "names", "queue", "nested.deep.0.x", "plain.hidden", "frozen.0", "lin.weight", "new"} <= names
    snapshot.put_back()
    assert module.plain.hidden is hidden
    assert (moved.data_ptr(), moved.shape) == (kept, (2, 3))
    assert module.lin.weight is weight
    assert not hasattr(module, "new")
    # No tensors: another thread may have changed these.
    assert (module.numbers, module.names, list(module.queue)) == ([1, 2, 3], {"a", "b"}, [])
    assert module.nested == {"deep": [{"x": 2}]}


def test_what_another_thread_puts_below_the_module_stays(device: torch.device) -> None:
    module = ListAppend().to(device).eval()
    module.fed = collections.deque()
    snapshot = Snapshot(module)
    module.fed.append(1)
    module.s.append(torch.zeros(2))
    snapshot.put_back()
    assert list(module.fed) == [1]
    assert module.s == []


class Registry(collections.OrderedDict[str, Any]):
    """Makes instances of the classes it holds, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Tenfold(list[int]):
    def __iter__(self) -> Any:
        return (10 * value for value in super().__iter__())


@pytest.mark.parametrize("holder", [types.SimpleNamespace(), collections.UserDict()], ids=["namespace", "user dict"])
def test_graph_memory_in_a_plain_holder_of_the_library_is_refused(holder: Any, device: torch.device) -> None:
    class Keeps(Stateful):
        def keep(self, y: Tensor) -> None:
            vars(self.holder)["hidden"] = y

    module = Keeps().to(device).eval()
    module.holder = copy.copy(holder)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        y = model(torch.randn(2, 4, device=device))
        torch.testing.assert_close(vars(model.holder)["hidden"], y)
    assert model.graph_stats.captures == 0


def test_containers_that_decode_what_they_hold_are_left_as_they_are(device: torch.device) -> None:
    class Net(Stateful):
        def keep(self, y: Tensor) -> None:
            self.acts["a"]

    module = Net().to(device).eval()
    module.acts, module.numbers = Registry(a=nn.ReLU, b=nn.GELU), Tenfold([100000, 200000])
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        model(torch.randn(2, 4, device=device))
    assert dict(dict.items(module.acts)) == {"a": nn.ReLU, "b": nn.GELU}
    assert list(list.__iter__(module.numbers)) == [100000, 200000]
    assert model.graph_stats.replays


def test_an_object_that_cannot_be_looked_at_does_no_harm(device: torch.device) -> None:
    module = Stateful().to(device).eval()
    module.odd = type("X", (), {"__module__": None})()
    module.nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)])
    module.parts = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    snapshot = Snapshot(module)
    order = [*module.parts._modules]
    module.parts._modules["0"] = module.parts._modules.pop("0")
    snapshot.put_back()
    assert [*module.parts._modules] == order


def test_what_is_shared_with_the_standard_library_is_left_alone() -> None:
    module = nn.Module()
    module.log = __import__("logging").getLogger("a logger of the user's")
    snapshot = Snapshot(module)
    module.log.setLevel(10)
    snapshot.put_back()
    assert module.log.level == 10


def test_an_object_without_attributes_of_its_own_does_no_harm() -> None:
    module = nn.Module()
    module.things = [object(), SimpleNamespace(a=1), 3.5, None, lambda: None, nn.Linear]
    snapshot = Snapshot(module)
    assert snapshot.changes() == {}


def test_a_counter_in_an_object_counts_each_call_once_where_a_capture_fails_otherwise(device: torch.device) -> None:
    class Masks(Stateful):
        def keep(self, y: Tensor) -> None:
            self.s.calls += 1
            y[y > 0].sum()

    module = Masks().to(device).eval()
    module.s = SimpleNamespace(calls=0)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for turn in range(4):
        model(torch.randn(2, 4, device=device))
        assert module.s.calls == turn + 1
    assert "boolean mask" in model.graph_stats.failures["batch size 2"]


def test_a_dict_that_was_empty_is_named_once_it_is_filled_and_emptied_again() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.cache = {}
    before = Snapshot(module)
    assert before.changes() == {}
    for name in ("a", "b"):
        module.cache[name] = torch.ones(1)
        hook = module[0].register_forward_hook(lambda *_: None)
        assert before.changes().keys() == {f"cache.{name}", f"0._forward_hooks.{hook.id}"}
        before.put_back(before.changes())
        assert (module.cache, module[0]._forward_hooks, before.changes()) == ({}, {}, {})
