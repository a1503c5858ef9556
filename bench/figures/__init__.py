"""Measures the figures of docs/figures.md, each file by its own command. The measurements live in their folders."""
