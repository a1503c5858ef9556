"""Graphs for training; those of inference are captured in `serve`.

step         `train_step`: a whole step in one graph
effects      what a step does beside returning a result
step_runner  serves calls of it
runner       serves calls under grad mode by pairs of graphs
builder      captures a pair
pair         a forward graph and its backward graph, and a call that they serve
recording    the runs of both as they are captured
notes        what eager calls and their backwards showed
gradients    what leads to gradients, and where those of a step lie
optimizers   optimizers in a captured step
held_values  the plain values that optimizers and scalers hold
"""
