"""Graphs for an encoder's calls, padded to captured batch sizes and lengths. Nothing here decodes."""
