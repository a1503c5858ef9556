"""Keeps the Programs of one model by key: captures, replays and counts them. Knows no module or argument.

manager    `CudaGraphManager`, for engines
table      the Programs by key, what failed, and the one way to replay
capture    warmups, capture sessions, second tries, other ranks
proof      compares a replay with what eager ran
stats      counters, and the report
touched    asks the driver what graphs touch
"""
