"""Keeps the Programs of one model by key: captures, replays and counts them. Reads no module and no argument.

manager       `CudaGraphManager`, for engines
lifecycle     the states of sizes, the verdicts of row counts, and refusals: every change of them
table         the Programs by key, what failed, and the one way to replay
capture       captures jobs: warmups, capture sessions, second tries, other ranks
stats         counters, and the report

The other files are loaded at their first use:

observation   observes the memory that runs and recordings read and write
replay_proof  compares replays of a graph with an eager run
touched       asks the driver which memory graphs touch
"""
