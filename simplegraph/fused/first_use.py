"""Loads CUDA's libraries and kernels in a thread, before their first use. Imports torch meanwhile, and not before."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from simplegraph.base.collection import without_collections
from simplegraph.base.errors import ConfigError
from simplegraph.base.extras import before_captures

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("simplegraph")
_KINDS = ("cuda", "cpu", "mps", "xpu", "meta")  # of devices of torch; all but GPUs have nothing to load


def preload(
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    then: Callable[[], object] | None = None,
) -> Preload:
    """Load CUDA's libraries and kernels in a thread, while the program imports modules and reads weights.

    Call it first in a program: the device's context is created while this call imports torch. Then come torch's
    allocator, cuBLAS, Triton and the kernels that captures use beside the model, which its first call would otherwise
    wait for. Captures by this library wait until all is loaded. On a CPU only torch is imported. As after any use of a
    GPU, processes that are forked later cannot use it.

    Args:
        device: the GPU; the first one by default. Ranks on several GPUs each name their own.
        dtype: of the model, for cuBLAS; bfloat16 by default.
        then: called last, in the thread, for example to run one layer of the model's shape. It must not capture.

    Raises:
        ConfigError: torch has no such device.

    Example:
        >>> import simplegraph as sg
        >>> loading = sg.preload()  # before `import torch`
        >>> model = load_model()
        >>> loading.wait()
    """
    loading = Preload(device, dtype, then)
    loading.start()
    return loading


class Preload:
    """A loading in the background, as `preload` begins it.

    Attributes:
        seconds: from the call of `preload` until each part was there: "context", "torch", "device", "cublas", "triton",
            "kernels", "then". Parts that this machine does not have are missing.
    """

    def __init__(
        self, device: torch.device | str | int | None, dtype: torch.dtype | None, then: Callable[[], object] | None
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._on_gpu, self._index = _ordinal(device)
        self._dtype, self._then = dtype, then
        self._error: BaseException | None = None
        self._imported = threading.Event()
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="simplegraph-preload")

    def start(self) -> None:
        """Start the thread, and import torch beside it."""
        self._thread.start()
        before_captures.add(self.join)
        if self.done:  # before it was added
            before_captures.discard(self.join)
        try:
            with without_collections():
                import torch  # noqa: F401  # in this thread, so that no two threads import it

                self._mark("torch")
        finally:
            self._imported.set()

    @property
    def done(self) -> bool:
        """True if everything is loaded."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until everything is loaded.

        Raises:
            Exception: what `then` raised, at the first wait.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait until the thread has ended, unless this is that thread."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        part = "context"
        try:
            if self._on_gpu and _create_context(self._index):
                self._mark(part)
                # Beside the import of torch, which they do not need.
                build_driver()
                read_compiler()
            self._imported.wait()
            for part, load in (
                ("device", self._load_device),
                ("cublas", self._load_cublas),
                ("triton", _load_triton),
                ("kernels", self._load_kernels),
            ):
                if self._on_gpu and load():
                    self._mark(part)
        except Exception as error:  # the program's own first use says it again, and where
            _log.warning("preload stopped at %s, which is loaded at its first use instead: %s", part, error)
        try:
            if self._then is not None:
                self._then()
                self._mark("then")
        except BaseException as error:  # to leave the program, too, is for the thread that waits
            _log.warning("what preload was to call raised %s: %s", type(error).__name__, error)
            self._error = error
        finally:
            before_captures.discard(self.join)

    def _mark(self, part: str) -> None:
        self.seconds[part] = time.perf_counter() - self._began

    def _load_device(self) -> bool:
        """Start torch's CUDA; False if it has none, and then nothing else is loaded."""
        import torch

        self._on_gpu = torch.cuda.is_available()
        if self._on_gpu:
            if self._index >= (count := torch.cuda.device_count()):
                self._on_gpu = False
                raise ConfigError(f"there is no GPU {self._index}, only {count}; name one of them.")
            torch.zeros(1, device=f"cuda:{self._index}")
            torch.cuda.synchronize(self._index)
        return self._on_gpu

    def _load_cublas(self) -> bool:
        """Multiply matrices, with and without a bias: on this thread's default stream, which others use as well."""
        import torch

        with torch.inference_mode(), torch.cuda.device(self._index):
            ones = torch.ones(64, 64, device="cuda", dtype=self._dtype or torch.bfloat16)
            torch.nn.functional.linear(ones, ones)
            torch.nn.functional.linear(ones, ones, ones[0])
            torch.cuda.synchronize()
        return True

    def _load_kernels(self) -> bool:
        """Run the kernels of captures beside the model: these fill and compare static inputs, or are cuBLASLt's."""
        import torch

        from simplegraph.program.breaks.marks import breaking_operators

        breaking_operators()
        with torch.inference_mode(), torch.cuda.device(self._index):
            operand = torch.zeros(16, 16, device="cuda", dtype=self._dtype or torch.bfloat16)
            torch.addmm(operand[0], operand, operand)  # by which the capture stream gets its workspaces
            for dtype in (torch.int64, torch.int32, torch.uint8, self._dtype or torch.bfloat16):
                filled = torch.full((4, 4), 1, device="cuda", dtype=dtype)
                filled[1:].copy_(filled.index_select(0, torch.arange(3, device="cuda") % 2))
                torch.equal(filled, filled.clone())  # waits
        return True


