"""Carry tensors that runs leave in attributes of modules: ``self.hidden = h``, ``self.state = (h, c)``.

A place that a run writes becomes a further output of the graph. If runs read the place before they write it, it also
becomes a further argument, under a name that no parameter can have: ``self.hidden``. So the tensors are copied, and no
graph memory stays in a module. Tuples are flattened as in arguments and outputs: each replay leaves a new tuple.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from simplegraph.base.errors import InputError
from simplegraph.base.nested import RETURNABLE, Withheld, WithheldError, containers, flatten, map_leaves
from simplegraph.base.objects import attribute_of, is_set_by_hook, own_dict
from simplegraph.base.tensors import has_address, storage_key
from simplegraph.guard.versions import dict_version
from simplegraph.program.snapshot import ABSENT, is_same, is_untouched

KEPT = "kept"  # the output in place of a tensor or a tuple that a run did not replace


class WithCarried(NamedTuple):
    """The result of a run, and the values that it left in the places that the call passes."""

    result: Any
    carried_values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedPlace:
    """An attribute or a buffer of a module, in which runs leave a tensor or a tuple of tensors.

    Attributes:
        name: the name by which calls pass it.
        module: a weak reference to the module.
        key: the name of the attribute.
        is_buffer: True for a registered buffer.
        by_hook: True if a hook of torch's sets it before each use; then the tensor of the last eager run stays there.
        is_read: True if runs read the value before they replace it.
    """

    name: str
    module: weakref.ref[nn.Module]
    key: str
    is_buffer: bool
    by_hook: bool
    is_read: bool = False

    @property
    def holder(self) -> dict[str, Any]:
        """The dict that contains the place; an empty dict once the module is gone."""
        module = self.module()
        if module is None:
            return {}
        return module._buffers if self.is_buffer else vars(module)

    @property
    def value(self) -> Any:
        """The value in the place; `ABSENT` if there is none."""
        return self.holder.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        """Set the value, or delete the place, without running user code."""
        if value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


class PlacesFoundError(InputError):
    """A capture found places that calls have to pass; internal, the call runs eagerly.

    Attributes:
        places: the places.
    """

    def __init__(self, places: Sequence[CarriedPlace]) -> None:
        names = ", ".join(place.name for place in places)
        super().__init__(f"runs leave a tensor in {names}: from now on graphs have it as an input and output")
        self.places = places


def places_in(module: nn.Module) -> dict[str, CarriedPlace]:
    """Find the attributes and buffers of a module and its submodules that hold tensors, by their dotted names.

    Lists, dicts and objects are left out: a run may change them in place.
    """
    places = {}
    is_function = getattr(type(module), "is_function", False)
    for path, child in module.named_modules():
        if child is module and is_function:
            continue
        for is_buffer, holder in ((False, vars(child)), (True, child._buffers)):
            for key in [key for key, value in holder.items() if _holds_tensors(value)]:
                dotted = f"{path}.{key}" if path else key
                name = f"self.{dotted.removeprefix('self.')}"  # of a method, code has that name already
                places[dotted] = CarriedPlace(name, weakref.ref(child), key, is_buffer, is_set_by_hook(child, key))
    return places


class CarriedTensors:
    """The places in which runs of one wrapped module leave tensors.

    Args:
        enabled: True if captures may find places.

    Attributes:
        places: the places; the tuple is replaced as a whole.
        stale: True once places were added or changed: graphs of calls that did not pass them must be dropped.
    """

    def __init__(self, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self.places: tuple[CarriedPlace, ...] = ()
        self.stale = False
        self._before: dict[str, set[int]] = {}  # name of a place -> storage keys of its tensors before the latest run

    @property
    def passed(self) -> list[CarriedPlace]:
        """The places that calls pass."""
        return [place for place in self.places if not place.by_hook]

    def unguarded(self) -> set[tuple[int, str]]:
        """Return the places as (id of the dict, key); their values are not guarded."""
        return {(id(place.holder), place.key) for place in self.places}

    def adopt(self, places: Iterable[CarriedPlace], read: Collection[int]) -> None:
        """Add places that a capture found; `read` has the storage keys of memory that the capture read."""
        by_name = {place.name: place for place in self.places}
        self.places = tuple((by_name | {place.name: place for place in places}).values())
        self.stale = True
        self._note_before()
        self.note_read(read)

    def check(self) -> None:
        """Forget the places of torch's hooks that were removed."""
        self.places = tuple(
            place
            for place in self.places
            if not place.by_hook or ((module := place.module()) is not None and is_set_by_hook(module, place.key))
        )

    def note_read(self, read: Collection[int]) -> None:
        """Note the places that the latest run read, given the storage keys of memory that it read."""
        self._promote([place for place in self.places if not self._before.get(place.name, set()).isdisjoint(read)])

    def _promote(self, read: Sequence[CarriedPlace]) -> None:
        """Pass the values of these places as inputs of calls from now on."""
        names = {place.name for place in read if place.by_hook or not place.is_read}
        if names:
            self.places = tuple(
                dataclasses.replace(place, is_read=True, by_hook=False) if place.name in names else place
                for place in self.places
            )
            self.stale = True

    def _note_before(self) -> None:
        self._before = {place.name: set(map(storage_key, _tensors_in(place.value))) for place in self.places}

    def call(self, runner: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call: pass the values of places as arguments, and set the places to the values of the outputs."""
        places = self.passed
        before = _Dicts(places)
        result = runner.call(module, args, _arguments(kwargs, places))
        if type(result) is not WithCarried:
            return result
        for place, value in zip(places, result.carried_values, strict=True):
            if value is not KEPT and type(value) is not Withheld and value is not place.value:
                before.put(place, runner.clone_from_pool(value))
        runner.renew(before.renewed())
        return result.result

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments with the values of the places that runs read, and None for the other places."""
        return _arguments(kwargs, self.passed)

    def run(self, function: Callable[[Mapping[str, Any]], Any], kwargs: Mapping[str, Any], *, is_call: bool) -> Any:
        """Run a module; if the keyword arguments pass places, also return the values that the run left there.

        Args:
            function: runs the module on its own keyword arguments.
            kwargs: the module's keyword arguments, and the values of places.
            is_call: True for a call of the user, which reads and sets the places themselves. Otherwise the places have
                the passed values during the run only.

        Raises:
            PlacesFoundError: the run read a place that is not passed.
        """
        places = self.places
        names = {place.name for place in places}
        own_kwargs = {name: value for name, value in kwargs.items() if name not in names}
        self._note_before()
        with contextlib.nullcontext() if is_call else self._bound(places, kwargs):
            before = [place.value for place in places]
            result = function(own_kwargs)
            values = [_leaf(place, old) for place, old in zip(places, before, strict=True) if place.name in kwargs]
            before.clear()
        return WithCarried(result, tuple(values)) if values else result

    @contextlib.contextmanager
    def _bound(self, places: Sequence[CarriedPlace], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Set places to the passed values, or else to unreadable objects; restore the places after the block."""
        values_before = [place.value for place in places]
        unread = []
        for place, value in zip(places, values_before, strict=True):
            passed = kwargs.get(place.name)
            if place.by_hook or (passed is None and value is ABSENT):
                continue
            if place.is_read:
                place.put(passed)
            else:
                unread += [(place, reference) for reference in _withhold(place)]
        try:
            yield
        except Exception as error:
            if unread and (isinstance(error, WithheldError) or Withheld.__name__ in str(error)):
                raise self._error_of([place for place, _ in unread]) from error
            raise
        finally:
            for place, value in zip(places, values_before, strict=True):
                if place.value is not value:
                    place.put(value)
        passed_on = [place for place, withheld in unread if withheld() is not None]  # to another place, or returned
        if passed_on:
            raise self._error_of(passed_on)

    def _error_of(self, read: Sequence[CarriedPlace]) -> PlacesFoundError:
        self._promote(read)
        names = {place.name for place in read}
        return PlacesFoundError([place for place in self.places if place.name in names])


class _Dicts:
    """The dicts that contain places, before a call: guards need not read a dict again after the call's own writes.

    Args:
        places: the places.
    """

    def __init__(self, places: Iterable[CarriedPlace]) -> None:
        holders = [place.holder for place in places] if dict_version is not None else []
        # By id: the dict, its version from before anything was read, and its expected contents after the call.
        self._before = {id(holder): (holder, dict_version(holder), holder.copy()) for holder in holders}  # type: ignore[misc]

    def put(self, place: CarriedPlace, value: Any) -> None:
        """Set the value of a place; guards read the dict again if more than tensors changes."""
        _, _, expected = self._before.get(id(place.holder), (None, 0, {}))
        if _differ_in_tensors(value, expected.get(place.key)):
            expected[place.key] = value
        place.put(value)

    def renewed(self) -> dict[int, int]:
        """Return {old version: new version} of the dicts in which nothing else was replaced meanwhile."""
        now = [(before, dict_version(holder), holder, copy) for holder, before, copy in self._before.values()]  # type: ignore[misc]
        return {before: after for before, after, holder, copy in now if after != before and is_untouched(holder, copy)}


NOTHING_CARRIED = CarriedTensors()


def carried_by(module: Any) -> CarriedTensors:
    """Return the places in which runs of a wrapped module leave tensors; none for other modules."""
    kept = (own_dict(module) or {}).get("_simplegraph")  # in an instance of a wrapped class; others have a slot
    runner = kept if kept is not None else attribute_of(module, "_graph_runner")
    return getattr(runner, "carried", NOTHING_CARRIED)


def _arguments(kwargs: Mapping[str, Any], places: Iterable[CarriedPlace]) -> dict[str, Any]:
    values = {place.name: place.value if place.is_read else None for place in places}
    return {**kwargs, **{name: None if value is ABSENT else value for name, value in values.items()}}


def _holds_tensors(value: Any) -> bool:
    """True for a tensor, and for a tuple of tensors, plain values and further such tuples."""
    kind = type(value)
    return issubclass(kind, Tensor) or (issubclass(kind, tuple) and _is_plain(value) and bool(_tensors_in(value)))


def _is_plain(value: tuple[Any, ...]) -> bool:
    """True for a tuple that holds only tensors, plain values and further such tuples."""
    return not containers(value) and all(issubclass(type(leaf), RETURNABLE) for leaf in flatten(value)[0])


def _tensors_in(value: Any) -> list[Tensor]:
    """List the tensors of a value, also inside containers."""
    return list(filter(_is_tensor, flatten(value)[0]))


def _is_tensor(leaf: Any) -> bool:
    return issubclass(type(leaf), Tensor) and has_address(leaf)


def _withhold(place: CarriedPlace) -> list[weakref.ref[Withheld]]:
    """Replace the tensors in a place by unreadable objects, and return weak references to these objects.

    The length of a tuple and its other values are plain values, which are part of a call's key.
    """
    place.put(map_leaves(place.value, _is_tensor, lambda leaf: Withheld(type(leaf), f"in {place.name}")))
    return [weakref.ref(leaf) for leaf in flatten(place.value)[0] if type(leaf) is Withheld]


def _differ_in_tensors(now: Any, before: Any) -> bool:
    """True for two tensors of one class, and for tuples of one class that hold such tensors and equal plain values."""
    if type(now) is type(before) and issubclass(type(now), tuple):
        items, items_before = tuple.__iter__(now), tuple.__iter__(before)
        return tuple.__len__(now) == tuple.__len__(before) and all(map(_differ_in_tensors, items, items_before))
    return is_same(now, before) or (type(now) is type(before) and issubclass(type(now), Tensor))


def _leaf(place: CarriedPlace, before: Any) -> Any:
    """Return the value that a run left in a place, as an output."""
    value = place.value
    if value is before:
        return KEPT
    if value is ABSENT or value is None:
        return None
    is_left = issubclass(type(value), Tensor) or (issubclass(type(value), tuple) and _is_plain(value))
    return value if is_left else Withheld(type(value), f"in {place.name}")
