"""Libraries that lack a function or an argument are found when the backend is made; stand-ins for their modules."""

from __future__ import annotations

import configparser
import functools
import inspect
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from simplegraph import AttentionCGSupport, ConfigError
from simplegraph.attention import FlashAttentionBackend, minimum_support
from simplegraph.attention.backends.flash_attention import kernels_of
from simplegraph.attention.backends.flashinfer import _OLDEST, FlashInferBackend, check_build, check_wrapper
from tests.support.attention_engine import AttentionEngine
from tests.support.attention_libraries import (
    FlashInferWrapper,
    PlainFlash,
    VllmFlash,
    stand_in_flash,
    stand_in_flashinfer,
)

CPU = torch.device("cpu")


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmFlash]:
    found = VllmFlash()
    stand_in_flash(monkeypatch, found)
    with torch.inference_mode():
        yield found


def without(function: Any, *names: str) -> Any:
    """The function of an older build, which takes all but these arguments."""
    signature = inspect.signature(function)
    kept = [one for name, one in signature.parameters.items() if name not in names]

    def older(*args: Any, **options: Any) -> Any:
        raise TypeError("called")

    older.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return older


@pytest.mark.parametrize(
    ("function", "argument", "options", "window"),
    [
        ("flash_attn_varlen_func", "window_size", {}, 6),
        ("get_scheduler_metadata", "window_size", {}, 6),
        ("flash_attn_varlen_func", "softcap", {"softcap": 2.0}, None),
        ("get_scheduler_metadata", "has_softcap", {"softcap": 2.0}, None),
        ("flash_attn_varlen_func", "s_aux", {"sinks": {n: torch.zeros(4, dtype=torch.bfloat16) for n in (0, 1)}}, None),
    ],
)
def test_a_flash_attention_without_an_argument_is_refused_only_if_that_is_needed(
    flash: VllmFlash, function: str, argument: str, options: dict[str, Any], window: int | None
) -> None:
    setattr(flash, function, without(getattr(flash, function), argument))
    settings: dict[str, Any] = {"mode": "NONE", "dtype": torch.bfloat16}
    AttentionEngine(FlashAttentionBackend, CPU, **settings)
    with pytest.raises(ConfigError, match=f"vllm_flash_attn has a {function} without the argument {argument}"):
        AttentionEngine(functools.partial(FlashAttentionBackend, **options), CPU, window=window, **settings)


@pytest.mark.parametrize(
    ("version", "function", "argument"),
    [
        (3, "flash_attn_varlen_func", "scheduler_metadata"),
        (3, "flash_attn_varlen_func", "num_splits"),
        (3, "get_scheduler_metadata", "page_size"),
        (3, "flash_attn_varlen_func", "block_table"),
        (2, "flash_attn_varlen_func", "fa_version"),
        (2, "flash_attn_varlen_func", "seqused_k"),
    ],
)
def test_a_flash_attention_that_is_too_old_says_the_argument(
    flash: VllmFlash, version: int, function: str, argument: str
) -> None:
    assert not isinstance(kernels_of("vllm_flash_attn", version), str)
    setattr(flash, function, without(getattr(flash, function), argument))
    assert kernels_of("vllm_flash_attn", version) == f"has a {function} without the argument {argument}"
    setattr(flash, function, None)
    assert kernels_of("vllm_flash_attn", version) == f"has no {function}"


def test_functions_that_take_anything_or_do_not_tell_are_taken(flash: VllmFlash) -> None:
    module: Any = flash
    module.flash_attn_varlen_func = lambda *args, **options: None
    module.get_scheduler_metadata = min  # compiled, without a signature
    assert not isinstance(kernels_of("vllm_flash_attn", 3), str)


def make(version: int | None = None, **options: Any) -> FlashAttentionBackend:
    settings: dict[str, Any] = {"mode": "NONE", "dtype": torch.bfloat16, "page_size": 16, "num_pages": 16}
    of_cache = {name: options.pop(name) for name in ("page_size", "layout") if name in options}
    made = functools.partial(FlashAttentionBackend, version=version, **options)
    found: Any = AttentionEngine(made, CPU, **settings | of_cache).backend
    return found


