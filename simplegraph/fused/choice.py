"""Chooses the operators for a device: Triton's kernels after a trial of each, before anything is captured."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from simplegraph.device.cuda.first_use import without_collections
from simplegraph.device.cuda.triton_start import (
    build_driver,
    import_triton,
    read_compiler,
    triton_starts,
)
from simplegraph.fused.torch_operators import DTYPES, Adapted, Grouped, KernelTrial, Operators, RotaryWrite

_log = logging.getLogger("simplegraph")


def operators_for(device: torch.device, dtype: torch.dtype, trials: Collection[KernelTrial]) -> Operators:
    """Return Triton's operators if every trial compiles, runs and is correct; else torch's, and log why.

    A trial takes 0.05 to 0.35 s the first time on a machine. Different kernels are compiled side by side.

    Args:
        device: of the tensors.
        dtype: of the tensors.
        trials: the operators that will run, with their sizes.
    """
    if dtype not in DTYPES or not triton_runs(device):
        return Operators()
    trials = list(dict.fromkeys(trials))
    with without_collections():
        _compile(device, dtype, trials)
        correct = all(_problem(device, dtype, trial) is None for trial in trials)
    return _triton() if correct else Operators()


def chosen_operators(*, triton: bool) -> Operators:
    """Return Triton's operators, or torch's."""
    return _triton() if triton else Operators()


def starting_triton(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Start Triton in threads beside what runs in the context, if the module is on a GPU."""
    weight = next(module.parameters(), None)
    on_gpu = weight is not None and weight.device.type == "cuda"
    return triton_starts() if on_gpu else contextlib.nullcontext()


def triton_runs(device: torch.device) -> bool:
    """True if the device is a GPU, and Triton is installed and can launch kernels; if it cannot, logs why once.

    Every launch needs a module in C, which Triton compiles at its first use on a machine.
    """
    return device.type == "cuda" and _has_launcher()


@functools.cache
def _has_launcher() -> bool:
    problem: Exception | None = None
    # Alone the second time: what other threads of the program import of Triton meanwhile may have been in the way.
    for start in (triton_starts, contextlib.nullcontext):
        try:
            with start():
                build_driver()
                return import_triton("runtime.driver").driver.active is not None
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "triton":
                return False
            problem = error
    _log.warning("Triton cannot launch kernels, so torch's operators run instead: %s", problem)
    return False


@functools.cache
def _triton() -> Operators:
    from simplegraph.fused.triton_operators import TritonOperators

    return TritonOperators()


def _compile(device: torch.device, dtype: torch.dtype, trials: Iterable[KernelTrial]) -> None:
    """Run the kernels of trials that are new, in threads, so that they are compiled side by side.

    Nothing is compiled by two of them: a kernel's first trial compiles what the others share. The trials themselves,
    which come after this, say what went wrong.
    """
    new: dict[str, list[KernelTrial]] = {}
    for trial in trials:
        kernel, known = _KERNELS.get(trial.operator), (device, dtype, trial)
        if kernel is not None and known not in _compiled:
            _compiled.add(known)
            new.setdefault(kernel, []).append(trial)
    chains = [[[each] for each in some] if kernel in _VARIANTS else [some] for kernel, some in new.items()]
    if not chains:
        return
    read_compiler()  # else each of the threads does
    operators, on_stream = _triton(), _this_stream(device)

    def run(some: Sequence[KernelTrial]) -> None:
        with on_stream(), torch.no_grad():
            for trial in some:
                _run(operators, device, dtype, trial)

    threads = ThreadPoolExecutor(sum(map(len, chains)), "simplegraph-compile")
    with threads, contextlib.suppress(RuntimeError):  # of threads that cannot be started
        begun = [(threads.submit(run, first), others) for first, *others in chains]
        for first, others in begun:
            for some in others if first.exception() is None else ():
                threads.submit(run, some)


