"""A function in a process of its own, forked from one that has imported torch and nothing that knows a GPU."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PRELOADED = ["torch"]  # which every process would import for seconds; it leaves CUDA alone until it is used


class ProcessFailed(RuntimeError):
    """The function raised, or its process died.

    Attributes:
        reason: the error in one line, without its traceback.
    """

    def __init__(self, told: str, reason: str | None = None) -> None:
        super().__init__(told)
        self.reason = reason or told


def call(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What the function returns, run in a fresh process; its imports of torch are done when it starts.

    Args:
        function: a module's own, so that its name is enough to find it; what it is passed and returns is pickled.
        seconds: that it may take.

    Raises:
        TimeoutError: it took longer, and was ended.
        ProcessFailed: it raised, or its process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()  # the child's is the only one left, so that its death is noticed
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
