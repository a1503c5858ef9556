"""Vision, diffusion and encoder models: eager, through graphs of several makers; all figures are in extra_info.

`BENCH_MODELS` and `BENCH_MODEL_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from collections.abc import Callable

from bench.models_first_call import first_call


def test_models(record_chosen: Callable[..., None]) -> None:
    record_chosen(first_call, models="BENCH_MODELS", arms="BENCH_MODEL_ARMS")
