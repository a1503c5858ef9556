"""CUDA graphs for PyTorch modules, without a compiler.

Example:
    >>> import simplegraph as sg
    >>> model = sg.wrap(module.eval(), capture_sizes=[1, 2, 4, 8])
    >>> with torch.inference_mode():
    ...     y = model(x)  # eager, captured, or replayed; the answer is eager's

Warnings go to the logger "simplegraph", which has no handler of its own: a program that configures no logging sees them
on stderr. ``logging.getLogger("simplegraph").setLevel(logging.ERROR)`` silences them.
"""

from __future__ import annotations

from simplegraph._lazy import public_names
from simplegraph.base.version import VERSION as __version__
from simplegraph.integrations import register as _register

__all__, __getattr__ = public_names(__name__, __file__)
__all__ += ["__version__"]
_register()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
