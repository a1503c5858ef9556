"""``python -m bench.transformers_generate``: generation by families of transformers; see `generation`."""

from bench.transformers_generate.generation import main

main()
