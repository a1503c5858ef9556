"""Benchmarks of transformers' `generate`: plain, compiled and through graphs. See `bench.serve` for the engine."""