def _this_stream(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a context for threads that run what this thread reads."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext
    return functools.partial(torch.cuda.stream, torch.cuda.current_stream(device))


@functools.cache
def _problem(device: torch.device, dtype: torch.dtype, trial: KernelTrial) -> str | None:
    """Say what is wrong with a kernel, and log it once; None if it is correct."""
    try:
        found = find_error(_triton(), device, dtype, trial)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found is not None:
        _log.warning(
            "Triton's kernels do not run on %s, so torch's operators run instead: %s (%s)",
            device,
            found,
            trial.operator,
        )
    return found


def find_error(operators: Operators, device: torch.device, dtype: torch.dtype, trial: KernelTrial) -> str | None:
    """Say how an operator's results differ from torch's, which are computed on the CPU; None if they do not."""
    _, exact, wrong = _TRIALS[trial.operator]
    if trial.operator in _PRODUCTS and dtype is torch.float32:
        return None  # torch's own, rounded to TF32 where the user allows that
    plain = torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), plain[0], plain[1]:
        found = _run(operators, device, dtype, trial)
        expected = _run(Operators(), _CPU, dtype, trial)
        # Torch rounds up to three times, and adds up in another order.
        tolerance = 0.0 if exact else max(4 * torch.finfo(dtype).eps, 1e-5)
        for one, other in zip(found, expected, strict=True):
            if not torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance):
                return wrong
    return None


_Numbers = Callable[..., Tensor]
_CPU = torch.device("cpu")


def _run(operators: Operators, device: torch.device, dtype: torch.dtype, trial: KernelTrial) -> Sequence[Tensor]:
    """Run a trial, and return its results on the CPU.

    Only the operator itself runs on the device: what torch runs there for the first time, it loads or compiles.
    """
    on_device: Any = operators if device.type == "cpu" else _OnDevice(operators, device)
    return _TRIALS[trial.operator][0](on_device, functools.partial(_numbers, dtype), *trial.sizes)


class _OnDevice:
    """Runs operators on a device, with tensors of the CPU."""

    def __init__(self, operators: Operators, device: torch.device) -> None:
        self._operators, self._device = operators, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            pairs: list[tuple[Tensor, Tensor]] = []

            def move(tensor: Tensor) -> Tensor:
                pairs.append((tensor, tensor.to(self._device)))
                return pairs[-1][1]

            found = getattr(self._operators, name)(*tree_map_only(Tensor, move, args))
            for tensor, moved in pairs:  # some are written in place
                tensor.copy_(moved)
            return tree_map_only(Tensor, Tensor.cpu, found)

        return run


def _numbers(dtype: torch.dtype, *shape: int, phase: float = 0.0) -> Tensor:
    """Make numbers between -1 and 1. They are not random: the user's generators must not advance."""
    count = torch.Size(shape).numel()
    places = torch.arange(count, dtype=torch.float32, device=_CPU)  # the default dtype may be one of too few digits
    return torch.cos(1.7 * places + 0.3 + phase).to(dtype).view(shape)


def _rms_norm(operators: Operators, numbers: _Numbers, columns: int, offset: int = 0) -> Sequence[Tensor]:
    return [operators.rms_norm(numbers(2, columns), numbers(columns, phase=1), 1e-5, float(offset))]


def _add_rms_norm(operators: Operators, numbers: _Numbers, columns: int, offset: int = 0) -> Sequence[Tensor]:
    x, residual = numbers(2, columns), numbers(2, columns, phase=2)
    return operators.add_rms_norm(x, residual, numbers(columns, phase=1), 1e-5, float(offset))


def _add_layer_norm(operators: Operators, numbers: _Numbers, columns: int, biased: int = 1) -> Sequence[Tensor]:
    x, residual, bias = numbers(2, columns), numbers(2, columns, phase=2), numbers(columns, phase=3)
    return operators.add_layer_norm(x, residual, numbers(columns, phase=1), bias if biased else None, 1e-5)


def _group_norm(operators: Operators, numbers: _Numbers, channels: int, groups: int) -> Sequence[Tensor]:
    x = numbers(2, channels, 3, 2).contiguous(memory_format=torch.channels_last)
    weight, bias = numbers(channels, phase=1), numbers(channels, phase=2)
    return [operators.group_norm(x, Grouped(groups, 1e-5, weight, bias))]


