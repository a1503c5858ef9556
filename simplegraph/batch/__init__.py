"""Decides the shape that runs: capture sizes, padding, dispatch. Imports no torch, captures nothing."""
