"""Keeps the Programs of one model by key: captures, replays and counts them. Knows no module or argument."""
