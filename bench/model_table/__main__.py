"""``python -m bench.model_table``: other people's models; see `table`."""

from bench.model_table.table import main

main()
