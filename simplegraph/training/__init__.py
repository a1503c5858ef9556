"""Graphs for training; those of inference are captured in `serve`.

step          `train_step`: a whole step in one graph, and what serves its calls
step_effects  a step's effects beside its result: gradients and Python state; its module and its replays
runner        serves calls under grad mode by pairs of graphs
builder       captures a pair
pair          a forward graph and its backward graph, and a call that they serve
recording     the runs of both that are captured
notes         notes of eager calls and their backwards, for captures
gradients     the gradients of a step's parameters, and their memory
optimizers    optimizers in a captured step
held_values   the plain values that optimizers and scalers hold
"""
