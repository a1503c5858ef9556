"""Benchmark of optimized modules with graphs beside the compiler."""
