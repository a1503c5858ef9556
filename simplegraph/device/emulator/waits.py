"""Operators for which CUDA's kernels wait for a value on the host, where the CPU's need none, or have one there.

Read from torch's sources, releases 2.9 to 2.11, and seen with 2.11; `python -m tests.parity` compares with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

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


_WAITS: dict[str, _Waits] = {
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
