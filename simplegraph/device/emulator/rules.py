"""The emulator's rules: the operators that write, read back to Python, or do nothing on a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

READ_BACK = "Python read back the value of a tensor, which has none while it is captured"
FROM_HOST = "data was copied from host memory that is not pinned, which a capture does not permit"
COMPILED = "compiled code ran, whose kernels no emulator sees"

_READS = {"_local_scalar_dense", "item", "is_nonzero", "_linalg_check_errors"}
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NESTING = (tuple, list, dict)
TAKES_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
MASKS = (torch.bool, torch.uint8)


def tensors(*values: Any) -> list[Tensor]:
    """List the tensors among values, also in lists, tuples and dicts."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


def leaves(tree: Any) -> list[Any]:
    """List the leaves of lists, tuples and dicts, in a third of the time of torch's pytree."""
    if not isinstance(tree, _NESTING):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    return [leaf for item in items for leaf in (leaves(item) if isinstance(item, _NESTING) else (item,))]


def operator_label(func: Any) -> str:
    """Return the name of an operator as users know it, such as ``aten.item``."""
    return str(func.overloadpacket).replace("_local_scalar_dense", "item")


# Operators whose CUDA kernels wait for a value on the host, unlike the CPU's. From torch's sources, releases 2.9 to
# 2.11, and tested with 2.11; `python -m tests.parity` compares with a GPU.

# Name -> True if a call with these arguments waits.
_Waits = Callable[[dict[str, Any]], Any]


def reads_value(func: Any, name: str, args: Any, kwargs: dict[str, Any], is_number: Callable[[Tensor], bool]) -> bool:
    """True if the host needs a tensor's value to continue, or if the CUDA kernel would wait for a value in a capture.

    Args:
        func: the operator.
        name: its name.
        args: its positional arguments.
        kwargs: its keyword arguments.
        is_number: returns True for a tensor that holds a Python number, which is on the CPU also beside a GPU.
    """
    # An index is dynamic only with a mask; repeat_interleave may be passed its size; `equal` is in _WAITS.
    size_is_known = name in {*TAKES_MASK, "equal"} or kwargs.get("output_size") is not None
    if name in _READS or (not size_is_known and not _READING_TAGS.isdisjoint(func.tags)):
        return True
    waits = _WAITS.get(name.removesuffix("_")) or _WAITS.get(name)
    if waits is None:
        return False
    given = arguments(func, args, kwargs)
    numbers = {key for key, value in given.items() if isinstance(value, Tensor) and is_number(value)}
    first = next((value for value in given.values() if isinstance(value, Tensor)), None)
    return first is not None and first.numel() > 0 and bool(waits({k: v for k, v in given.items() if k not in numbers}))


def arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, defaults included."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    return given | dict(zip(given, args, strict=False)) | kwargs


# Operators that do not check the indices of their writes: with undefined indices, a CPU writes outside of its memory.
UNCHECKED_INDICES = re.compile(r"(adaptive_max_pool|max_pool|_embedding_bag)\w*_backward")

# The argument that torch expects on the CPU, and the index of the result that depends on it: if the argument is on the
# CPU beside a GPU, the result is, too.
ON_HOST = {"_pack_padded_sequence": ("lengths", 1), "_pad_packed_sequence": ("batch_sizes", 1)}


def _reads(*names: str) -> _Waits:
    """Make the rule that an operator waits if one of these arguments is a tensor."""
    return lambda given: any(isinstance(given.get(name), Tensor) for name in names)


def _of_batch(given: dict[str, Any]) -> bool:
    """True for a batch of matrices, which MAGMA computes."""
    return bool(given["self"].dim() > 2)


def _isin_sorts(given: dict[str, Any]) -> bool:
    """True if there are too many elements to compare them one by one: then duplicates are removed first."""
    elements, tested = given.get("elements"), given.get("test_elements")
    if not isinstance(elements, Tensor) or not isinstance(tested, Tensor) or given["assume_unique"]:
        return False
    return bool(tested.numel() >= 10 * elements.numel() ** 0.145)


_MAX_COUNTED = 2048  # by one block of threads; longer rows are sorted

_WAITS: dict[str, _Waits] = {
    "equal": lambda given: "self" in given and "other" in given and given["self"].shape == given["other"].shape,
    "normal": _reads("std"),
    "index_fill": _reads("value"),
    "masked_fill": _reads("value"),
    "linspace": _reads("start", "end"),
    "logspace": _reads("start", "end"),
    "searchsorted": _reads("sorter"),
    "segment_reduce": lambda given: isinstance(given["lengths"], Tensor) and not given["unsafe"],
    "histc": lambda given: given["min"] == given["max"],
    "mode": lambda given: given["self"].dim() > 0 and given["self"].shape[given["dim"]] > _MAX_COUNTED,
    "isin": _isin_sorts,
    "fake_quantize_per_channel_affine_cachemask": lambda given: True,
    # cuSOLVER and MAGMA: convergence and errors are read on the host.
    "linalg_matrix_exp": lambda given: given["self"].shape[-1] > 1,
    "_linalg_svd": lambda given: True,
    "linalg_pinv": lambda given: True,
    "cholesky": lambda given: True,
    "cholesky_inverse": _of_batch,
    "cholesky_solve": _of_batch,
    "_cholesky_solve_helper": _of_batch,
    "linalg_cholesky_ex": lambda given: given["check_errors"],
    "linalg_inv_ex": lambda given: given["check_errors"],
    "linalg_ldl_factor_ex": lambda given: given["check_errors"],
    # matrices that are not square go another way
    "linalg_lu_factor_ex": lambda given: given["check_errors"] or given["A"].shape[-2] != given["A"].shape[-1],
    "_linalg_solve_ex": lambda given: given["check_errors"],
}
