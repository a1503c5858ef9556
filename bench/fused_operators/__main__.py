"""``python -m bench.fused_operators``: fused operators of several libraries: first use, time in a graph, error."""

from bench.fused_operators.measure import main

main()
