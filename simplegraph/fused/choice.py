"""Chooses the operators for a device: Triton's kernels after a trial of each, before anything is captured."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from simplegraph.base.collection import without_collections
from simplegraph.fused.first_use import (
    build_driver,
    import_triton,
    read_compiler,
    triton_starts,
)
from simplegraph.fused.torch_operators import (
    DTYPES,
    Adapted,
    Grouped,
    KernelTrial,
    Operators,
    RotaryWrite,
    sample_numbers,
)

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
    """Return a context that starts Triton in threads beside its body, if the module is on a GPU."""
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
    # Alone the second time: other threads that imported parts of Triton meanwhile may have been in the way.
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

    Nothing is compiled twice: a kernel's first trial compiles what its others share. Errors are reported by the trials
    themselves, which come after this.
    """
    new: dict[str, list[KernelTrial]] = {}
    for trial in trials:
        kernel, case = _TRIALS[trial.operator].kernel, (device, dtype, trial)
        if kernel and case not in _compiled:
            _compiled.add(case)
            new.setdefault(kernel, []).append(trial)
    chains = [[[trial] for trial in some] if _TRIALS[some[0].operator].variants else [some] for some in new.values()]
    if not chains:
        return
    read_compiler()  # else each of the threads would
    operators, this = _triton(), torch.cuda.current_stream(device) if torch.cuda.is_available() else None

    def run(some: Sequence[KernelTrial]) -> None:
        with torch.cuda.stream(this), torch.no_grad():  # the stream whose results this thread reads
            for trial in some:
                _run(operators, device, dtype, trial)

    threads = ThreadPoolExecutor(sum(map(len, chains)), "simplegraph-compile")
    with threads, contextlib.suppress(RuntimeError):  # no thread can be started
        begun = [(threads.submit(run, first), others) for first, *others in chains]
        for first, others in begun:
            for some in others if first.exception() is None else ():
                threads.submit(run, some)


@functools.cache
def _problem(device: torch.device, dtype: torch.dtype, trial: KernelTrial) -> str | None:
    """Say what is wrong with a kernel, and log it once; None if it is correct."""
    try:
        problem = find_error(_triton(), device, dtype, trial)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        _log.warning(
            "Triton's kernels do not run on %s, so torch's operators run instead: %s (%s)",
            device,
            problem,
            trial.operator,
        )
    return problem


def find_error(operators: Operators, device: torch.device, dtype: torch.dtype, trial: KernelTrial) -> str | None:
    """Say how an operator's results differ from torch's, which are computed on the CPU; None if they do not."""
    tried = _TRIALS[trial.operator]
    if not tried.kernel and dtype is torch.float32:
        return None  # torch's own, rounded to TF32 where the user allows that
    plain = torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), plain[0], plain[1]:
        results = _run(operators, device, dtype, trial)
        expected = _run(Operators(), _CPU, dtype, trial)
        # Torch rounds up to three times, and adds up in another order.
        tolerance = 0.0 if tried.exact else max(4 * torch.finfo(dtype).eps, 1e-5)
        for result, other in zip(results, expected, strict=True):
            if not torch.allclose(result.float(), other.float(), rtol=tolerance, atol=tolerance):
                return "its results differ from torch's"
    return None


_Numbers = Callable[..., Tensor]
_CPU = torch.device("cpu")


def _run(operators: Operators, device: torch.device, dtype: torch.dtype, trial: KernelTrial) -> Sequence[Tensor]:
    """Run a trial, and return its results on the CPU.

    Only the operator itself runs on the device: what torch runs there for the first time, it loads or compiles.
    """
    on_device: Any = operators if device.type == "cpu" else _OnDevice(operators, device)
    results = _TRIALS[trial.operator].run(on_device, functools.partial(sample_numbers, dtype), *trial.sizes)
    return [results] if isinstance(results, Tensor) else results


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

            result = getattr(self._operators, name)(*tree_map_only(Tensor, move, args))
            for tensor, moved in pairs:  # some are written in place
                tensor.copy_(moved)
            return tree_map_only(Tensor, Tensor.cpu, result)

        return run


def _image(numbers: _Numbers, *shape: int, phase: float = 0.0) -> Tensor:
    return numbers(*shape, phase=phase).contiguous(memory_format=torch.channels_last)


def _activated(numbers: _Numbers, channels: int, groups: int) -> Sequence[Grouped]:
    """Describe a group norm with its activation: alone, and with all that may be added before it."""
    weight, bias, row = (numbers(channels, phase=phase) for phase in (1, 2, 3))
    alone = Grouped(groups, 1e-5, weight, bias, kind="silu")
    return alone, alone._replace(row=row, added=numbers(2, channels, phase=4))


def _adapted(numbers: _Numbers, columns: int, *given: str) -> Adapted:
    """Describe a norm with the named tensors."""
    shapes = {"weight": (columns,), "bias": (columns,), "row": (columns,), "residual": (2, 3, columns)}
    tensors = {name: numbers(*shapes.get(name, (2, columns)), phase=phase) for phase, name in enumerate(given, 1)}
    return Adapted(1e-5, **tensors)


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


class _Trial(NamedTuple):
    """Describes the trial of an operator.

    Attributes:
        run: calls it, from operators, a function that makes numbers of a shape, and the sizes; returns its results.
        kernel: the kernel that the trial compiles; "" for a product that cuBLAS ends by itself, in half precision.
        variants: each trial compiles another variant of the kernel; else the sizes are arguments.
        exact: the results must be torch's to the bit.
    """

    run: Callable[..., Any]
    kernel: str
    variants: bool = False
    exact: bool = False


