"""Benchmarks of training steps: a whole step in one graph, forward and backward graphs, and what others do."""
