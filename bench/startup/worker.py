"""``python -m bench.startup.worker --arm NAME --json OUT``: measures one arm in this process."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bench.arms import ARMS
from bench.tools import torchrun
from bench.tools.options import DEVICES, add_preloaded, count, numbers


def main(arguments: list[str] | None = None) -> int:
    """Measure one arm and write the figures; return 1 if it failed, 0 otherwise, even if it is not available."""
    options = parser().parse_args(arguments)
    began = time.perf_counter()
    result: dict[str, Any] = {"arm": options.arm, "cache": options.cache}
    result |= _outcome(options)
    result["process_s"] = time.perf_counter() - began
    Path(options.json).write_text(json.dumps(result, indent=2))
    return int(result["status"] == "failed")


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup.worker", description=__doc__)
    parser.add_argument("--arm", required=True, choices=ARMS, help="what to measure")
    parser.add_argument("--json", required=True, help="file to write")
    parser.add_argument("--model", default="tiny", help="as `python -m bench` takes it")
    parser.add_argument("--layers", type=count, help="in place of the model's number of layers")
    parser.add_argument("--sizes", type=numbers, default=(1, 2, 4, 8), help="batch sizes, such as 1,2,4")
    parser.add_argument("--device", choices=DEVICES, help="the GPU where there is one by default")
    parser.add_argument("--lm-head", action="store_true", help="return logits in place of hidden states")
    parser.add_argument("--steps", type=count, default=50, help="steps that a step time is the median of")
    torchrun.add_option(parser)
    add_preloaded(parser)
    parser.add_argument("--tp-run", default="0", help="names the meeting of the ranks; each process its own")
    parser.add_argument("--cache", choices=("cold", "warm"), default=None, help="noted in the result")
    return parser


def _outcome(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures, or the reason why there are none."""
    # Imported here, since the imports of the arm's process are part of `process_s`.
    from bench.arms.base import NotAvailable
    from bench.startup.one_arm import measure_arm

    try:
        return {"status": "ok", **measure_arm(options)}
    except NotAvailable as error:
        return {"status": "not available", "error": str(error)}
    except Exception as error:  # the other arms continue; this failure is reported by the result and the exit status
        traceback.print_exc()
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
