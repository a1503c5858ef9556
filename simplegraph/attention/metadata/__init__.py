"""The metadata of one step: read, checked, copied to the device and advanced. No attention is computed here.

batch_metadata  the buffers of one step, whose addresses never change
batch_state     the current step on the host, and its padded view on the device
step_arrays     reads and checks an engine's description of a step
"""
