"""The device protocol on CPU tensors, with CUDA's rules enforced, for tests without a GPU; it gives no speed.

Operators run when they are dispatched, because only that gives the right shapes and the right Python
flow, and are recorded. When the capture ends it looks as if nothing had run: captured writes are
undone, captured memory is poisoned and random generators are put back. A replay runs the recorded
operators again, on the addresses seen at capture.

    arena       memory that a capture touches, as a replay finds it again, its pool, and segments that replay
    rules       tells which operators write, read back to Python, or do nothing on a device
    recording   sees, runs and records operators between begin and end
    device      the `GraphDevice` protocol on top of these
"""
