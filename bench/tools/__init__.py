"""Shared tools of the benchmarks: clocks, processes, texts, tables. They know no model and no arm."""