@pytest.mark.parametrize(("capability", "version"), [((9, 0), 3), ((8, 0), 2), ((8, 9), 2), ((10, 0), 2)])
def test_the_newest_version_that_the_gpu_runs_is_taken(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: int
) -> None:
    stand_in_flash(monkeypatch, VllmFlash(), capability=capability)
    backend = make()
    assert (backend.version, backend.name) == (version, f"FlashAttention-{version}")
    support = {3: AttentionCGSupport.ALWAYS, 2: AttentionCGSupport.UNIFORM_BATCH}[version]
    assert backend.support is support
    assert minimum_support([backend]) is support


def test_version_2_runs_where_version_3_would_if_it_is_asked_for(flash: VllmFlash) -> None:
    assert make(2).version == 2


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_version_3_on_a_gpu_that_does_not_run_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """The message names another version, and that works."""
    stand_in_flash(monkeypatch, VllmFlash(), capability=capability)
    found = ".".join(map(str, capability))
    said = rf"FlashAttention-3 needs a Hopper GPU \(compute capability 9\); cpu has {found}. Use another version"
    with pytest.raises(ConfigError, match=said):
        make(3)
    assert make(2).version == 2


def test_a_device_that_runs_no_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_flash(monkeypatch, VllmFlash(), capability=(7, 5))
    said = "FlashAttention-3 needs a Hopper GPU .* or FlashAttention-2 needs an Ampere GPU or newer .*; cpu has 7.5"
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize("version", [0, 1, 4, "3", 2.5])
def test_an_unknown_version_is_refused(flash: VllmFlash, version: Any) -> None:
    with pytest.raises(ConfigError, match=rf"version is {version!r}; expected 2, 3, or None"):
        make(version)


class ForAnotherTorch:
    """Finds the modules of builds for another torch, whose libraries do not load."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, *rest: Any) -> None:
        if name in self.names:
            raise ImportError(f"{name}_C.abi3.so: undefined symbol: _ZNK3c105Error4whatEv\nmore")


def test_a_build_for_another_torch_is_passed_over_for_one_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds are installed, and what is wrong with the first is said only if no other serves."""
    good = VllmFlash("vllm.vllm_flash_attn", versions=[2])
    stand_in_flash(monkeypatch, good)
    monkeypatch.delitem(sys.modules, "vllm_flash_attn")
    monkeypatch.setattr(sys, "meta_path", [ForAnotherTorch("vllm_flash_attn"), *sys.meta_path])
    assert make()._flash is good
    said = (
        r"no FlashAttention-3 is installed; tried "
        r"vllm_flash_attn \(vllm_flash_attn_C.abi3.so: undefined symbol: \w+\), "
        r"vllm.vllm_flash_attn \(has no version 3\), "
    )
    with pytest.raises(ConfigError, match=said):
        make(3)


def test_one_of_two_libraries_of_a_build_is_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's module loads without it, and keeps the error."""
    module: Any = VllmFlash(versions=[2])
    module.flash_attn_interface = types.SimpleNamespace(FA3_UNAVAILABLE_REASON="undefined symbol: _ZNK3c10")
    stand_in_flash(monkeypatch, module)
    assert make().version == 2
    with pytest.raises(ConfigError, match=r"vllm_flash_attn \(has no version 3: undefined symbol: _ZNK3c10\)"):
        make(3)


def test_no_build_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_flash(monkeypatch)
    with pytest.raises(ConfigError, match=r"no FlashAttention-3 is installed; .*no FlashAttention-2 .* vLLM wheel"):
        make()


def test_what_version_2_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_flash(monkeypatch, VllmFlash(), PlainFlash(), capability=(8, 0))
    sinks = {layer: torch.zeros(4, dtype=torch.bfloat16) for layer in range(2)}
    with pytest.raises(ConfigError, match="FlashAttention-2 has no sinks; use version 3, or another backend"):
        make(sinks=sinks)
    with pytest.raises(ConfigError, match=r"pages have 8 tokens; .* vllm_flash_attn reads pages of a multiple of 16"):
        make(page_size=8)
    stand_in_flash(monkeypatch, PlainFlash(), capability=(8, 0))
    with pytest.raises(ConfigError, match=r"pages have 16 tokens; .* of flash_attn reads pages of a multiple of 256"):
        make()


