"""``python -m bench``: measures the time until a model is ready; see `bench.startup`."""

import sys

from bench.startup.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
