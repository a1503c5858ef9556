"""Benchmarks of speculative decoding, and the training of its tiny models. The rounds run in `bench.engine`."""
