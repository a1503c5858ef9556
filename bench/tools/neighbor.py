"""Another process that fills a GPU's free memory with NaN; without torch, so that it starts at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_SCRIPT = """
import ctypes, sys
driver = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
free, total, address, taken = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64(), 0
assert not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), int(sys.argv[1]))
assert not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) and not driver.cuCtxSetCurrent(context)
left = int(sys.argv[2])
while not driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) and free.value > left + (256 << 20):
    size = min(1 << 30, free.value - left - (128 << 20))
    if driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
        break
    driver.cuMemsetD32_v2(address, 0x7FC07FC0, ctypes.c_size_t(size // 4))
    taken += size
assert not driver.cuCtxSynchronize()
print(taken, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def neighbor(leave: int = 512 << 20, index: int = 0) -> Iterator[int]:
    """Run it in here, but for so many bytes that it leaves free; the context is how many it has."""
    arguments = [sys.executable, "-c", _SCRIPT, str(index), str(leave)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the neighbor has no pipes")
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
