"""Captured runs: recording, breaks, observation of a forward, values on the host."""
