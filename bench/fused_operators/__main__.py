"""``python -m bench.fused_operators``: fused operators of several libraries: first use, time in a graph, error."""

from __future__ import annotations

import sys

from bench.fused_operators.measure import main

sys.exit(main())
