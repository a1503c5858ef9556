"""Holds graphs for an encoder's calls, padded to captured batch sizes and lengths; nothing here decodes."""
