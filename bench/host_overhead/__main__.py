"""``python -m bench.host_overhead``: microseconds of a call: replayed, refused by a capture, and bare of all this."""

import torch

from bench.host_overhead import calls
from bench.tools.measure import NOT_SPEED, device_of


def main() -> None:
    """Measure and print."""
    device = device_of()
    with torch.no_grad():
        compared = calls.calls(device, [calls.SIZE])
        calls.Samples(device, compared).take()  # the first block warms up
        samples = calls.Samples(device, compared)
        for _ in range(calls.ROUNDS[device.type]):
            samples.take()
    for name, microseconds in samples.medians().items():
        print(f"{name:>20} {microseconds:8.2f} us")
    if device.type == "cpu":
        print(NOT_SPEED)


if __name__ == "__main__":
    main()
