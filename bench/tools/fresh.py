"""Calls a function in a fresh process, forked from one that has imported torch but not used a GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

# Entered by a process while it measures times and all beside it stand still: ``with turn: ...``, as often as it wants.
Turn = contextlib.AbstractContextManager[Any]
NO_TURN: Turn = contextlib.nullcontext()
WANTED, OVER = "wanted", "over"  # messages of a process's turn
_PRELOAD_SECONDS = 120
# Torch's import takes seconds, and does not initialize CUDA; the other imports those named by the environment.
_PRELOADED = ["torch", "bench.tools.preloaded"]
MODULES = "BENCH_PRELOADED_MODULES"


class ProcessFailed(RuntimeError):
    """The function raised, or its process died.

    Attributes:
        reason: the error in one line, without its traceback.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


def preload(device: str, *modules: str) -> None:
    """Import modules once for all later processes, as far as they are installed; not if those cannot use the device."""
    stop_server()
    # Asked at import whether there is a GPU, torch would otherwise start CUDA, which no forked process can use then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ[MODULES] = ",".join(modules)
    try:
        call(_use, device, seconds=_PRELOAD_SECONDS)
    except (ProcessFailed, TimeoutError, OSError):
        del os.environ[MODULES]
        stop_server()


def _use(device: str) -> None:
    import torch

    torch.zeros(1, device=device)


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
    with contextlib.closing(FreshProcess(function, *args)) as process:
        if not process.connection.poll(seconds):
            raise TimeoutError(f"took more than {seconds:g} s")
        return process.result(process.receive())


class FreshProcess:
    """Runs a function in a fresh process; see `call`.

    Args:
        function, args: what runs.
        turns: True to pass the function a `Turn` as its last argument.

    Attributes:
        connection: has a message when the function is done, or wants a turn.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, turns: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_answer, args=(other, function, args, turns))
        self._process.start()
        self._pid: int = self._process.pid  # type: ignore[assignment]  # it has started
        other.close()  # only the child's end stays open, so that its death is noticed

    def receive(self) -> Any:
        """Wait for a message: `WANTED` or `OVER`, or what `result` reads. Raises ProcessFailed if it died."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise ProcessFailed(f"the process died with exit code {self._process.exitcode}") from None

    def result(self, message: Any) -> Any:
        """Return what the function returned, from its last message. Raises ProcessFailed if it raised."""
        fine, answer = message
        if not fine:
            raise ProcessFailed(*answer)
        return answer

    def give_turn(self) -> None:
        """Let it measure."""
        self.connection.send(None)

    def stop(self) -> None:
        """Halt it until `go_on`; what it has given to a GPU is still done."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self._pid, number)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()
        self.connection.close()


class _GivenTurn(contextlib.AbstractContextManager[None]):
    """Asks the process at the other end for a turn."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.send(WANTED)
        self._connection.recv()

    def __exit__(self, *exc_info: object) -> None:
        self._connection.send(OVER)


def _answer(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...], turns: bool) -> None:
    try:
        result = True, function(*args, *([_GivenTurn(connection)] if turns else []))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        result = False, (traceback.format_exc(), reason)
    connection.send(result)
