"""Measures two-batch overlap: steps of the engine as one batch and as two micro-batches. No serving of requests."""
