"""Benchmark of the time until a model is ready: `python -m bench`, its workers, tables and plot. See `bench.arms`."""
