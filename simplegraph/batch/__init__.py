"""Decides the shape that runs. Imports no torch, captures nothing.

sizes      the shape of a batch, which is the key of its graph, and the sizes that are captured
dispatch   chooses the mode and the padded size of a batch, with the reason
planner    chooses the sizes that waste the fewest padded rows of a histogram
"""
