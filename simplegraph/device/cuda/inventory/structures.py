"""Structures that CUDA's driver fills in about a node of a graph, with room for what a later driver may add."""

from __future__ import annotations

import ctypes

# A word that may be an address, as a tuple, of which there are many: the node's place among the nodes, the kernel's
# name or what else the node does, the word, False if it is in a struct, and which parameter it is in (-1: no kernel's).
Word = tuple[int, str, int, bool, int]


class KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("more", ctypes.c_uint64 * 16),
    )


class CopyParameters(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _side = ("x", "y", "z", "lod")
    _fields_ = (
        *((f"source_{name}", ctypes.c_size_t) for name in _side),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_rest", ctypes.c_uint64 * 4),
        *((f"target_{name}", ctypes.c_size_t) for name in _side),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_rest", ctypes.c_uint64 * 4),
        ("sizes", ctypes.c_size_t * 3),
        ("more", ctypes.c_uint64 * 16),
    )


class FillParameters(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("sizes", ctypes.c_size_t * 2),
        ("more", ctypes.c_uint64 * 16),
    )
