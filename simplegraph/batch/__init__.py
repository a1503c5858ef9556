"""Chooses the mode and the padded size of each batch. Imports no torch.

sizes      `BatchDescriptor`, the shape of a batch; and the sizes that are captured
dispatch   chooses the mode and the padded size of a batch, with the reason
planner    chooses the sizes that waste the fewest padded rows of a histogram

`GraphBuilder.admit` (in serve) may choose a call's size again: its exact size in place of a padded one.
"""
