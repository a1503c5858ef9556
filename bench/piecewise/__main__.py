"""``python -m bench.piecewise``: eager breaks and mixed batches; `breaks` says how."""

import sys

from bench.piecewise.breaks import main

if __name__ == "__main__":
    sys.exit(main())
