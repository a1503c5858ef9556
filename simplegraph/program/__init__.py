"""Programs, which are captured runs, and everything that captures one.

program         a Program: segments and breaks in order, replayed one after the other
session         sets up streams, locks and modes for captures, and restores them
probes          the events of captures, and the base class of objects that observe them
escapes         restores Python state after captures, and refuses captures that leave tensors in Python objects
observe         observes the memory that a forward reads and writes
snapshot        saves the contents of Python objects, finds changes, and undoes them
host_modes      follows the CPU tensors of a forward, in a warmup and in a capture
host_arguments  the CPU tensors that a forward is passed, and how a run uses each
steady_reads    values that a forward reads back from memory that no run writes
index_checks    checks the indices of operators on the host before the operators run
index_ranges    the arguments that are indices, and the valid range of their values
lent_outputs    tells if a caller still holds the static outputs of a graph
breaks          eager breaks: marks, runs in eager calls, and steps of a Program
"""