def _activated_group_norm(operators: Operators, numbers: _Numbers, channels: int, groups: int) -> Sequence[Tensor]:
    x = numbers(2, channels, 3, 2).contiguous(memory_format=torch.channels_last)
    weight, bias, row = (numbers(channels, phase=phase) for phase in (1, 2, 3))
    norm = Grouped(groups, 1e-5, weight, bias, row, numbers(2, channels, phase=4), "silu")
    return [operators.group_norm(x, each) for each in (norm._replace(row=None, added=None), norm)]


def _adapt(operators: Operators, numbers: _Numbers, columns: int, *given: str) -> Sequence[Tensor]:
    """Try it with the named tensors."""
    shapes = {"weight": (columns,), "bias": (columns,), "row": (columns,), "residual": (2, 3, columns)}
    tensors = {name: numbers(*shapes.get(name, (2, columns)), phase=phase) for phase, name in enumerate(given, 1)}
    normed, total = operators.adapt(numbers(2, 3, columns), Adapted(1e-5, **tensors))
    return [normed, *([total] if "residual" in given else [])]


def _linears(operators: Operators, numbers: _Numbers, inputs: int, count: int, biased: int) -> Sequence[Tensor]:
    weights = [numbers(4 + layer, inputs, phase=1 + layer) / inputs for layer in range(count)]
    biases = [numbers(len(weight), phase=2) if biased else None for weight in weights]
    return operators.linears(numbers(1, 1, inputs), weights, biases)


def _attend(operators: Operators, numbers: _Numbers, group: int, elements: int, masked: int) -> Sequence[Tensor]:
    q, k, v = (numbers(2, heads, keys, elements, phase=heads) for heads, keys in ((2 * group, 1), (2, 300), (2, 300)))
    mask = (numbers(2, 1, 1, 300) > 0) if masked else None
    return [operators.attend(q, k, v, mask, None, 0.5)]  # of few keys: the mean of many is nearly zero


def _linear_gelu(operators: Operators, numbers: _Numbers, inputs: int, outputs: int) -> Sequence[Tensor]:
    weight, bias = numbers(outputs, inputs, phase=1) / inputs, numbers(outputs, phase=2)
    return [operators.linear_gelu(numbers(2, 3, inputs), weight, bias)]


def _finish(operators: Operators, numbers: _Numbers, kind: str, added: int = 0, scaled: int = 0) -> Sequence[Tensor]:
    x, residual = (numbers(2, 16, 3, 2, phase=at).contiguous(memory_format=torch.channels_last) for at in (0, 2))
    bias, factor = numbers(16, phase=1), None
    if scaled:
        bias, factor = bias.float(), numbers(16, phase=3).float()
    return [operators.finish(x, bias, residual if added else None, kind, factor)]


def _pointwise(operators: Operators, numbers: _Numbers, kind: str) -> Sequence[Tensor]:
    x = numbers(2, 16, 3, 2).contiguous(memory_format=torch.channels_last)
    return [operators.pointwise(x, numbers(32, 16, 1, 1, phase=1) / 16, numbers(32, phase=2), kind)]


