"""``python -m bench``: how soon is a model ready? `bench.startup` says how."""

import sys

from bench.startup.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
