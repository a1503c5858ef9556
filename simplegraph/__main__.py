"""``python -m simplegraph``."""

import sys

from simplegraph.cli import main

sys.exit(main())
