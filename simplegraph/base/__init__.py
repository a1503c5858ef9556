"""Shared by all rooms; imports no other room.

config          settings and modes, and their environment variables
reasons         `Reason`, which explains how a call ran
errors          exceptions and parts of their messages
failures        explains a failed capture: the user's line, the cause, the remedy
context         whether this thread's calls run eagerly, and the description of their batches
extras          the interface through which the core calls extras
tensors         a tensor's memory, also behind wrappers
operators       operators as torch dispatches them
objects         reads the attributes of users' objects without running their code
walk            finds the objects that an object leads to
nested          flattens and rebuilds nested values
modes           torch's grad mode, inference mode and autocast, which a replay must set again
constants       device copies of tensors that a forward makes from Python data, and comparisons of tensors' values
collection      pauses of the garbage collector
version         the version of the package
patches         the list of all changes to other libraries' classes; makes and undoes them
"""