def flashinfer(version: str = "0.6.1", **changes: Any) -> Any:
    wrapper = type("BatchPrefillWithPagedKVCacheWrapper", (FlashInferWrapper,), changes)
    built: Any = types.ModuleType("flashinfer")
    built.BatchPrefillWithPagedKVCacheWrapper, built.__version__ = wrapper, version
    return built


def test_a_flashinfer_with_all_arguments_is_taken() -> None:
    for version in ("0.5.3", "0.6.1.post1", "0.7.4", "0.0.0+unknown"):
        check_build(flashinfer(version))
    check_wrapper(FlashInferWrapper(torch.zeros(1), "NHD", backend="fa2"))


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("plan", "disable_split_kv"),
        ("plan", "seq_lens"),
        ("plan", "window_left"),
        ("run", "lse"),
        ("__init__", "backend"),
    ],
)
def test_a_flashinfer_without_an_argument_is_refused(method: str, argument: str) -> None:
    older = flashinfer(**{method: without(getattr(FlashInferWrapper, method), argument)})
    with pytest.raises(ConfigError, match=f"Wrapper has a {method} without the argument {argument}"):
        check_build(older)


def test_a_flashinfer_without_the_wrapper_or_of_an_old_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="flashinfer has no BatchPrefillWithPagedKVCacheWrapper"):
        check_build(types.ModuleType("flashinfer"))
    with pytest.raises(ConfigError, match=r"FlashInfer is 0.4.1; expected 0.5.3 or newer"):
        check_build(flashinfer("0.4.1"))


def test_a_flashinfer_that_names_its_buffers_otherwise_is_refused() -> None:
    wrapper = FlashInferWrapper(torch.zeros(1), "NHD", backend="fa2")
    del wrapper._int_workspace_buffer
    with pytest.raises(ConfigError, match="Wrapper has no _int_workspace_buffer"):
        check_wrapper(wrapper)


def test_a_window_of_w_is_w_minus_1_on_flashinfers_left() -> None:
    backend = FlashInferBackend.__new__(FlashInferBackend)
    for window, left in ((None, -1), (1, 0), (128, 127)):
        backend.window = window
        assert backend.window_left == left
    assert "sinks" not in FlashInferBackend.features


def test_the_extras_ask_for_the_oldest_flashinfer_that_is_taken() -> None:
    declared = configparser.ConfigParser()
    declared.read(pathlib.Path(__file__).parents[3] / "setup.cfg")
    oldest = ".".join(map(str, _OLDEST))
    for extra in ("flashinfer", "bench-gpu"):
        assert f"flashinfer-python>={oldest}" in declared["options.extras_require"][extra].split()
    check_build(flashinfer(oldest))


def flashinfer_backend() -> FlashInferBackend:
    settings: dict[str, Any] = {"mode": "NONE", "dtype": torch.bfloat16}
    found: Any = AttentionEngine(FlashInferBackend, CPU, **settings).backend
    return found


def test_a_backend_is_not_made_with_an_old_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_flashinfer(monkeypatch, version="0.5.2")
    with pytest.raises(ConfigError, match=r"FlashInfer is 0.5.2; expected 0.5.3 or newer"):
        flashinfer_backend()
    stand_in_flashinfer(monkeypatch, version="0.5.3")
    assert flashinfer_backend().int_workspace_bytes == 2 * 4096


def test_a_backend_is_not_made_with_a_flashinfer_that_names_its_buffers_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def renamed(self: Any, *args: Any, **options: Any) -> None:
        FlashInferWrapper.__init__(self, *args, **options)
        del self._pin_memory_int_workspace_buffer

    renamed.__signature__ = inspect.signature(FlashInferWrapper.__init__)  # type: ignore[attr-defined]
    stand_in_flashinfer(monkeypatch, __init__=renamed)
    with pytest.raises(ConfigError, match="Wrapper has no _pin_memory_int_workspace_buffer"):
        flashinfer_backend()
