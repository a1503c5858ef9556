"""What every room needs; imports no other room.

config          settings and modes, and their environment variables
reasons         why a call ran the way it did
errors          exceptions and their sentences
failures        explains a failed capture: the user's line, the cause, the remedy
context         if this thread's calls run eagerly, and what `describe` says of a batch
extras          what the core asks of extras
tensors         a tensor's memory, behind wrappers, too
operators       operators as torch dispatches them
objects         what the user's objects hold, read without running their code
walk            walks what objects lead to, by one policy
nested          nested values taken apart and rebuilt
modes           modes of torch that a replay must set again
constants       device copies of what a forward makes from Python data
collection      when the garbage collector shall wait
version         the version of the package
patches         every change to other people's classes, and the way back
"""
