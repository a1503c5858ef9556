"""Rewrites an inference module in place: folded norms, channels_last weights. Lists and undoes that."""
