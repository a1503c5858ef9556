"""``python -m bench.optimized``: optimized modules with graphs beside the compiler; see `rows`."""

from bench.optimized.rows import main

main()
