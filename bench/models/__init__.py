"""The models that the benchmarks run."""
