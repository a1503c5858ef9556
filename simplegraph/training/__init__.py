"""Graphs for training: forward and backward of a module, and whole steps. Graphs of inference lie in `module`."""
