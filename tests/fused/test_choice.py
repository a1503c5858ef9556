"""Triton's kernels are tried before they are used, and torch's operators serve where they fail."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreted import EXACT_DTYPES, needs_triton
from stand_ins import TRIALS, Device, Kernels, move_to_devices, stand_in_kernels
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from simplegraph.fused import choice
from simplegraph.fused.choice import operators_for
from simplegraph.fused.torch_operators import Adapted, Grouped, KernelTrial, Operators, RotaryWrite

MORE_TRIALS = [("rotate", (2,)), ("rotate", (80,)), ("rms_norm", (4096,)), ("finish", ("relu", 1, 1))]


class WrongKernels(Kernels):
    def norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Any, eps: float, **settings: Any) -> Any:
        return super().norm(x, residual, weight, bias, 0.1, **settings)

    def linear(self, x: Tensor, weights: Any, biases: Any) -> list[Tensor]:
        return super().linear(x, weights, [biases[0], *(None for _ in biases[1:])])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any) -> Tensor:
        return super().attend(q, k, v, mask.logical_not(), *rest)

    def gated(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        return super().gated(gate, up, "silu")

    def group_norm(self, x: Tensor, norm: Grouped) -> Tensor:
        return super().group_norm(x, norm._replace(groups=1))

    def adapt(self, x: Tensor, norm: Adapted) -> tuple[Tensor, Tensor]:
        return super().adapt(x, norm._replace(shift=norm.scale))

    def finish(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any) -> Tensor:
        return super().finish(x, bias, None, *rest)

    def depthwise(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, kind: str) -> Tensor:
        return super().depthwise(x, weight.flip(2), bias, stride, padding, kind)

    def excite(self, means: Tensor, narrow: Any, wide: Any, kind: str) -> Tensor:
        return super().excite(means, narrow, (wide[0], -wide[1]), kind)

    def rotate(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Round once."""
        wide = super().rotate(*(tensor.double() for tensor in tensors))
        return tuple(tensor.to(tensors[0].dtype) for tensor in wide)

    def rotate_and_write(self, qkv: Tensor, cached: RotaryWrite) -> None:
        """Swap the halves of a head."""
        super().rotate_and_write(qkv, cached)
        qkv.copy_(torch.cat(qkv.chunk(2, dim=-1)[::-1], dim=-1))

    def write_pages(self, k: Tensor, v: Tensor, *rest: Any) -> None:
        super().write_pages(k, k, *rest)


class Uncompiled:
    MAX_COLUMNS = MAX_SIZE = MAX_SQUEEZED = MAX_WINDOW = MAX_ELEMENTS = 64

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Failed to find C compiler")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    move_to_devices(monkeypatch)


