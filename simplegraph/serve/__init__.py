"""The wrapped module.

replay_or_eager  the way of one call: the loop that replays or finds why not, then eager, capture, proof
builder          captures for calls
finish           decides if a call can be finished eagerly that an eager break stopped
proof            compares calls with replays: the first of each batch size, and one now and then
wrap             `wrap`, `cuda_graph`, `graph_pool`
"""
