"""What code leads to is remembered and put back, whatever its classes do, and none of their code is run for it."""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from simplegraph.base import walk
from simplegraph.base.objects import by_class
from simplegraph.program.snapshot import Snapshot, is_untouched


class Hostile(tuple[Any, ...]):
    def __len__(self) -> int:
        raise TypeError("no length")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("no items")


class Guarded:
    """Raises whatever attribute is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was read")


class Graph:
    """Stands for memory of a graph."""


def classes(kind: type = object) -> Iterator[type]:
    for derived in type.__subclasses__(kind):
        yield derived
        yield from classes(derived)


def test_classes_of_every_kind_can_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static classes of C have no dict that the garbage collector shows, as those of scikit-learn and of this table."""
    monkeypatch.setattr(walk, "_LIBRARIES", frozenset())
    for name in ("is_users", "kind_of"):  # which remember what they say of a class
        monkeypatch.setattr(walk, name, by_class(getattr(walk, name).__wrapped__))
    kinds = list(classes())
    assert len(kinds) > 1000
    policy = walk.Policy(walk.kind_of, code=1, beyond_code=10**6)  # one class away is each of them
    opened = list(walk.Walk(kinds, policy))
    assert len(opened) > 1000
    assert sum(is_untouched(thing, held) for thing, held, _ in opened) > 1000


def test_objects_whose_own_methods_raise_are_looked_through_and_put_back() -> None:
    graph, inside, guarded = Graph(), [1], Guarded()
    before = Snapshot(Hostile([inside]), guarded)
    inside.append(graph)  # type: ignore[arg-type]
    object.__setattr__(guarded, "seen", graph)
    before.release(lambda thing: thing is graph)
    assert inside == [1]
    assert object.__getattribute__(guarded, "__dict__") == {}


def test_what_others_put_into_a_list_meanwhile_stays_where_only_additions_go() -> None:
    graph, items, changed = Graph(), [1, 2], collections.deque([1, 2], maxlen=2)
    before = Snapshot(items, changed)
    items.insert(0, graph)  # type: ignore[arg-type]
    items.append(3)
    changed.append(graph)  # type: ignore[arg-type]
    before.release(lambda thing: thing is graph)
    assert items == [1, 2, 3]
    assert list(changed) == [1, 2]


def test_a_container_of_something_kept_leaves_with_it_and_other_changes_stay() -> None:
    graph, table = Graph(), {"old": 1}
    before = Snapshot(table)
    table["new"] = {"deep": (graph,)}  # type: ignore[assignment]
    table["old"] = 2
    before.release(lambda thing: thing is graph)
    assert table == {"old": 2}


NAMING = ["other.items", "other.keep.items", "other.Kept.items"]


@pytest.mark.parametrize("named", [*NAMING, "None"])
@pytest.mark.parametrize("kept", NAMING)
def test_of_a_file_that_is_imported_what_code_names_is_looked_into(kept: str, named: str) -> None:
    """A notebook's file, or a test's, imports what leads to thousands of objects, and every capture would read them."""
    graph, other = Graph(), types.ModuleType("other")
    exec("items = []\ndef keep(): pass\nkeep.items = []\nclass Kept:\n    items = []", vars(other))
    file: dict[str, Any] = {"other": other}
    exec(f"def forward(): return [lambda: {named} for _ in range(2)]", file)
    items, before = eval(kept, file), Snapshot(file["forward"], code=4)
    items.append(graph)
    names = before.release(lambda thing: thing is graph)
    reached = named == kept or (kept == "other.items" and named != "None")  # which has the same name
    assert (items == [] and names) if reached else (items == [graph] and not names)


WAYS = {
    "a view": lambda log: log.keys(),
    "a proxy": types.MappingProxyType,
    "a method": lambda log: log.__setitem__,
    "an iterator": iter,
    "the dict of a thread": lambda log: log,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_dict_that_something_else_leads_to_is_put_back_with_its_holder(way: str) -> None:
    class Holder:
        def __init__(self) -> None:
            local = threading.local()
            self.log: dict[str, Any] = vars(local) if way == "the dict of a thread" else {}
            self.other = local if way == "the dict of a thread" else WAYS[way](self.log)

    holder = Holder()
    before = Snapshot(holder, code=4)
    holder.log["new"] = [1]
    assert before.changes().keys() == {"log.new"}
    before.put_back({"log.new"})
    assert holder.log == {}
