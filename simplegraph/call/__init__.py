"""A call of a wrapped module, from its arguments to its outputs.

call        the call, its layout, and everything learnt about a signature
layouts     the table of the layouts of all calls, by which calls are served or refused
signature   the leaves of the arguments, their names and batch dimensions
inputs      static inputs, which graphs read
plan        binds arguments, replays, and returns the outputs; refuses single calls
outputs     how outputs follow the batch size, and which of them share memory
entries     what a forward sets in mappings of a library that it is passed, which are more outputs
memory      the memory that a forward reads and writes beside its arguments
"""
