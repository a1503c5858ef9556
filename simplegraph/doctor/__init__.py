"""Finds out if a module can be captured, padded and replayed without changes. Serves no calls."""
