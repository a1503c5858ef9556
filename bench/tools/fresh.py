"""Calls a function in a fresh process, forked from one that has imported torch but not used a GPU."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

_PRELOAD_SECONDS = 120
_PRELOADED = ["torch"]  # its import takes seconds, and does not initialize CUDA


class ProcessFailed(RuntimeError):
    """The function raised, or its process died.

    Attributes:
        reason: the error in one line, without its traceback.
    """

    def __init__(self, told: str, reason: str | None = None) -> None:
        super().__init__(told)
        self.reason = reason or told


def preload(module: str, device: str) -> None:
    """Import a module once for all later processes; not if they then cannot use the device."""
    stop_server()
    _PRELOADED.append(module)
    try:
        call(_use, device, seconds=_PRELOAD_SECONDS)
    except (ProcessFailed, TimeoutError, OSError):
        _PRELOADED.remove(module)
        stop_server()


def _use(device: str) -> None:
    import torch

    torch.zeros(1, device=device)


def import_installed(*modules: str) -> None:
    """Import those of the modules that can be imported: for a module that is preloaded."""
    # Asked at import whether there is a GPU, torch would otherwise start CUDA, which no forked process can use then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for module in modules:
        # Not installed, or built for another torch: what needs it says so.
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def stop_server() -> None:
    """Stop the process that others are forked from; the next call starts one."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # there is no public way


def call(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Run the function in a fresh process that has already imported torch, and return its result.

    Args:
        function: a function at module level, found by its name; arguments and result are pickled.
        seconds: the time limit.

    Raises:
        TimeoutError: it took longer, and was terminated.
        ProcessFailed: the function raised, or its process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()  # only the child's end stays open, so that its death is noticed
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"took more than {seconds:g} s")
        fine, answer = receiver.recv()
    except EOFError:
        process.join()
        raise ProcessFailed(f"the process died with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not fine:
        raise ProcessFailed(*answer)
    return answer


def _answer(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = True, function(*args)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        result = False, (traceback.format_exc(), reason)
    sender.send(result)
