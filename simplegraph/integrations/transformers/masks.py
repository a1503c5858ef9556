"""Answers transformers' question whether it is being traced, so that a capture takes the same branch as eager.

Transformers leaves out a mask that hides nothing. It first asks its `is_tracing`, which is true in any capture, and
then makes the mask, whose values cannot be read there. Where there is no mask to read, or its values follow from Python
numbers (`KnownValues`), a capture can do as eager does. Where they are data, as in a mask that the caller passes, the
graph must have a mask, whatever it holds; the eager run of a proof then makes one, too, and replays are compared with
that.

It also asks whether it is being compiled, and caches nothing then; captures need that as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from simplegraph.base import patches
from simplegraph.base.extras import ProbeCounts
from simplegraph.base.operators import (
    OperatorMode,
    defined,
    facts_of,
    innermost_mode,
    is_higher_order,
    strided_tensors,
    without_modes,
    written_args,
)
from simplegraph.base.tensors import storage_key
from simplegraph.program.breaks.marks import ACTIVE
from simplegraph.program.probes import Probe, Run

# Functions of transformers that ask about a tensor, and read it if the answer is no.
_DECIDING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "find_packed_sequence_indices")

# For `KnownValues`: operators that read a value, and operators whose results are known if their arguments are.
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.item.default}
_FILLED = {"ones_like": 1, "new_ones": 1, "zeros_like": 0, "new_zeros": 0}  # of any tensor's shape
# Operators that are exact for integers, on every device.
_ARITHMETIC = {"arange", "add", "sub", "rsub", "mul", "neg", "cumsum", "sum"}
_EXACT = {
    *("ones", "zeros", "full", "scalar_tensor", "eq", "ne", "lt", "le", "gt", "ge", "all", "any", "cat", "stack"),
    *("logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or", "clone", "_to_copy"),
    *("alias", "detach", "slice", "select", "unsqueeze", "squeeze", "expand", "view", "_unsafe_view", "permute"),
    *("transpose", "t", "repeat"),
}
_MAX_ELEMENTS = 1 << 16


class _ThreadAnswers(threading.local):
    values: KnownValues | None = None  # set in a capture, whose known values answer the questions
    asked = 0  # questions about a tensor
    decisions = 0  # functions that asked some
    decisions_left = 0  # functions that decide on a mask and are still to come, in a run whose values are followed


_THREAD = _ThreadAnswers()


def _watch() -> None:
    """Count decisions that depend on a tensor from now on, and answer questions in captures."""
    for name, functions in _REPLACED.items():
        module = sys.modules.get(f"transformers.{name}")
        for function, replacing in functions.items() if module is not None else ():
            original = vars(module).get(function)
            if original is not None and original.__module__ != __name__:
                patches.replace(module, function, replacing)


@contextlib.contextmanager
def counting(counts: ProbeCounts) -> Iterator[None]:
    """Note how many decisions depend on a tensor in an eager run, if any does; the most of all runs is kept."""
    _watch()
    before = _THREAD.decisions
    yield
    decisions = _THREAD.decisions - before
    if decisions:
        counts[__name__] = max(decisions, counts.get(__name__, 0))


@contextlib.contextmanager
def answering(counts: ProbeCounts) -> Iterator[None]:
    """Answer in the block as in a capture: it is one, or an eager run that replays are compared with.

    Values that follow from Python numbers are computed until as many decisions were made as in an eager run.
    """
    _watch()
    expected = counts.get(__name__, 0)
    values, before = KnownValues(), (_THREAD.values, _THREAD.decisions_left)
    _THREAD.values, _THREAD.decisions_left = values, expected
    if expected:
        values.follow()
    try:
        yield
    finally:
        _THREAD.values, _THREAD.decisions_left = before
        values.end()


def _answers() -> KnownValues | None:
    return None if _THREAD.values is None or _THREAD.values.inside_break else _THREAD.values


def _is_tracing(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_tracing(tensor: Any = None) -> bool:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return original(tensor)
        _THREAD.asked += tensor is not None
        values = _answers()
        return original(tensor) if values is None else tensor is not None and not values.knows(tensor)

    return is_tracing


def _is_compiling(original: Callable[[], bool]) -> Callable[[], bool]:
    """Let functions that transformers caches run uncached in captures if they are passed tensors.

    A cache would keep a graph's memory, and never find it again: it tells tensors apart by identity. Transformers asks
    if it is being compiled, and then leaves the cache alone.
    """

    def is_compiling() -> bool:
        if original():
            return True
        if _answers() is None:
            return False
        asking = sys._getframe(1).f_locals
        given = (*asking.get("args", ()), *asking.get("kwargs", {}).values())
        return bool(strided_tensors(given))  # in tuples, too

    return is_compiling


def _decision(original: Callable[..., Any]) -> Callable[..., Any]:
    def decide(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        asked, values = _THREAD.asked, _answers()
        # A position in a static cache, which some versions read without having asked.
        position = args[3] if original.__name__ == _DECIDING[0] and len(args) > 3 else None
        if values is not None and isinstance(position, Tensor) and not values.knows(position):
            return False
        decision = original(*args, **kwargs)
        if _THREAD.asked != asked:
            _THREAD.decisions += 1
            _THREAD.decisions_left -= 1
            if values is not None and not _THREAD.decisions_left:
                values.end()
        return decision

    return decide


_ASKING: dict[str, Callable[..., Any]] = {"is_tracing": _is_tracing, **dict.fromkeys(_DECIDING, _decision)}
# Modules that ask, where they are loaded. Not `torch_compilable_check`, which would read values next.
_REPLACED = {
    "pytorch_utils": {"is_torchdynamo_compiling": _is_compiling},
    **dict.fromkeys(("masking_utils", "modeling_attn_mask_utils"), _ASKING),
    **dict.fromkeys(("models.zamba.modeling_zamba", "models.pixio.modeling_pixio"), _ASKING),
}


# Device tensors that follow from Python numbers alone: their values, and reads of them in a capture.


class KnownValues(OperatorMode):  # type: ignore[no-untyped-call]
    """Computes on the CPU the tensors that a run derives from Python numbers alone, and serves reads of these tensors.

    In a capture most tensors have no values yet. These tensors do: they depend on the shapes of the run, as its Python
    does, and on nothing that a replay may change. Results of eager breaks may change at every replay, and are not
    known. A tensor that is written to is no longer known; writes that torch shows to no mode, such as a Triton
    kernel's, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage key: the storage, held so that no other gets its key, and the values by place in it.
        self._by_storage: dict[int, tuple[torch.UntypedStorage, dict[Hashable, Tensor]]] = {}
        self._recorder = ACTIVE.recorder
        self._follows = self._active = False

    @property
    def inside_break(self) -> bool:
        """True if an eager break is running, which no graph holds."""
        return ACTIVE.recorder is not self._recorder

    def knows(self, tensor: Tensor) -> bool:
        """True if reads of the tensor are served."""
        return type(tensor) is Tensor and tensor.layout is torch.strided and self._value(tensor) is not None

    def follow(self) -> None:
        """Follow the run from here on."""
        self._follows = self._active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop following the run, and forget all values. Call it again where the modes entered later have ended."""
        self._follows = False
        self._by_storage.clear()
        if self._active and innermost_mode() is self:
            self._active = False
            self.__exit__(None, None, None)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and compute it on the CPU if all its arguments are known."""
        kind = _kind(func) if self._follows and not self.inside_break else None
        if is_higher_order(func) or (kind is None and not self._by_storage):
            return defined(func(*args, **kwargs))
        tensors = strided_tensors((*args, *kwargs.values()))
        values = [value for value in map(self._value, tensors) if value is not None]
        if values and not self.inside_break:
            if func in _READS:
                with without_modes():
                    return func(values[0])
            if facts_of(func).is_composite:  # under inference_mode it comes whole
                return self.take_apart(func, args, kwargs)
        self._forget(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        if kind is not None and isinstance(result, Tensor) and 0 < result.numel() <= _MAX_ELEMENTS:
            self._learn(kind, func, args, kwargs, result)
        return defined(result)

    def _value(self, tensor: Tensor) -> Tensor | None:
        _, values = self._by_storage.get(storage_key(tensor), (None, {}))
        return values.get(_place(tensor))

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Forget the tensors that an operator writes to: all its tensors, unless the operator is torch's own."""
        is_torchs = func.namespace in ("aten", "prims", "prim")
        for tensor in strided_tensors(tuple(written_args(func, args, kwargs))) if is_torchs else tensors:
            self._by_storage.pop(storage_key(tensor), None)

    def _learn(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if kind in _ARITHMETIC and (result.is_floating_point() or result.is_complex()):
            return  # devices may round otherwise
        with without_modes():
            try:
                value = self._computed(kind, func, args, kwargs, result)
            except (KeyError, RuntimeError):  # not known, or no operator of the CPU's
                return
        if value.shape == result.shape and value.dtype is result.dtype:
            _, values = self._by_storage.setdefault(storage_key(result), (result.untyped_storage(), {}))
            values[_place(result)] = value

    def _computed(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
        if kind in _FILLED:
            return torch.full(result.shape, _FILLED[kind], dtype=result.dtype, device="cpu")
        named = {name: self._on_cpu(arg) for name, arg in kwargs.items() if name != "pin_memory"}
        named |= {"device": torch.device("cpu")} if "device" in named else {}
        value: Tensor = func(*map(self._on_cpu, args), **named)
        return value

    def _on_cpu(self, arg: Any) -> Any:
        """Return an argument with values for tensors.

        Raises:
            KeyError: a tensor is not known.
        """
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(self._on_cpu, arg))
        if not isinstance(arg, Tensor):
            return arg
        value = self._value(arg) if arg.layout is torch.strided else None
        if value is None:
            raise KeyError
        return value


def _place(tensor: Tensor) -> Hashable:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@functools.lru_cache(maxsize=4096)
def _kind(func: Any) -> str | None:
    """Return the name of an operator whose results are the same to the bit on all devices; None for others."""
    name = facts_of(func).name
    follows = name in _FILLED or name in _ARITHMETIC or name in _EXACT
    return name if follows and not any(arg.is_out for arg in func._schema.arguments) else None


@dataclasses.dataclass(eq=False)
class MaskDecisions(Probe):
    """Counts decisions on masks in eager runs, and makes the same decisions in recordings, if transformers is loaded.

    Args:
        counts: the probe counts of a table: the number of decisions of an eager run, which recordings must make, too.
    """

    counts: ProbeCounts

    @contextlib.contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Count decisions in an eager run that belongs to a graph; answer where a recording would be answered."""
        if "transformers" not in sys.modules:
            yield
            return
        counted = run.key is not None and not run.recorded
        with (
            counting(self.counts) if counted else contextlib.nullcontext(),
            answering(self.counts) if run.as_recorded else contextlib.nullcontext(),
        ):
            yield
