"""Measures fused operators: seconds to their first use in a fresh process, and microseconds in a graph."""
