"""A call of a wrapped module, from its arguments to its outputs.

call        the call, the table of all calls, and everything learnt about a signature; plans that refuse
signature   the leaves of the arguments, their names and batch dimensions
inputs      static inputs, which graphs read
plan        binds arguments, replays, and returns the outputs; refuses single calls
outputs     how outputs follow the batch size, and which of them share memory
memory      the memory that a forward reads and writes beside its arguments
rehearsal   runs a forward beside a call, and undoes its effects
"""
