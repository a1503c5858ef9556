"""Captures one run and replays it: the device protocol, Programs, sessions. Knows no batch, key or module."""
