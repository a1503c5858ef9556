"""A call of a wrapped module, from its arguments to its outputs.

call                 the call, its layout, and everything learnt about a signature
layouts              the table of the layouts of all calls
remembered_refusals  which refused calls are remembered, so that they run eagerly without a look at the module
signature            the leaves of the arguments, their names and batch dimensions
inputs               static inputs, which graphs read
plan                 binds arguments, replays, and returns the outputs; refuses single calls
outputs              how outputs follow the batch size
safe_indices         indices of a call that cannot fail, until it is known that the graph serves the call
shared_outputs       outputs that share memory with each other or with inputs
entries              entries that a forward sets in mappings that it is passed, such as TensorDicts: further outputs
external_memory      the memory that a forward reads and writes beside its arguments
rehearsals           undoes the changes of runs beside the calls: rehearsals of captures, proofs
watched_run          runs a forward, and notes or refuses what it changes of its arguments

Calls with the same signature (dtypes, trailing shapes, constants, settings) share a `Binding`. Calls of a binding that
also pass their arguments in the same way (by position or keyword, nested alike) share a `CallLayout`. Each layout has a
`Plan` for each batch size, which replays one graph.

To refuse calls: `Call.check` (before), `Plan.refusal` (one replay), `manager/lifecycle.py` (remembered).
"""
