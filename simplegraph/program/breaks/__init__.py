"""Splits a run where the user asked for it: marks, traces, recorded segments. Captures without breaks skip it."""
