"""Recurrent layers beside attention: states in slots that requests own, and backends that advance them.

backend       the base class of backends, and the function by which layers call them
states        states in slots, and the slots of a step
mamba2        Mamba2
mamba2_layer  the shape and weights of a Mamba2 layer, and its steps by torch
"""
