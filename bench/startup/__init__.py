"""Benchmark of the time until a model is ready: `pytest bench/startup` and `python -m bench`. See `bench.arms`."""
