"""Fused operators: Triton kernels that are ready in a second, torch's operators where they cannot run. No graphs."""
