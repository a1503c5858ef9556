"""The wrapped module.

runner             `GraphRunner.call` serves a call: it replays a graph, or takes the next step of the size's lifecycle
builder            these steps: eager runs, warmups, captures
call_capture       captures the graphs of one call, and undoes what these runs change
observed_runs      eager runs of the forward, and what they read and write
finish             decides if a call can be finished eagerly after an eager break stopped its replay
call_proof         compares calls with replays: the first call of each batch size, and later calls from time to time
wrap               `wrap`, `cuda_graph`, `graph_pool`
graphed_function   `GraphedFunction`: the result of `wrap` for a function
"""