_TRIALS: Mapping[str, _Trial] = {
    "rms_norm": _Trial(
        lambda run, numbers, columns, offset=0: run.rms_norm(
            numbers(2, columns), numbers(columns, phase=1), 1e-5, float(offset)
        ),
        "norm",
        variants=True,
    ),
    "add_rms_norm": _Trial(
        lambda run, numbers, columns, offset=0: run.add_rms_norm(
            numbers(2, columns), numbers(2, columns, phase=2), numbers(columns, phase=1), 1e-5, float(offset)
        ),
        "norm",
        variants=True,
    ),
    "add_layer_norm": _Trial(
        lambda run, numbers, columns, biased=1: run.add_layer_norm(
            numbers(2, columns),
            numbers(2, columns, phase=2),
            numbers(columns, phase=1),
            numbers(columns, phase=3) if biased else None,
            1e-5,
        ),
        "norm",
        variants=True,
    ),
    "gated_rms_norm": _Trial(
        lambda run, numbers, columns: run.gated_rms_norm(
            numbers(2, columns), numbers(2, columns, phase=2), numbers(columns, phase=1), 1e-5
        ),
        "norm",
        variants=True,
    ),
    "group_norm": _Trial(
        lambda run, numbers, channels, groups: run.group_norm(
            _image(numbers, 2, channels, 3, 2),
            Grouped(groups, 1e-5, numbers(channels, phase=1), numbers(channels, phase=2)),
        ),
        "group_norm",
    ),
    "activated_group_norm": _Trial(
        lambda run, numbers, channels, groups: [
            run.group_norm(_image(numbers, 2, channels, 3, 2), norm) for norm in _activated(numbers, channels, groups)
        ],
        "group_norm",
    ),
    "adapt": _Trial(
        lambda run, numbers, columns, *given: run.adapt(numbers(2, 3, columns), _adapted(numbers, columns, *given)),
        "adapt",
        variants=True,
    ),
    "linears": _Trial(
        lambda run, numbers, inputs, biased, kind="": run.linears(
            numbers(1, 1, inputs),
            [numbers(size, inputs, phase=size) / inputs for size in ((4, 4) if kind else (4, 5, 6))],
            [numbers(size, phase=2) if biased else None for size in ((4, 4) if kind else (4, 5, 6))],
            kind,
        ),
        "linears",
        variants=True,
    ),
    "attend": _Trial(
        lambda run, numbers, group, elements, masked, keys: run.attend(
            numbers(2, 2 * group, 1, elements, phase=2 * group),
            *(numbers(2, 2, keys, elements, phase=2) for _ in range(2)),
            (numbers(2, 1, 1, keys) > 0) if masked else None,
            None,
            0.5,
        ),
        "attend",
        variants=True,
    ),
    "linear_gelu": _Trial(
        lambda run, numbers, inputs, outputs: run.linear_gelu(
            numbers(2, 3, inputs), numbers(outputs, inputs, phase=1) / inputs, numbers(outputs, phase=2)
        ),
        "",
    ),
    "finish": _Trial(
        lambda run, numbers, kind, added=0, scaled=0: run.finish(
            _image(numbers, 2, 16, 3, 2),
            numbers(16, phase=1).float() if scaled else numbers(16, phase=1),
            _image(numbers, 2, 16, 3, 2, phase=2) if added else None,
            kind,
            numbers(16, phase=3).float() if scaled else None,
        ),
        "finish",
    ),
    "pointwise": _Trial(
        lambda run, numbers, kind: run.pointwise(
            _image(numbers, 2, 16, 3, 2), numbers(32, 16, 1, 1, phase=1) / 16, numbers(32, phase=2), kind
        ),
        "",
    ),
    "depthwise": _Trial(
        lambda run, numbers, size: [
            run.depthwise(
                _image(numbers, 2, 16, size + 1, size),
                numbers(size, size, 1, 16, phase=1).permute(3, 2, 0, 1) / size**2,
                numbers(16, phase=2),
                stride,
                size // 2,
                kind,
            )
            for stride, kind in ((1, "silu"), (2, ""))
        ],
        "depthwise",
        variants=True,
    ),
    "excite": _Trial(
        lambda run, numbers, channels, squeezed, kind: run.excite(
            numbers(2, channels),
            (numbers(squeezed, channels, phase=1) / channels, numbers(squeezed, phase=2)),
            (numbers(channels, squeezed, phase=3), numbers(channels, phase=4)),
            kind,
        ),
        "excite",
    ),
    "gated": _Trial(
        lambda run, numbers, columns, kind: run.gated(numbers(2, columns), numbers(2, columns, phase=1), kind), "gated"
    ),
    "rotate": _Trial(
        lambda run, numbers, elements: run.rotate(
            *(numbers(1, 1, 1, elements, phase=phase) for phase in (0, 1)),
            *(numbers(1, 1, elements, phase=phase) for phase in (2, 3)),
        ),
        "rotate",
        variants=True,
        exact=True,
    ),
    "rotate_and_write": _Trial(_rotate_and_write, "rotate_and_write", variants=True),
    "write_pages": _Trial(_write_pages, "write_pages", variants=True, exact=True),
}
_compiled: set[tuple[torch.device, torch.dtype, KernelTrial]] = set()