@pytest.mark.parametrize("operator", TRIALS)
@pytest.mark.parametrize("wrong", [WrongKernels, Uncompiled])
def test_where_a_kernel_fails_or_answers_otherwise_torch_s_operators_serve(
    operator: str, wrong: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trials: list[Any] = [KernelTrial(name, sizes) for name, sizes in TRIALS.items()]
    stand_in_kernels(monkeypatch, Kernels())
    assert operators_for(Device(), torch.bfloat16, trials).name == "Triton"
    assert not caplog.text
    stand_in_kernels(monkeypatch, wrong())
    trial = KernelTrial(operator, TRIALS[operator])
    assert operators_for(Device(), torch.bfloat16, [trial]).name == "torch"
    assert "cuda:7" in caplog.text
    assert operator in caplog.text
    assert ("C compiler" in caplog.text) is (wrong is Uncompiled)
    assert caplog.handler.level <= logging.WARNING


def test_without_a_compiler_one_line_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = choice._problem
    stand_in_kernels(monkeypatch, Uncompiled())
    monkeypatch.setattr(choice, "_problem", known)
    device = Device()
    for _ in range(2):
        assert not operators_for(device, torch.float16, [KernelTrial(*each) for each in TRIALS.items()]).triton
    assert len(caplog.records) == 1


class Driver(ModuleType):
    """Triton's, on a machine without a C compiler."""

    @property
    def driver(self) -> Any:
        return self

    @property
    def active(self) -> Any:
        raise RuntimeError("Failed to find C compiler")


def test_where_triton_can_launch_nothing_no_kernel_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.driver", Driver("triton.runtime.driver"))
    monkeypatch.setattr(choice, "find_error", lambda *args: pytest.fail("it was tried"))
    choice._has_launcher.cache_clear()
    try:
        for _ in range(2):
            assert not choice.triton_runs(Device())
            assert not operators_for(Device(), torch.float16, [KernelTrial("rms_norm", (8,))]).triton
    finally:
        choice._has_launcher.cache_clear()
    assert [record.message for record in caplog.records] == [
        "Triton cannot launch kernels, so torch's operators run instead: Failed to find C compiler"
    ]
    assert not choice.triton_runs(torch.device("cpu"))


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize("trial", [*TRIALS.items(), *MORE_TRIALS])
def test_the_kernels_pass_their_own_trial(
    dtype: torch.dtype, trial: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert choice.find_error(choice.chosen_operators(triton=True), device, dtype, KernelTrial(*trial)) is None


def test_a_trial_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    for trial in TRIALS.items():
        assert choice.find_error(Operators(), torch.device("cpu"), torch.float32, KernelTrial(*trial)) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_runs_nothing_of_torch_on_the_device_but_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of torch's kernels is loaded or compiled at its first use there, up to 0.3 s for a convolution's."""
    on_device: list[Tensor] = []  # kept, so that their addresses stay theirs
    seen: set[str] = set()
    to = Tensor.to

    def move(x: Tensor, *args: Any) -> Tensor:
        found = to(x, *args)
        on_device.extend([found] if isinstance(args[0], Device) else [])
        return found

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with DisableTorchFunction():
                places = {each.data_ptr() for each in on_device}
                given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
                seen.update([function.__name__] if any(each.data_ptr() in places for each in given) else [])
                return function(*args, **kwargs or {})

    class OnDevice(Operators):
        def __getattribute__(self, name: str) -> Any:
            def run(*args: Any) -> Any:
                with DisableTorchFunction():
                    return getattr(Operators(), name)(*args)

            return run

    monkeypatch.setattr(Tensor, "to", move)
    with Watched():
        for trial in TRIALS.items():
            assert choice.find_error(OnDevice(), Device(), torch.bfloat16, KernelTrial(*trial)) is None
    assert len(on_device) > len(TRIALS)
    assert seen == {"copy_"}  # what is written in place comes back


def test_a_trial_under_autocast_says_nothing_wrong_of_a_kernel() -> None:
    class ByHand(Operators):
        def linears(self, x: Tensor, weights: Any, biases: Any, kind: str = "") -> list[Tensor]:
            return [(x * each).sum(-1).view(1, 1, -1) for each in weights]

    trial = KernelTrial("linears", (64, 0))
    with torch.autocast("cpu", torch.bfloat16):
        assert choice.find_error(ByHand(), torch.device("cpu"), torch.float32, trial) is None
        assert torch.is_autocast_enabled("cpu")


def test_a_default_dtype_of_few_digits_says_nothing_wrong_of_a_kernel() -> None:
    cpu, before = torch.device("cpu"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)  # in which what the trial's numbers are counted by overflows
    try:
        assert choice.find_error(Operators(), cpu, torch.float16, KernelTrial("linears", (20_000, 1))) is None
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("trial", [("pointwise", ("relu",)), ("linear_gelu", (64, 32))])
def test_products_that_a_gpu_rounds_to_tf32_say_nothing_wrong_of_kernels(trial: tuple[str, Any]) -> None:
    class Rounded(Operators):
        def pointwise(self, x: Tensor, *rest: Any) -> Tensor:
            return Operators().pointwise(x * (1 + 2**-11), *rest)

        def linear_gelu(self, x: Tensor, *rest: Any) -> Tensor:
            return Operators().linear_gelu(x * (1 + 2**-11), *rest)

    assert choice.find_error(Rounded(), Device(), torch.float32, KernelTrial(*trial)) is None  # type: ignore[arg-type]


def test_a_cpu_is_not_asked_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_error", lambda *args: pytest.fail("it was tried"))
    assert not operators_for(torch.device("cpu"), torch.float32, [KernelTrial("rms_norm", (8,))]).triton
