"""The command line of a benchmark: its options change a plan, which is measured, printed and written."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from bench.tools.files import save_figures
from bench.tools.measure import NOT_SPEED, Figures, device_of, few_threads, say
from bench.tools.options import DEVICE, Options, changed, command_line, json_file

P = TypeVar("P")


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End the process if this context takes longer: a call that hangs on a device stops in no other way."""

    def stop() -> None:
        say("the time limit is reached; figures so far are in the file")
        os._exit(124)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def of(
    name: str,
    doc: str | None,
    options: Options,
    default_plan: Callable[[torch.device], P],
    measure: Callable[[P, torch.device], Figures],
    render: Callable[[Figures], str],
    failures: Callable[[Figures], list[str]] = lambda figures: [],
    *,
    of_graphs: bool = True,
) -> Callable[[list[str] | None], None]:
    """Return the `main` of a benchmark: it measures as the command line says, prints the table and writes ``--json``.

    Args:
        name: of its module; doc: its help.
        options: by name, as `add_argument` takes them; each changes the plan's field of that name.
        failures: required models or arms that failed, for which it raises SystemExit.
        of_graphs: say of a CPU's figures that they are the emulator's.
    """

    def main(arguments: list[str] | None = None) -> None:
        given = command_line(name, doc, {**options, **DEVICE, **json_file()}).parse_args(arguments)
        device = device_of(given.device)
        with few_threads(device):
            figures = measure(changed(default_plan(device), vars(given)), device)
        print(render(figures))
        if of_graphs and device.type == "cpu":
            print(NOT_SPEED)
        save_figures(given.json, figures)
        if failures(figures):
            raise SystemExit("\n\n".join(failures(figures)))

    return main
