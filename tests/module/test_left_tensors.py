"""Tensors that a forward leaves below its module: after every call they are there as eager leaves them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.nested import flatten
from simplegraph.reasons import Reason

pytestmark = pytest.mark.usefixtures("inference_mode")


class Box:
    """An ordinary object."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Leaves(nn.Module):
    """A linear layer that leaves tensors somewhere."""

    def __init__(self, leave: Callable[[Any, Tensor, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.leave = leave
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        returned = self.leave(self, x, y)
        return y * 2 if returned is None else returned


def _attribute(m: Any, x: Tensor, y: Tensor) -> None:
    m.s = y + 1


def _list(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.s = [y]
    for _ in range(2):
        m.s.append(m.s[-1] * 2)
    return m.s[0] + m.s[2]


def _dict(m: Any, x: Tensor, y: Tensor) -> None:
    m.s = {"y": y, "more": (y.sum(-1), None, "text", 3), "width": y.shape[1]}


def _item_of_a_dict(m: Any, x: Tensor, y: Tensor) -> None:
    m.s["y"] = y + 1


def _item_of_a_list(m: Any, x: Tensor, y: Tensor) -> None:
    m.s[0], m.s[-1] = y, y + 1


def _objects(m: Any, x: Tensor, y: Tensor) -> None:
    m.s.inner.y = y
    m.s.z = [y + 1]


def _child(m: Any, x: Tensor, y: Tensor) -> None:
    m.l.last = {"in": x * 1, "out": y}


def _deep(m: Any, x: Tensor, y: Tensor) -> None:
    m.s["list"][0].y = y
    m.s["list"][1]["y"] = y * 2


def _shared(m: Any, x: Tensor, y: Tensor) -> None:
    m.s, m.t, m.u = y, [y, y[:, :2]], y[:, 2:]


def _shared_list(m: Any, x: Tensor, y: Tensor) -> None:
    m.s = m.t = [y]


def _input(m: Any, x: Tensor, y: Tensor) -> None:
    m.s, m.t = x, x[:, 1:]


def _returned(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.s = y
    return y


def _twice(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.s = y
    m.s = m.s * 3
    return m.s + 1


def _constant(m: Any, x: Tensor, y: Tensor) -> None:
    m.s = [y, torch.tensor([1.0, 2.0], device=y.device)]


def _nested(m: Any, x: Tensor, y: Tensor) -> None:
    m.s["inner"]["list"][0] = y
    m.s["inner"]["y"] = y * 2
    m.s["y"] = y * 3


LEFT: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attribute": (_attribute, lambda: {"s": None}),
    "attribute that was not there": (_attribute, dict),
    "attribute that was a list": (_attribute, lambda: {"s": [torch.tensor(0)]}),
    "list": (_list, dict),
    "dict": (_dict, dict),
    "item of a dict": (_item_of_a_dict, lambda: {"s": {"other": 1}}),
    "item of a list": (_item_of_a_list, lambda: {"s": [None, 7, None]}),
    "objects": (_objects, lambda: {"s": Box(inner=Box(y=None))}),
    "child": (_child, dict),
    "deep": (_deep, lambda: {"s": {"list": [Box(), {}]}}),
    "nested": (_nested, lambda: {"s": {"inner": {"list": [None]}}}),
    "shared": (_shared, dict),
    "shared list": (_shared_list, dict),
    "input": (_input, dict),
    "returned": (_returned, dict),
    "twice": (_twice, dict),
    "constant": (_constant, dict),
}


def state(module: nn.Module) -> list[Any]:
    """Everything below the module that a forward may leave, in order, by the name of its place."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, Box):
            value = {name: value.__dict__[name] for name in sorted(value.__dict__)}
        if isinstance(value, dict):
            for key in value:
                found.append(key)
                look(value[key])
        elif isinstance(value, (list, tuple)):
            found.append(type(value))
            for item in value:
                look(item)
        else:
            found.append(value)

    for name in ("s", "t", "u"):
        look(vars(module).get(name, "absent"))
    look(vars(module.l).get("last", "absent"))
    return found


def tensors(module: nn.Module) -> list[Tensor]:
    return [item for item in state(module) if isinstance(item, Tensor)]


def check_state(module: nn.Module, twin: nn.Module) -> None:
    ours, eagers = state(module), state(twin)
    assert len(ours) == len(eagers)
    for one, other in zip(ours, eagers, strict=True):
        if isinstance(other, Tensor):
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            torch.testing.assert_close(one, other)
        else:
            assert one == other


def twins(case: str, device: torch.device) -> tuple[Any, Any]:
    leave, attributes = LEFT[case]
    torch.manual_seed(1)
    module = Leaves(leave, **attributes()).to(device).eval()
    twin = Leaves(leave, **attributes()).to(device).eval()
    twin.load_state_dict(module.state_dict())
    return module, twin


SIZES = (2, 2, 2, 4, 4, 4, 3, 1, 3, 2, 4, 1, 3)


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("case", LEFT)
def test_a_call_leaves_what_eager_leaves_at_exact_and_padded_sizes(
    case: str, verify: int, device: torch.device
) -> None:
    module, twin = twins(case, device)
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False, verify=verify)
    for size in SIZES:
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    assert (model.graph_stats.failures, model.graph_stats.captures) == ({}, 2)
    assert model.graph_stats.replays >= 5
    assert model.graph_stats.padded_tokens > 0


@pytest.mark.parametrize("case", LEFT)
def test_a_value_saved_from_an_earlier_call_stays(case: str, device: torch.device) -> None:
    module, twin = twins(case, device)
    model = sg.wrap(module, capture_sizes=[2, 4], padding=False, progress=False)
    saved = []
    for size in (2, 4) * 5:
        x = torch.randn(size, 4, device=device)
        model(x)
        twin(x)
        saved.append((tensors(module), [t.clone() for t in tensors(twin)]))
    for ours, expected in saved:
        torch.testing.assert_close(ours, expected)
    assert model.graph_stats.replays >= 4


def test_what_is_one_tensor_or_list_in_eager_is_one_here(device: torch.device) -> None:
    module, _ = twins("shared", device)
    lists, _ = twins("shared list", device)
    given, _ = twins("input", device)
    returned, _ = twins("returned", device)
    models = [sg.wrap(m, capture_sizes=[2, 4], progress=False) for m in (module, lists, given, returned)]
    for size in SIZES:
        x = torch.randn(size, 4, device=device)
        results = [model(x) for model in models]
        assert module.s is module.t[0]
        assert module.u.untyped_storage().data_ptr() == module.s.untyped_storage().data_ptr()
        assert lists.s is lists.t
        assert given.s is x
        assert given.t.data_ptr() == x[:, 1:].data_ptr()
        assert returned.s is results[3]
    assert all(model.graph_stats.replays >= 5 for model in models)


@pytest.mark.parametrize("case", LEFT)
def test_graphs_of_all_sizes_captured_at_once_leave_it_too(case: str, device: torch.device) -> None:
    module, twin = twins(case, device)
    model = sg.wrap(module, capture_sizes=[1, 2, 4], progress=False)
    summary = model.capture_graphs(torch.randn(4, 4, device=device))
    assert (summary.captured, summary.failed) == (3, {})
    for size in (3, 4, 2, 1, 3):
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    assert model.graph_stats.replays == 5


def test_static_outputs_leave_graph_memory_that_the_next_replay_overwrites(device: torch.device) -> None:
    module, twin = twins("list", device)
    model = sg.wrap(module, capture_sizes=[2], outputs="static", progress=False)
    for _ in range(6):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    kept = tensors(module)
    model(torch.randn(2, 4, device=device))
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in tensors(module)]


def test_copies_pickles_and_resets_find_ordinary_tensors(device: torch.device) -> None:
    module, twin = twins("objects", device)
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for size in SIZES:
        x = torch.randn(size, 4, device=device)
        model(x), twin(x)
    copied = copy.deepcopy(module)
    check_state(copied, twin)
    before = [t.clone() for t in tensors(module)]
    model.reset_graphs()
    torch.testing.assert_close(tensors(module), before)
    for size in SIZES:
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    torch.testing.assert_close(tensors(copied), before)


def test_state_of_another_holder_goes_into_that_one(device: torch.device) -> None:
    """The user replaces the object on which tensors are left: a replay may not go on filling the old one."""
    for case in ("objects", "deep", "item of a dict", "child"):
        module, twin = twins(case, device)
        model = sg.wrap(module, capture_sizes=[2], progress=False)
        for turn in range(12):
            if turn == 6:
                old = [t.clone() for t in tensors(module)], tensors(module)
                for one in (module, twin):
                    if case == "child":
                        one.l = copy.deepcopy(one.l)
                    else:
                        one.s = copy.deepcopy(one.s)
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(model(x), twin(x))
            check_state(module, twin)
        torch.testing.assert_close(*old)
        assert model.graph_stats.recaptures == 1
        assert model.graph_stats.failures == {}


def test_what_the_user_does_to_the_place_between_calls_is_as_in_eager(device: torch.device) -> None:
    module, twin = twins("attribute", device)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for turn in range(9):
        for one in (module, twin):
            if turn % 3 == 1:
                one.s = None
            elif turn % 3 == 2:
                del one.s
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    assert model.graph_stats.replays >= 5
    assert model.graph_stats.recaptures == 0


# What is refused.


def _carried(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.s = y if m.s is None else m.s[:1] * 0.5 + y
    return m.s * 1


def _carried_by_default(m: Any, x: Tensor, y: Tensor) -> Tensor:
    before = getattr(m, "s", None)
    m.s = y * 1
    return y if before is None else y + before[:1]


def _seen_by_its_presence(m: Any, x: Tensor, y: Tensor) -> Tensor:
    first = m.s is None
    m.s = y * 1
    return y if first else y * 2


def _seen_in_a_dict(m: Any, x: Tensor, y: Tensor) -> Tensor:
    first = "y" not in m.s
    m.s["y"] = y * 1
    return y if first else y * 2


def _length_of_a_list(m: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = sum(len(item) for item in m.s if isinstance(item, Tensor))
    m.s[0] = y * 1
    return y + rows


def _read_by_c(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.s[0] = y * 1
    total = torch.cat([t[:1] for t in [m.s[0]]] + list.__getitem__(m.s, slice(1, 2)))
    m.s[1] = y[:1] * 2
    return y + total.sum(0)


def _history(m: Any, x: Tensor, y: Tensor) -> None:
    m.s.append(y)


def _swapped(m: Any, x: Tensor, y: Tensor) -> None:
    m.t, m.s = m.s, y * 1


def _count(m: Any, x: Tensor, y: Tensor) -> None:
    m.t = {"y": y, "count": m.s}
    m.s += 1


def _own_list(m: Any, x: Tensor, y: Tensor) -> None:
    m.t = m.s
    m.s[0] = y * 1


def _another_kind(m: Any, x: Tensor, y: Tensor) -> None:
    m.s = Box(y=y)


def _vars(m: Any, x: Tensor, y: Tensor) -> None:
    vars(m)["s"] = y * 1


def _held_twice(m: Any, x: Tensor, y: Tensor) -> None:
    m.s.inner.again["y"] = y * 1


def _held_twice_carried(m: Any, x: Tensor, y: Tensor) -> None:
    m.s.held["count"] = m.s.inner.again["count"] + 1
    m.s.held["y"] = y * 1


def _list_held_twice(m: Any, x: Tensor, y: Tensor) -> None:
    m.s.inner.again[0] = y * 1


def _both(held: Any) -> dict[str, Any]:
    return {"s": Box(held=held, inner=Box(again=held))}


REFUSED: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    _carried: lambda: {"s": None},
    _carried_by_default: dict,
    _seen_by_its_presence: lambda: {"s": None},
    _seen_in_a_dict: lambda: {"s": {}},
    _length_of_a_list: lambda: {"s": [None]},
    _history: lambda: {"s": []},
    _swapped: lambda: {"s": None, "t": None},
    _count: lambda: {"s": 0},
    _own_list: lambda: {"s": [None]},
    _another_kind: dict,
    _vars: dict,
    _held_twice: lambda: _both({}),
    _held_twice_carried: lambda: _both({"count": 0}),
    _list_held_twice: lambda: _both([None]),
}


@pytest.mark.parametrize("warmups", [0, 1, 2])
@pytest.mark.parametrize("leave", REFUSED, ids=lambda leave: leave.__name__)
def test_state_that_a_replay_cannot_leave_is_refused_and_stays_eagers(
    leave: Callable[..., Any], warmups: int, device: torch.device
) -> None:
    module = Leaves(leave, **_moved(REFUSED[leave](), device)).to(device).eval()
    twin = Leaves(leave, **_moved(REFUSED[leave](), device)).to(device).eval()
    twin.load_state_dict(module.state_dict())
    model = sg.wrap(module, capture_sizes=[2, 4], num_warmups=warmups, progress=False, verify=0)
    for turn, size in enumerate((2, 2, 2, 4, 4, 4, 2, 4)):
        if turn == 5 and leave is _seen_by_its_presence:
            module.s = twin.s = None
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        if leave is not _another_kind:
            check_state(module, twin)
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 2
    assert any(word in next(iter(model.graph_stats.failures.values())) for word in ("keep", "changes whenever"))


def _moved(attributes: dict[str, Any], device: torch.device) -> dict[str, Any]:
    leaves, spec = flatten(attributes)
    moved: dict[str, Any] = spec.unflatten(x.to(device) if isinstance(x, Tensor) else x for x in leaves)
    return moved


def test_a_read_past_the_container_by_c_code_is_never_stale(device: torch.device) -> None:
    attributes = {"s": [torch.zeros(1, 4, device=device), torch.zeros(1, 4, device=device)]}
    module = Leaves(_read_by_c, **copy.deepcopy(attributes)).to(device).eval()
    twin = Leaves(_read_by_c, **copy.deepcopy(attributes)).to(device).eval()
    twin.load_state_dict(module.state_dict())
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False, verify=0)
    for size in (*SIZES, *SIZES):
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)


def test_a_tensor_that_stays_in_a_global_as_well_is_refused(device: torch.device) -> None:
    def leave(m: Any, x: Tensor, y: Tensor) -> None:
        m.s = y * 1
        KEPT["y"] = m.s

    module = Leaves(leave).to(device).eval()
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        x = torch.randn(2, 4, device=device)
        model(x)
        torch.testing.assert_close(module.s, module.l(x))
        assert KEPT["y"] is module.s
    assert model.graph_stats.captures == 0


KEPT: dict[str, Any] = {}


def test_shapes_that_follow_the_batch_otherwise_are_served_at_exact_sizes_alone(device: torch.device) -> None:
    def leave(m: Any, x: Tensor, y: Tensor) -> None:
        m.s = y.new_zeros(len(y) + 1) + y.sum()

    module = Leaves(leave).to(device).eval()
    twin = Leaves(leave).to(device).eval()
    twin.load_state_dict(module.state_dict())
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for size in SIZES:
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    stats = model.graph_stats
    assert (stats.captures, stats.replays >= 4) == (2, True)
    assert stats.padded_tokens == 0


@pytest.mark.proofs
def test_a_row_that_depends_on_padding_in_what_is_left_is_found_by_the_proof(device: torch.device) -> None:
    def leave(m: Any, x: Tensor, y: Tensor) -> None:
        m.s = y - y.mean(0)

    module = Leaves(leave).to(device).eval()
    twin = Leaves(leave).to(device).eval()
    twin.load_state_dict(module.state_dict())
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for size in SIZES:
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    assert model.graph_stats.eager[Reason.PADDING_SHOWS] >= 2


@pytest.mark.proofs
def test_a_value_that_only_eager_knows_is_found_by_the_proof(device: torch.device) -> None:
    calls = iter(range(100))

    def leave(m: Any, x: Tensor, y: Tensor) -> None:
        m.s = y + next(calls)

    model = sg.wrap(Leaves(leave).to(device).eval(), capture_sizes=[2], progress=False)
    for _ in range(5):
        model(torch.randn(2, 4, device=device))
    assert "does not equal eager" in model.graph_stats.failures["batch size 2"]


def test_state_keys_tell_what_is_left_apart(device: torch.device) -> None:
    def leave(m: Any, x: Tensor, y: Tensor) -> None:
        if m.long:
            m.s = [y, y + 1]
        else:
            m.t = y

    module = Leaves(leave, long=True).to(device).eval()
    twin = Leaves(leave, long=True).to(device).eval()
    twin.load_state_dict(module.state_dict())
    model = sg.wrap(module, capture_sizes=[2], state_key=lambda m: m.long, progress=False)
    for turn in range(14):
        module.long = twin.long = turn % 3 == 0
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    assert (model.graph_stats.captures, model.graph_stats.failures) == (2, {})
    assert model.graph_stats.replays >= 8


def test_threads_that_call_one_model_find_a_whole_calls_tensors(device: torch.device) -> None:
    module, _ = twins("shared", device)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        model(torch.randn(2, 4, device=device))
    wrong: list[Any] = []

    def call() -> None:
        with torch.inference_mode():
            for _ in range(50):
                x = torch.randn(2, 4, device=device)
                if not torch.allclose(model(x), module.l(x) * 2):
                    wrong.append(x)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert module.s is module.t[0]


def test_classes_and_containers_are_as_they_were_after_captures(device: torch.device) -> None:
    class Kind(Leaves):
        s = "a default of the class"

    module = Kind(_item_of_a_dict, t={"y": None}).to(device).eval()
    module.leave = lambda m, x, y: (setattr(m, "s", y), m.t.__setitem__("y", y + 1))[0]
    held, before = module.t, dict(vars(Kind))
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for size in SIZES:
        model(torch.randn(size, 4, device=device))
    assert model.graph_stats.captures == 2
    assert module.t is held
    assert type(held) is dict
    assert dict(vars(Kind)) == before
    del module.s
    assert module.s == "a default of the class"


class Default(Leaves):
    """Reads a default of the class where it leaves nothing."""

    s: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.l(x)
        if self.leave is not None:
            self.s = y
        return y if self.s is not None else y * 2


class Derived(Default):
    """Inherits the default."""


def test_a_default_of_a_class_is_read_while_a_derived_class_leaves_tensors_too(device: torch.device) -> None:
    kinds = ((Default, _attribute), (Derived, _attribute), (Derived, None), (Default, None))
    module: Any = nn.Sequential(*(kind(leave) for kind, leave in kinds)).to(device).eval()
    twin = copy.deepcopy(module)
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for size in SIZES:
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        torch.testing.assert_close([child.s for child in module[:2]], [child.s for child in twin[:2]])
        assert module[2].s is module[3].s is None
    assert (model.graph_stats.failures, model.graph_stats.captures) == ({}, 2)


def test_a_failed_capture_puts_back_what_was_left(device: torch.device) -> None:
    def leave(m: Any, x: Tensor, y: Tensor) -> None:
        m.s, m.t["y"] = y, y + 1
        y.sum().item()

    module = Leaves(leave, t={}).to(device).eval()
    twin = Leaves(leave, t={}).to(device).eval()
    twin.load_state_dict(module.state_dict())
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
        check_state(module, twin)
    assert type(module.t) is dict
    assert "read back" in model.graph_stats.failures["batch size 2"]
