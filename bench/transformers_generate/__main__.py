"""``python -m bench.transformers_generate``: generation of transformers' families; `generation` says how."""

from bench.transformers_generate.generation import main

if __name__ == "__main__":
    main()
