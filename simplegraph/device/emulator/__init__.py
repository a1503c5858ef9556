"""The device protocol on CPU tensors, with CUDA's rules enforced, for tests without a GPU; it gives no speed.

Operators run when they are dispatched, since only this gives correct shapes and the correct Python branches, and are
recorded. At the end of a capture all is as if nothing had run: captured writes are undone, captured memory is poisoned,
and random generators are restored. A replay runs the recorded operators again, on the addresses seen at the capture.

    arena       the memory of captures, their pool, and segments, which replay
    rules       the operators that write, read back to Python, or do nothing on a device
    capture     runs and records operators between `begin` and `end`
    device      the `GraphDevice` protocol on top of these
"""
