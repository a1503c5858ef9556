"""The wrapped module.

runner   serves one call: replays it, or takes the next step of its lifecycle
builder  takes these steps: eager runs, warmups, captures
finish   decides if a call can be finished eagerly after an eager break stopped its replay
proof    compares calls with replays: the first of each batch size, and one now and then
wrap     `wrap`, `cuda_graph`, `graph_pool`
"""
