"""Keeps the Programs of one model by key: captures, replays and counts them. Knows no module or argument.

manager    `CudaGraphManager`, for engines
lifecycle  the states of sizes, the verdicts of row counts, and refusals: every change of them
table      the Programs by key, what failed, and the one way to replay
capture    warmups, capture sessions, second tries, other ranks
stats      counters, and the report

What a manager does not import, but is asked for through `simplegraph.base.extras`:

observation  sees what runs and recordings read and write
proof        compares a replay with what eager ran
touched      asks the driver what graphs touch
"""
