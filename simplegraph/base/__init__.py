"""Shared by all rooms; imports no other room.

config          settings and modes, and their environment variables
reasons         why a call ran the way it did
errors          exceptions and parts of their messages
failures        explains a failed capture: the user's line, the cause, the remedy
context         whether this thread's calls run eagerly, and the description of their batches
extras          the interface through which the core calls extras
tensors         a tensor's memory, also behind wrappers
operators       operators as torch dispatches them
objects         reads the attributes of users' objects without running their code
walk            walks the objects that an object leads to, by one policy
nested          flattens and rebuilds nested values
modes           modes of torch that a replay must set again
constants       device copies of tensors that a forward makes from Python data
collection      pauses of the garbage collector
version         the version of the package
patches         every change to other people's classes, and how it is undone
"""
