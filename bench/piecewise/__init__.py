"""Benchmarks of eager breaks, and of mixed batches that need them. The arms are in `bench.arms`."""
