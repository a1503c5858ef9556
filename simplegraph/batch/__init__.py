"""Decides the shape that runs: capture sizes, padding, dispatch, reasons. Imports no torch, captures nothing."""
