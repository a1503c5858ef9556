"""Backends of paged attention, one file for each library or kernel; their base class is in `attention.backend`."""
