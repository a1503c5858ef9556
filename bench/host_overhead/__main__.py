"""``python -m bench.host_overhead``: microseconds of a call: replayed, refused by a capture, and bare of all this."""

from __future__ import annotations

import argparse
import sys

from bench.host_overhead import calls
from bench.tools.files import save_figures
from bench.tools.measure import NOT_SPEED, device_of, say
from bench.tools.options import add_device, add_json, count, numbers
from bench.tools.tables import grid


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_overhead", description=__doc__)
    help_text = f"batch sizes to capture, such as 1,2,8; {calls.SIZE} is always among them, and alone by default"
    parser.add_argument("--sizes", type=numbers, default=(), help=help_text)
    parser.add_argument("--rounds", type=count, help="medians are taken over so many blocks; 50 on a GPU, else 3")
    add_device(parser)
    add_json(parser)
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    sizes = sorted({*options.sizes, calls.SIZE})
    medians = calls.measure(device, sizes, options.rounds or calls.ROUNDS[device.type], say)
    rows = [(name, f"{microseconds:.2f}") for name, microseconds in medians.items()]
    print(grid([("call", "us"), *rows]))
    if device.type == "cpu":
        print(NOT_SPEED)
    if options.json:
        save_figures(options.json, {"sizes": sizes, "microseconds": medians})
    return 0


if __name__ == "__main__":
    sys.exit(main())
