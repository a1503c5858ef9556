"""The emulator's rules: which operators write, read back to Python, or do nothing on a device, and how they run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.operators import is_collective, is_uninitialised, written_args

READ_BACK = "a tensor was read back to Python while its value does not exist yet"
FROM_HOST = "data was copied from host memory that is not pinned, which a capture does not permit"
COMPILED = "compiled code ran, whose kernels no emulator sees"

_READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::_linalg_check_errors"}
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_TAKES_MASK = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


def operator_name(func: Any) -> str:
    """Return an operator's name without its overload, such as ``aten::add``."""
    return str(func._schema.name)


def operator_label(func: Any) -> str:
    """Name an operator as a user knows it, such as ``aten.item``."""
    return str(func.overloadpacket).replace("_local_scalar_dense", "item")


def reads_value(func: Any, kwargs: dict[str, Any]) -> bool:
    """True if the host needs a tensor's value to go on."""
    if operator_name(func) in _READS:
        return True
    if operator_name(func) in {*_TAKES_MASK, "aten::equal"} or kwargs.get("output_size") is not None:
        return False  # Only a mask makes an index dynamic, repeat_interleave may know its size, `equal` is in _WAITS.
    return not _READING_TAGS.isdisjoint(func.tags)


def masks(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """List the boolean masks among the indices of an indexing operator."""
    if operator_name(func) not in _TAKES_MASK:
        return []
    return [index for index in tensors(args[1]) if index.dtype in (torch.bool, torch.uint8)]


def does_work(func: Any, written: Sequence[Tensor], created: Sequence[int]) -> bool:
    """True if a device would have anything to do for the operator."""
    if is_uninitialised(func) or torch.Tag.inplace_view in func.tags:
        return False
    return bool(written or created) or func.namespace != "aten" or "assert" in operator_name(func)


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """List the tensors that the operator writes to."""
    return tensors(list(written_args(func, tuple(args), kwargs)))


def waiting(func: Any) -> Callable[..., Any]:
    """Return the operator as later work on its stream finds it; a collective has run by then."""
    if not is_collective(func):
        return func  # type: ignore[no-any-return]

    def call(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for leaf in leaves(result):
            if isinstance(leaf, Tensor):
                torch.ops._c10d_functional.wait_tensor(leaf)
            elif hasattr(leaf, "wait"):
                leaf.wait()
        return result

    return call


def with_modes(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that finds the autocast and grad mode in force now at every later call.

    It has them for what it calls in turn; and an LSTM keeps more for its backward under grad mode.
    """
    if torch.is_grad_enabled():
        func = functools.partial(_grad, func)
    if torch.is_autocast_enabled("cpu"):
        func = functools.partial(_autocast, torch.get_autocast_dtype("cpu"), func)
    return func


def _grad(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with torch.enable_grad():
        return func(*args, **kwargs)


def _autocast(dtype: torch.dtype, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", dtype, cache_enabled=False):
        return func(*args, **kwargs)


def run_for_shapes(func: Callable[..., Any], args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
    """Run an operator for the shapes of its results; the values of its arguments may be undefined."""
    try:
        return func(*args, **kwargs)
    except (IndexError, RuntimeError) as error:
        # What an earlier segment left is poisoned, and a capture on a GPU looks at no value.
        def change(tensor: Tensor) -> Tensor:
            return tensor if any(tensor is other for other in written) else _harmless(tensor)

        with contextlib.suppress(Exception):
            return func(*map_tree(Tensor, change, args), **map_tree(Tensor, change, kwargs))
        raise error


def _harmless(tensor: Tensor) -> Tensor:
    """Return values that operators accept: 1.0, True and index 0."""
    is_index = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    return torch.zeros_like(tensor) if is_index else torch.ones_like(tensor)


def map_tree(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with every instance of `kind` changed; lists, tuples and dicts are looked into."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_tree(kind, change, item) for item in tree)
    if type(tree) is dict:
        return {key: map_tree(kind, change, item) for key, item in tree.items()}
    return tree


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what lists, tuples and dicts hold, in order."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    else:
        yield tree


def tensors(tree: Any) -> list[Tensor]:
    """List the tensors among the leaves."""
    return [tree] if isinstance(tree, Tensor) else [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


# Operators for which CUDA's kernels wait for a value on the host, where the CPU's need none, or have one there. Read
# from torch's sources, releases 2.9 to 2.11, and seen with 2.11; `python -m tests.parity` compares with a GPU.

# Name -> True if a call with these arguments waits.
_Waits = Callable[[dict[str, Any]], bool]


def waits_for_value(func: Any, args: Any, kwargs: dict[str, Any], is_number: Callable[[Tensor], bool]) -> bool:
    """True if the operator would wait for the device in a capture on CUDA, inside of its own kernel.

    Args:
        func: the operator.
        args: what it is called with.
        kwargs: the same by name.
        is_number: True for a tensor that holds a number from Python, which is on the CPU there, too.
    """
    name = func._schema.name.removeprefix("aten::")
    waits = _WAITS.get(name.removesuffix("_")) or _WAITS.get(name)
    if waits is None:
        return False
    given = _arguments(func, args, kwargs)
    numbers = {key for key, value in given.items() if isinstance(value, Tensor) and is_number(value)}
    first = next((value for value in given.values() if isinstance(value, Tensor)), None)
    return first is not None and first.numel() > 0 and waits({k: v for k, v in given.items() if k not in numbers})


def host_results(func: Any, args: Any, kwargs: dict[str, Any], is_host: Callable[[Tensor], bool]) -> Sequence[int]:
    """List the places of the results that lie on the CPU beside a GPU, too, if what they follow from does."""
    name, place = _ON_HOST.get(func._schema.name, ("", 0))
    return (place,) if name and is_host(_arguments(func, args, kwargs)[name]) else ()


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    return given | dict(zip(given, args, strict=False)) | kwargs


# Which argument torch wants on the CPU, and the place of the result that follows from it.
_ON_HOST = {"aten::_pack_padded_sequence": ("lengths", 1), "aten::_pad_packed_sequence": ("batch_sizes", 1)}


def _always(given: dict[str, Any]) -> bool:
    return True


def _reads(*names: str) -> _Waits:
    """It reads these arguments where they are tensors."""
    return lambda given: any(isinstance(given.get(name), Tensor) for name in names)


def _checks_errors(given: dict[str, Any]) -> bool:
    return bool(given["check_errors"])


def _factors(given: dict[str, Any]) -> bool:
    """True if errors are checked, or for matrices that are not square, which go another way."""
    rows, columns = given["A"].shape[-2:]
    return bool(given["check_errors"]) or rows != columns


def _of_batch(name: str) -> _Waits:
    """Return a condition that is true for a batch of matrices, which MAGMA gets."""
    return lambda given: given[name].dim() > 2


def _counts_by_sorting(given: dict[str, Any]) -> bool:
    """True for rows that are too long for one block of threads."""
    values: Tensor = given["self"]
    return values.dim() > 0 and values.shape[given["dim"]] > _MOST_COUNTED


_MOST_COUNTED = 2048


def _isin_sorts(given: dict[str, Any]) -> bool:
    """Elements are compared one by one with a few, and made unique if there are more."""
    elements, tested = given.get("elements"), given.get("test_elements")
    if not isinstance(elements, Tensor) or not isinstance(tested, Tensor) or given["assume_unique"]:
        return False
    return bool(tested.numel() >= 10 * elements.numel() ** 0.145)


def _same_shape(given: dict[str, Any]) -> bool:
    return "self" in given and "other" in given and given["self"].shape == given["other"].shape


_WAITS: dict[str, _Waits] = {
    "equal": _same_shape,
    "normal": _reads("std"),
    "index_fill": _reads("value"),
    "masked_fill": _reads("value"),
    "linspace": _reads("start", "end"),
    "logspace": _reads("start", "end"),
    "searchsorted": _reads("sorter"),
    "segment_reduce": lambda given: isinstance(given["lengths"], Tensor) and not given["unsafe"],
    "histc": lambda given: given["min"] == given["max"],
    "mode": _counts_by_sorting,
    "isin": _isin_sorts,
    "fake_quantize_per_channel_affine_cachemask": _always,
    # cuSOLVER and MAGMA: convergence and errors are read on the host.
    "linalg_matrix_exp": lambda given: given["self"].shape[-1] > 1,
    "_linalg_svd": _always,
    "linalg_pinv": _always,
    "cholesky": _always,
    "cholesky_inverse": _of_batch("self"),
    "cholesky_solve": _of_batch("self"),
    "_cholesky_solve_helper": _of_batch("self"),
    "linalg_cholesky_ex": _checks_errors,
    "linalg_inv_ex": _checks_errors,
    "linalg_ldl_factor_ex": _checks_errors,
    "linalg_lu_factor_ex": _factors,
    "_linalg_solve_ex": _checks_errors,
}
