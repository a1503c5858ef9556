"""Chooses the mode and the padded size of each batch. Imports no torch.

sizes      `BatchDescriptor`, the shape of a batch; and the sizes that are captured
dispatch   chooses the mode and the padded size of a batch, with the reason
planner    chooses the sizes that waste the fewest padded rows of a histogram
"""
