"""Benchmarks of the reference engine: under load, step by step, and against float32. See `bench.engine`."""
