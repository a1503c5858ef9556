"""Attention over the paged cache, a file for each library or kernel; the class they share is `attention.backend`'s."""
