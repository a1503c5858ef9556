"""Eager breaks, at which the user splits a run: marks, traces, steps. Captures without breaks do not load this folder.

marks        `eager_break` and `break_at`
break_calls  one break as a step of a Program
eager        breaks in eager runs: traced for a capture, recorded for a proof, or finished after a replay that stopped
rows         the batch dimensions of the arguments and results of breaks
"""