def _depthwise(operators: Operators, numbers: _Numbers, size: int) -> Sequence[Tensor]:
    x = numbers(2, 16, size + 1, size).contiguous(memory_format=torch.channels_last)
    weight, bias = numbers(size, size, 1, 16, phase=1).permute(3, 2, 0, 1) / size**2, numbers(16, phase=2)
    return [operators.depthwise(x, weight, bias, stride, size // 2, kind) for stride, kind in ((1, "silu"), (2, ""))]


def _excite(operators: Operators, numbers: _Numbers, channels: int, squeezed: int, kind: str) -> Sequence[Tensor]:
    narrow = numbers(squeezed, channels, phase=1) / channels, numbers(squeezed, phase=2)
    wide = numbers(channels, squeezed, phase=3), numbers(channels, phase=4)
    return [operators.excite(numbers(2, channels), narrow, wide, kind)]


def _gated(operators: Operators, numbers: _Numbers, columns: int, kind: str) -> Sequence[Tensor]:
    return [operators.gated(numbers(2, columns), numbers(2, columns, phase=1), kind)]


def _rotate(operators: Operators, numbers: _Numbers, elements: int) -> Sequence[Tensor]:
    q, k, cos, sin = (numbers(1, elements, phase=phase) for phase in range(4))
    shape = (1, 1, 1, elements)
    return operators.rotate(q.view(shape), k.view(shape), cos.unsqueeze(0), sin.unsqueeze(0))


def _rotate_and_write(
    operators: Operators, numbers: _Numbers, heads: int, kv_heads: int, elements: int, page_size: int, normed: int
) -> Sequence[Tensor]:
    qkv = numbers(3, heads + 2 * kv_heads, elements)
    pages = qkv.new_zeros(2, 3, page_size, kv_heads, elements)  # the last page is scratch, where rows without slots go
    norms = (numbers(elements, phase=1), numbers(elements, phase=2)) if normed else None
    positions, slots = (torch.tensor(row, device=qkv.device) for row in ([1, 0, 2], [2 * page_size - 1, -1, 0]))
    table = numbers(3, elements, phase=3).float()
    cached = RotaryWrite(positions, table, (pages[0], pages[1]), slots, heads, norms, 1e-5)
    operators.rotate_and_write(qkv, cached)
    return qkv[:, :heads], pages[:, :2]


def _write_pages(operators: Operators, numbers: _Numbers, elements: int, layout: str) -> Sequence[Tensor]:
    k, v = numbers(2, 1, elements), numbers(2, 1, elements, phase=1)
    pages = k.new_zeros(2, 2, *((2, 1) if layout == "NHD" else (1, 2)), elements)
    operators.write_pages(k, v, (pages[0], pages[1]), torch.tensor([1, -1], device=k.device), layout)
    return [pages[:, :1]]


# The kernel that an operator's trial compiles; those of cuBLAS and cuDNN are not among them.
_KERNELS: Mapping[str, str] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "add_layer_norm"), "norm"),
    **dict.fromkeys(("group_norm", "activated_group_norm"), "group_norm"),
    **{name: name for name in ("adapt", "linears", "attend", "finish", "depthwise", "excite", "gated")},
    **{name: name for name in ("rotate", "rotate_and_write", "write_pages")},
}
# Kernels of which each trial compiles another variant; for the others sizes are arguments.
_VARIANTS = frozenset({"norm", "adapt", "linears", "attend", "depthwise", "rotate", "rotate_and_write", "write_pages"})
_PRODUCTS = frozenset({"linear_gelu", "pointwise"})  # cuBLAS ends these by itself, in half precision
_compiled: set[tuple[torch.device, torch.dtype, KernelTrial]] = set()

# How an operator is tried, if its results must be torch's to the bit, and what is wrong if they are not as expected.
_TRIALS: Mapping[str, tuple[Callable[..., Sequence[Tensor]], bool, str]] = {
    "rms_norm": (_rms_norm, False, "the norm's results differ from torch's"),
    "add_rms_norm": (_add_rms_norm, False, "the results of sum and norm differ from torch's"),
    "add_layer_norm": (_add_layer_norm, False, "the results of sum and norm differ from torch's"),
    "group_norm": (_group_norm, False, "the norm's results differ from torch's"),
    "activated_group_norm": (_activated_group_norm, False, "the norm's results differ from torch's"),
    "adapt": (_adapt, False, "the norm's results differ from torch's"),
    "linears": (_linears, False, "linear layers of one row differ from torch's"),
    "attend": (_attend, False, "attention of one query differs from torch's"),
    "linear_gelu": (_linear_gelu, False, "the activation's results differ from torch's"),
    "finish": (_finish, False, "a biased and activated image differs from torch's"),
    "pointwise": (_pointwise, False, "a convolution of pixels differs from torch's"),
    "depthwise": (_depthwise, False, "a depthwise convolution differs from torch's"),
    "excite": (_excite, False, "the factors of channels differ from torch's"),
    "gated": (_gated, False, "the gated activation's results differ from torch's"),
    "rotate": (_rotate, True, "the rotary embedding's products are not rounded as torch's are"),
    "rotate_and_write": (_rotate_and_write, False, "the cache does not hold the keys and values that were written"),
    "write_pages": (_write_pages, True, "the cache does not hold the keys and values that were written"),
}
