"""Decoding through graphs for a model's `generate`; nothing here encodes."""
