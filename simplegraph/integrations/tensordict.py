"""TensorDicts in and out of calls, and modules of tensordict and TorchRL, read without importing these.

Registers itself where it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from simplegraph.base.nested import (
    LIBRARY_MAPPINGS,
    LIBRARY_REMEDIES,
    MARKED_MAPPINGS,
    LibraryMapping,
    Opened,
    library_mapping,
)
from simplegraph.base.walk import LIBRARY_SETTINGS


def _state(value: Any) -> tuple[Any, ...]:
    names = tuple(value.names)
    return value.batch_size, value.device, names if any(name is not None for name in names) else None, value.is_locked


def _items(value: Any) -> dict[str, Any]:
    return dict(value.items())


def _open(value: Any) -> Opened:
    """Open a TensorDict. Its batch size is read from a tensor that it holds, so that it follows the tensors' rows."""
    items, (size, *state) = _items(value), _state(value)
    if _first_tensor(items.values()) is not None:
        size = len(size)
    return items.keys(), items.values(), (_rebuild, (type(value), tuple(items), size, *state))


def _rebuild(children: list[Any], context: tuple[Any, ...]) -> Any:
    kind, keys, size, device, names, is_locked = context
    first = _first_tensor(children) if isinstance(size, int) else None
    size = size if first is None else first.shape[:size]
    made = kind(dict(zip(keys, children, strict=True)), batch_size=size, device=device, names=names)
    return made.lock_() if is_locked else made


def _open_class(value: Any) -> Opened | None:
    """Open an object of a tensorclass, whose fields are entries of a TensorDict; None if some are elsewhere."""
    if not _is_plain(value):
        return None
    keys, values, (_, context) = _open(value._tensordict)
    return keys, values, (_rebuild_class, (*context, type(value)))


def _is_plain(value: Any) -> bool:
    return type(value._tensordict).__name__ == "TensorDict" and not value._non_tensordict


def _items_of_class(value: Any) -> dict[str, Any]:
    return _items(value._tensordict) if _is_plain(value) else {}


def _rebuild_class(children: list[Any], context: tuple[Any, ...]) -> Any:
    return context[-1].from_tensordict(_rebuild(children, context[:-1]))


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    """Find the first tensor in what a TensorDict holds."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        library = library_mapping(type(value))
        tensor = None if library is None else _first_tensor(library.items(value).values())
        if tensor is not None:
            return tensor
    return None


def _open_data(value: Any) -> Opened:
    """Open what holds a plain value in a TensorDict, which gives it its own batch size."""
    return ("data",), (value.data,), (_rebuild_data, type(value))


def _items_of_data(value: Any) -> dict[str, Any]:
    return {"data": value.data}


def _rebuild_data(children: list[Any], kind: Any) -> Any:
    return kind(data=children[0])


def _leads_with_batch(context: Any) -> bool:
    """True if a TensorDict has a batch size, with which its tensors begin."""
    return bool(context[1][2])


# Functions that return a mode, or variables that hold one, by which modules of the libraries choose their work.
_SETTINGS = (
    ("tensordict.nn.probabilistic", "interaction_type"),
    ("tensordict.nn.utils", "skip_existing"),
    ("tensordict.nn.utils", "_dispatch_td_nn_modules"),
    ("tensordict.nn.utils", "_composite_lp_aggregate"),
    ("tensordict.utils", "lazy_legacy"),
    ("tensordict.utils", "list_to_stack"),
    ("tensordict.utils", "capture_non_tensor_stack"),
    ("torchrl.modules.tensordict_module.rnn", "recurrent_mode"),
)


def _settings() -> dict[str, Any]:
    """Read the modes that are set around a call; those of files that are not imported are left out."""
    modes = ((name, getattr(sys.modules.get(file), name, None)) for file, name in _SETTINGS)
    return {name: getattr(mode, "get_mode", mode)() for name, mode in modes if mode is not None}


def _put(mapping: Any, key: str, value: Any) -> None:
    mapping.set(key, value)


def _remove(mapping: Any, key: str) -> None:
    mapping.del_(key)


def _no(_: Any) -> bool:
    return False


_LIBRARY, _MORE = "tensordict", (_leads_with_batch, _state, _put, _remove)
_DATA = LibraryMapping(_LIBRARY, _open_data, _items_of_data, _no, _no, _put, _remove)
LIBRARY_MAPPINGS["TensorDict"] = LibraryMapping(_LIBRARY, _open, _items, *_MORE)
LIBRARY_MAPPINGS["NonTensorData"] = LIBRARY_MAPPINGS["MetaData"] = _DATA
MARKED_MAPPINGS["_is_tensorclass"] = LibraryMapping(_LIBRARY, _open_class, _items_of_class, *_MORE)
LIBRARY_SETTINGS[_LIBRARY] = LIBRARY_SETTINGS["torchrl"] = _settings
LIBRARY_REMEDIES[_LIBRARY] = "{} is a {}: pass its to_tensordict(), which a graph can write to"
