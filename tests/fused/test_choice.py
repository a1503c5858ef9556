"""Triton's kernels are tried before they are used, and torch's operators serve where they fail."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import EXACT_DTYPES, needs_triton, stand_in_kernels
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from simplegraph.fused import choice
from simplegraph.fused.choice import operators_for
from simplegraph.fused.operators import ACTIVATIONS, Adapted, Grouped, KernelTrial, Operators, RotaryWrite
from simplegraph.graph.cuda import triton_start

TRIALS = {
    "rms_norm": (64, 1),
    "add_rms_norm": (64,),
    "add_layer_norm": (64,),
    "group_norm": (16, 4),
    "activated_group_norm": (16, 4),
    "adapt": (64, "gate", "residual", "scale", "shift"),
    "finish": ("silu", 1),
    "depthwise": (3,),
    "excite": (32, 8, "relu"),
    "linears": (100, 3, 1),
    "attend": (2, 16, 1),
    "gated": (64, "gelu_tanh"),
    "rotate": (64,),
    "rotate_and_write": (4, 2, 16, 8, 1),
    "write_pages": (64, "HND"),
}


class Kernels:
    """Stands in for Triton's kernels, by torch's operators."""

    MAX_COLUMNS = MAX_SIZE = MAX_SQUEEZED = MAX_WINDOW = MAX_ELEMENTS = 64
    MOST_TOGETHER = 3
    torch = Operators()

    def norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        offset: float = 0.0,
        centered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        if centered:
            return F.layer_norm(total, weight.shape, weight, bias, eps), total
        return F.rms_norm(total.float(), weight.shape, weight.float() + offset, eps).type_as(x), total

    def group_norm(self, x: Tensor, norm: Grouped) -> Tensor:
        return self.torch.group_norm(x, norm)

    def adapt(self, x: Tensor, norm: Adapted) -> tuple[Tensor, Tensor]:
        return self.torch.adapt(x, norm)

    def finish(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any) -> Tensor:
        return self.torch.finish(x, bias, residual, *rest)

    def depthwise(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, kind: str) -> Tensor:
        return self.torch.depthwise(x, weight, bias, stride, padding, kind)

    def excite(self, means: Tensor, narrow: Any, wide: Any, kind: str) -> Tensor:
        return self.torch.excite(means, narrow, wide, kind)

    def linear(self, *given: Any) -> list[Tensor]:
        return self.torch.linears(*given)

    def attend(self, *given: Any) -> Tensor:
        return self.torch.attend(*given)

    def gated(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        return (ACTIVATIONS[kind](gate.float()) * up).to(gate.dtype)

    def rotate(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.torch.rotate(*tensors)

    def rotate_and_write(self, qkv: Tensor, cached: RotaryWrite) -> None:
        self.torch.rotate_and_write(qkv, cached)

    def write_pages(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *rest: Any) -> None:
        self.torch.write_pages(k, v, (keys, values), slots, rest[-1])


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


class Device:
    """A GPU, as far as the question goes."""

    type = "cuda"

    def __str__(self) -> str:
        return "cuda:7"


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    to = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda x, *args: x.clone() if isinstance(args[0], Device) else to(x, *args))


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
@pytest.mark.parametrize("trial", [*TRIALS.items(), ("rotate", (2,)), ("rotate", (80,)), ("rms_norm", (4096,))])
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
        def linears(self, x: Tensor, weights: Any, biases: Any) -> list[Tensor]:
            return [(x * each).sum(-1).view(1, 1, -1) for each in weights]

    trial = KernelTrial("linears", (64, 2, 0))
    with torch.autocast("cpu", torch.bfloat16):
        assert choice.find_error(ByHand(), torch.device("cpu"), torch.float32, trial) is None
        assert torch.is_autocast_enabled("cpu")


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


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    stand_in_kernels(monkeypatch, kernels)
    return kernels


def test_kernels_are_compiled_side_by_side_and_each_by_one_thread(
    stands_in: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = [KernelTrial("rms_norm", (64, 1)), KernelTrial("add_layer_norm", (64,))]
    gates = [KernelTrial("gated", (64, kind)) for kind in ("silu", "gelu")]
    threads: dict[str, list[Any]] = {"norm": [], "gated": []}
    both = threading.Barrier(2, timeout=20)  # passed only if both kernels run at once
    here = threading.current_thread()
    for name, seen in threads.items():
        kernel = getattr(stands_in, name)

        def run(*args: Any, kernel: Any = kernel, seen: Any = seen, **settings: Any) -> Any:
            if not seen:
                both.wait()
            seen.append(threading.current_thread())
            return kernel(*args, **settings)

        monkeypatch.setattr(stands_in, name, run, raising=False)
    device, alive = Device(), threading.active_count()
    for _ in range(2):  # the second time nothing is new
        assert operators_for(device, torch.float16, [*norms, *gates, *norms]).triton
    assert threading.active_count() == alive
    compiled = {name: [each for each in seen if each is not here] for name, seen in threads.items()}
    assert {name: len(each) for name, each in compiled.items()} == {"norm": 2, "gated": 2}
    assert len(set(compiled["gated"])) == 1  # one variant: the second trial finds it
    assert compiled["norm"][0] is not compiled["gated"][0]


def test_without_threads_kernels_are_tried_one_after_the_other(
    stands_in: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    trials = [KernelTrial(*each) for each in TRIALS.items()]
    assert operators_for(Device(), torch.float16, trials).triton


def test_triton_starts_once_beside_other_work_and_a_failure_is_left_to_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def fail() -> None:
        ran.append("driver")
        raise RuntimeError("Failed to find C compiler")

    release = threading.Event()

    def read() -> None:
        release.wait(20)
        ran.append("compiler")

    monkeypatch.setattr(triton_start, "build_driver", triton_start._Once(fail))
    monkeypatch.setattr(triton_start, "read_compiler", triton_start._Once(read))
    for _ in range(2):
        with triton_start.triton_starts():
            release.set()  # the threads run beside this
        assert sorted(ran) == ["compiler", "driver"]


class Launchers(ModuleType):
    """Triton's settings and driver; no launcher is made before a kernel is compiled."""

    def __init__(self) -> None:
        super().__init__("triton")
        self.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
        self.driver = SimpleNamespace(active=self)
        self.made: list[tuple[Any, ...]] = []
        self.compiled = threading.Event()

    def launcher_cls(self, source: tuple[Any, ...], metadata: Any) -> None:
        assert self.compiled.wait(20)  # beside the kernel: else nobody sets it
        assert metadata.tensordesc_meta is None
        self.made.append(source)

    def compile(self, *constants: int) -> None:
        """Compile a kernel as Triton does."""
        if self.knobs.runtime.jit_cache_hook is not None:
            fn = SimpleNamespace(jit_function=SimpleNamespace(ASTSource=lambda *given: given[1:]))
            given = {"signature": {"x": "*bf16"}, "constants": constants, "configs": ["aligned"], "num_warps": 4}
            assert not self.knobs.runtime.jit_cache_hook(fn=fn, compile=given, key="", already_compiled=False)
        self.compiled.set()


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Launchers:
    found = Launchers()
    for name in ("triton", "triton.runtime", "triton.runtime.driver"):
        monkeypatch.setitem(sys.modules, name, found)
    return found


def test_a_kernel_s_launcher_is_compiled_beside_it(
    launchers: Launchers, stands_in: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
        launchers.compile(len(kind))
        return Kernels.gated(stands_in, gate, up, kind)

    monkeypatch.setattr(stands_in, "gated", gated, raising=False)
    assert operators_for(Device(), torch.float16, [KernelTrial("gated", (32, "silu"))]).triton
    assert launchers.made == [({"x": "*bf16"}, (4,), "aligned")]
    assert launchers.knobs.runtime.jit_cache_hook is None


def test_a_launcher_that_cannot_be_compiled_early_is_left_to_triton(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(launchers, "launcher_cls", fail)
    with triton_start.launchers_start():
        launchers.compile(1)
    settings = launchers.knobs.runtime
    settings.jit_cache_hook = user_s = lambda **given: False
    with triton_start.launchers_start():
        assert settings.jit_cache_hook is user_s
    assert settings.jit_cache_hook is user_s
    del launchers.knobs  # of another version
    with triton_start.launchers_start():
        launchers.compiled.clear()
    assert launchers.made == []
