"""Captured runs.

program       a Program: segments and breaks in order, replayed one after the other
session       what holds during captures, and is put back
probes        the events of captures, and the protocol of what looks on
escapes       Python's state around captures, and tensors that a capture left in it
observe       watches the memory that a forward reads and writes
snapshot      what objects hold, and how to put it back
host_modes    CPU tensors of a forward at a warmup and a capture
steady_reads  values that a forward reads back from memory which no run writes
index_checks  checks indices of operators on the host, before these run
breaks        eager breaks: marks, runs in eager calls, and steps of a Program
"""
