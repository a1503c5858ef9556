"""Benchmarks: how soon a model is ready, what its graphs cost, and how fast they then run."""
