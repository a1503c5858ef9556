"""Answers whether a module can be captured, padded and replayed as it is. Serves no calls."""
