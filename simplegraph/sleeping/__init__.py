"""Sleep: the memory of graphs, caches and weights is released to the driver, and mapped again at the same addresses.

sleeper        `sleepable`, `sleep`, `wake`
regions        a region: memory that sleeps and wakes together
cuda           regions on a GPU
emulated       regions of the emulator
graph_holders  finds the holders of graphs, and the memory that their graphs read
"""
