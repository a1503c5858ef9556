"""transformers' `generate` through graphs beside plain and compiled; all figures are in extra_info.

`BENCH_FAMILIES` and `BENCH_GENERATE_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from collections.abc import Callable

from bench.transformers_generate import generation


def test_transformers_generate(record_chosen: Callable[..., None]) -> None:
    record_chosen(generation, models="BENCH_FAMILIES", arms="BENCH_GENERATE_ARMS")