def _ordinal(device: torch.device | str | int | None) -> tuple[bool, int]:
    """Return whether a device may be a GPU, and its index; imports no torch. Raises ConfigError."""
    kind, _, index = (f"cuda:{device}" if isinstance(device, int) else str(device or "cuda")).partition(":")
    if kind not in _KINDS or not (index.isdecimal() or index == ""):
        raise ConfigError(f"preload was given the device {device!r}; pass 'cuda', 'cuda:1', 1 or 'cpu'.")
    return kind == "cuda", int(index or 0)


def _create_context(index: int) -> bool:
    """Create the context that torch will use, without torch; False if there is no GPU, or another kind."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it starts CUDA
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        return not (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )
    return False


def _load_triton() -> bool:
    """Start Triton's launcher, a module in C that is compiled once on a machine; False if it does not run."""
    import subprocess  # of which torch has brought what is slow to import

    # Triton, its driver or a compiler can be missing or fail. Later users of Triton report that, with the reason.
    with contextlib.suppress(ImportError, RuntimeError, OSError, subprocess.SubprocessError):
        return bool(import_triton("runtime.driver").driver.active.get_current_device() >= 0)
    return False


class _Once:
    """Runs a function once in a process. Others that call it meanwhile wait; errors are for Triton to raise itself."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._done = False

    def __call__(self) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                with contextlib.suppress(Exception):
                    self._run()


def import_triton(module: str) -> Any:
    """Import Triton, then one of its modules, which import each other in circles.

    Threads that begin with different ones wait for each other, and Python ends that by an ImportError in one of them.

    Raises:
        ImportError: it is not installed, in a `ModuleNotFoundError` that names "triton", or cannot be imported.
    """
    importlib.import_module("triton")
    return importlib.import_module(f"triton.{module}")


def _read_compiler() -> None:
    """Compute Triton's part of its cache's keys, for which it reads all of itself, hundreds of megabytes."""
    try:
        keys = import_triton("runtime.cache").triton_key  # since 3.6
    except AttributeError:
        keys = import_triton("compiler.compiler").triton_key
    keys()


# Compiles Triton's driver, a module in C that its start finds in its cache then.
build_driver = _Once(lambda: import_triton("backends.nvidia.driver").CudaUtils())
read_compiler = _Once(_read_compiler)


@contextlib.contextmanager
def triton_starts() -> Iterator[None]:
    """Start Triton in two threads beside the body of this context; both threads have ended when the context ends."""
    with ThreadPoolExecutor(2, thread_name_prefix="simplegraph-triton") as threads:
        with contextlib.suppress(RuntimeError):  # no thread can be started: Triton does this where it needs it
            for part in (build_driver, read_compiler):
                threads.submit(part)
        yield
