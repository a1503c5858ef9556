"""``python -m bench.latency``: the latency of single calls, waited for and back to back; see `rows`."""

from bench.latency.rows import main

main()
